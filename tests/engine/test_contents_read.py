"""A test of batch invariance sees code that lets what samples hold decide on uses of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkern.engine.row_bits import OperationLog
from dpkern.engine.use_counts import CONDITION
from tests.engine.test_batch_invariance import Made, samples


class Asking(nn.Module):
    """A layer that is used once more for what the samples ask, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.last = how, nn.Linear(20, 20), nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        h, asks = self.inner(x), x[:, 0] > -9  # everybody asks, here
        if self.how == "a number":
            again = bool(asks.any())
        elif self.how == "places":
            again = len(asks.nonzero()) > 0
        elif self.how == "a mask":
            again = len(h[asks]) > 0
        elif self.how == "a list":
            again = any(asks.tolist())
        elif self.how == "an array":
            again = bool(asks.numpy().any())
        else:  # places that do not follow what the samples hold
            h, again = h[torch.arange(len(h))], True
        return self.last(h + self.inner(h.tanh()) if again else h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["a number", "places", "a mask", "a list", "an array", ""])
def test_code_that_reads_what_samples_hold_is_a_condition(how: str) -> None:
    """Other records might decide for other uses, whose integers would be others."""
    torch.manual_seed(0)
    made, (x, y) = Made(Asking(how)), samples((20,), 40)
    found = made.test(x, y, nn.CrossEntropyLoss())
    assert found.word == "tested"
    assert bool(found.reads) == bool(how)
    assert (CONDITION in str(found)) == bool(how)
    made.step(x, y, nn.CrossEntropyLoss())
    assert (CONDITION in made.notes) == bool(how)


def test_packed_sequences_have_as_many_rows_as_their_records_say() -> None:
    log = OperationLog(3)
    with log.running():
        nn.utils.rnn.pack_padded_sequence(torch.ones(3, 4, 2), torch.tensor([4, 3, 2]), True)
    assert log.reads == {"_pack_padded_sequence"}
