"""Losses whose terms weigh less than in torch: of pieces, and means over parts of a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern.base.errors import LossWarning
from tests.engine.replayed_loops import Loop, loop

pytestmark = pytest.mark.usefixtures("one_thread")


class Small(nn.Module):
    """One layer over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x).mean(1)
        return out


def train(rows: int, factor: float, reduction: str = "mean") -> list[str]:
    """Warnings of a few steps of batches of 8 in pieces."""
    run: Loop = loop(True, make=Small)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", LossWarning)
        for _, (x, y) in zip(range(4), run.batches(), strict=False):
            run.optimizer.zero_grad()
            for some, their in zip(x.split(rows), y.split(rows), strict=True):
                loss = F.cross_entropy(run.module(some), their, reduction=reduction)
                (loss * factor).backward()
            run.optimizer.step()
    return [str(each.message) for each in seen]


@pytest.mark.parametrize(
    ("rows", "factor", "reduction"), [(4, 0.5, "mean"), (2, 0.25, "mean"), (4, 1 / 8, "sum")]
)
def test_a_loss_that_is_divided_twice_warns_once(rows: int, factor: float, reduction: str) -> None:
    (said,) = train(rows, factor, reduction)
    assert f"the loss of {rows} of the 8 samples of a batch" in said
    assert "Leave the factor out" in said


@pytest.mark.parametrize(("rows", "factor"), [(4, 1.0), (8, 0.5), (4, 0.25), (2, 0.5)])
def test_other_constants_do_not(rows: int, factor: float) -> None:
    assert train(rows, factor) == []


def means_of(y: Tensor, out: Tensor, cut: int) -> Tensor:
    first, second = F.cross_entropy(out[:cut], y[:cut]), F.cross_entropy(out[cut:], y[cut:])
    return (first + second) / 2


def sums_of(y: Tensor, out: Tensor, cut: int) -> Tensor:
    sums = [F.cross_entropy(out[p], y[p], reduction="sum") for p in (slice(cut), slice(cut, None))]
    return (sums[0] + sums[1]) / len(out)


def row_means(y: Tensor, out: Tensor, cut: int) -> Tensor:
    return out[:cut].square().mean() + F.cross_entropy(out, y)


def weighted_means(y: Tensor, out: Tensor, cut: int) -> Tensor:
    weights = torch.tensor([1.0, 2.0, 0.5])
    losses = [F.cross_entropy(out[p], y[p], weights) for p in (slice(cut), slice(cut, None))]
    return (losses[0] + losses[1]) / 2


def beside_a_number(y: Tensor, out: Tensor, cut: int) -> Tensor:
    out.detach()[:cut].mean()  # of no loss
    return F.cross_entropy(out, y)


def mask(y: Tensor, out: Tensor, cut: int) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")[y > 0].mean()


def each_row(y: Tensor, out: Tensor, cut: int) -> Tensor:
    losses = [F.cross_entropy(out[k], y[k]) for k in range(len(y))]
    return sum(losses[1:], losses[0]) / len(y)


@pytest.mark.parametrize(
    ("loss", "warns"),
    [
        *((means_of, 2), (row_means, 1), (weighted_means, 2)),
        *((sums_of, 0), (mask, 0), (each_row, 0), (beside_a_number, 0)),
    ],
)
def test_means_over_samples_at_some_places_warn(
    loss: Callable[[Tensor, Tensor, int], Tensor], warns: int
) -> None:
    run: Loop = loop(True, make=Small)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", LossWarning)
        x, y = next(iter(run.batches()))
        loss(y, run.module(x), 4).backward()
    assert len(seen) == warns
    for each in seen:
        assert "divided by the number of all samples that passed" in str(each.message)
        assert each.filename == __file__


def test_a_sum_over_slices_trains_as_the_mean_does() -> None:
    def trained(loss: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
        run: Loop = loop(True, make=Small)
        for _, (x, y) in zip(range(3), run.batches(), strict=False):
            loss(y, run.module(x), 3).backward()
            run.optimizer.step()
        return torch.cat([p.detach().flatten() for p in run.module.parameters()])

    whole = trained(lambda y, out, cut: F.cross_entropy(out, y))
    assert torch.allclose(trained(sums_of), whole, atol=1e-5)
    assert torch.allclose(trained(each_row), whole, atol=1e-5)
