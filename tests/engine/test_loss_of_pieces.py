"""Losses of pieces of a batch that are divided by the number of pieces, as in torch's loops."""

from __future__ import annotations

import warnings

import pytest
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
