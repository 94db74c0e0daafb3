"""Batches that are read at once: the same as those that a DataLoader collates row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from dpkern.base.rng import Key
from dpkern.engine import loader as loaders
from dpkern.engine.gathered import reader
from dpkern.engine.loader import PrivateLoader


def rows(n: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(n, 3, 2, generator=generator),
        torch.arange(n),
        torch.randn(2, n, generator=generator, dtype=torch.float64).T,
        torch.arange(n) % 2 == 0,
    )


class Own(TensorDataset):
    """A data set of one's own."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Named(torch.Tensor):
    """A kind of tensor of one's own."""


READ: list[tuple[str, Callable[[], Dataset[Any]]]] = [
    ("tensors", rows),
    ("one tensor", lambda: TensorDataset(torch.arange(9.0))),
    ("a subset", lambda: Subset(rows(), list(range(39, 1, -2)))),
    ("a range of it", lambda: Subset(rows(), range(5, 25))),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("make", [row[1] for row in READ], ids=[row[0] for row in READ])
@pytest.mark.parametrize("sampling", ["poisson", "fixed", "shuffled"])
def test_the_batches_are_those_of_a_data_loader(
    make: Callable[[], Dataset[Any]], sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn() -> list[list[torch.Tensor]]:
        ordinary = DataLoader(make(), batch_size=4, shuffle=True)
        private = PrivateLoader(ordinary, sampling=sampling, key=Key.from_unsafe_seed(3))
        assert sampling == "poisson" or reader(private) is not None
        return list(private)

    at_once = drawn()
    monkeypatch.setattr(loaders, "reader", lambda _: None)
    one_by_one = drawn()
    assert len(at_once) == len(one_by_one) > 1
    for mine, theirs in zip(at_once, one_by_one, strict=True):
        assert type(mine) is type(theirs) is list
        for one, other in zip(mine, theirs, strict=True):
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
            assert torch.equal(one, other)


REST: list[tuple[str, Callable[[], Dataset[Any]], dict[str, Any]]] = [
    ("a data set of one's own", lambda: Own(torch.ones(9, 2)), {}),
    ("a subset of it", lambda: Subset(Own(torch.ones(9, 2)), [1, 2, 3]), {}),
    ("a list", lambda: [torch.ones(2)] * 9, {}),  # type: ignore[return-value,list-item]
    ("a collation of one's own", rows, {"collate_fn": lambda rows: default_collate(rows)}),
    ("workers", rows, {"num_workers": 1}),
    ("negative places", lambda: Subset(rows(), [-1, 2, 3]), {}),
    ("no places", lambda: Subset(rows(), []), {}),
    ("gradients", lambda: TensorDataset(torch.ones(9, 2, requires_grad=True)), {}),
    ("tensors of one's own", lambda: TensorDataset(torch.ones(9, 2).as_subclass(Named)), {}),
]


@pytest.mark.parametrize(("make", "options"), [r[1:] for r in REST], ids=[r[0] for r in REST])
def test_everything_else_is_left_to_the_data_loader(
    make: Callable[[], Dataset[Any]], options: dict[str, Any]
) -> None:
    assert reader(DataLoader(make(), batch_size=3, **options)) is None


def test_a_batch_shares_no_memory_with_the_data_set() -> None:
    data = rows()
    read = reader(DataLoader(data))
    assert read is not None
    batch = read([0, 1])
    for tensor in batch:
        tensor.zero_()
    assert float(data.tensors[0][:2].abs().sum()) > 0
