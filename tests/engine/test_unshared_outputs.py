"""Outputs that only the running pass holds are marked themselves; all others through an alias."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.engine import passes
from dpkern.engine.provenance.tensor import TrackedTensor

B, STEPS = 4, 4

Kept = list[Any]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


class Keeping(nn.Module):
    """A module of which something holds on to the output.

    Args:
        keep: called with the output and what is kept.
    """

    def __init__(self, keep: Callable[[Tensor, Kept], Any]) -> None:
        super().__init__()
        self.inner, self.keep = mlp(), keep
        self.__dict__["kept"] = _Unseen()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.keep(out, self.__dict__["kept"].things)
        return out


class _Unseen:
    """A place that no guard looks into, as objects of this package are no state of a model."""

    __module__ = "numpy.unseen"

    def __init__(self) -> None:
        self.things: Kept = []


def object_itself(out: Tensor, kept: Kept) -> None:
    kept.append(out)


def graph_in_front_of_a_loss(out: Tensor, kept: Kept) -> None:
    kept.append((out * out).sum())  # its graph saves the output, and no Python object does


KEEPERS = (object_itself, graph_in_front_of_a_loss)


def outputs(module: nn.Module) -> Iterator[Tensor]:
    """Yield the output of some private steps."""
    data = TensorDataset(torch.randn(B * STEPS, 3), torch.randint(2, (B * STEPS,)))
    model, optimizer, loader = dpkern.PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=B),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sampling="shuffled",
    )
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        yield out
        nn.functional.cross_entropy(out, y).backward()
        optimizer.step()


def is_alias(out: Tensor) -> bool:
    return "Alias" in type(out.grad_fn).__name__


def test_an_output_of_which_nothing_is_kept_needs_no_alias() -> None:
    found = [(type(out), is_alias(out)) for out in outputs(mlp())]
    assert found == [(TrackedTensor, False)] * STEPS


@pytest.mark.parametrize("keep", KEEPERS, ids=lambda keep: keep.__name__)
def test_what_somebody_holds_stays_an_ordinary_tensor(keep: Callable[..., Any]) -> None:
    module = Keeping(keep)
    for out in outputs(module):
        assert type(out) is TrackedTensor
        assert is_alias(out)
        assert {type(kept) for kept in module.__dict__["kept"].things} == {Tensor}


def test_what_a_hook_of_the_user_keeps_stays_an_ordinary_tensor() -> None:
    module, unseen = mlp(), _Unseen()
    module.register_forward_hook(lambda m, args, out: unseen.things.append(out))
    assert all(is_alias(out) for out in outputs(module))
    assert {type(out) for out in unseen.things} == {Tensor}


def test_without_counting_holders_what_somebody_holds_would_be_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "is_held_as", lambda output, holders: True)
    module, unseen = mlp(), _Unseen()
    module.register_forward_hook(lambda m, args, out: unseen.things.append(out))
    assert not any(is_alias(out) for out in outputs(module))
    assert TrackedTensor in {type(out) for out in unseen.things}
