"""The usual loop's batch, entrance and loss, each in one call of C++ (``bindings/rows.cpp``).

Each call decides the most frequent case alone, in which rows are the records of a batch in their
order. It returns None for everything else, which the functions around it follow in Python. Without
a compiled module that is everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...ops import direct
from .aliases import WRITTEN
from .states import PerRecord, RecordSum, YieldedBatch
from .tensor import WRITES, TrackedTensor, Usual

Call = Callable[..., Any]

CROSS_ENTROPY: Any = torch._C._nn.cross_entropy_loss
"""The operation that ``F.cross_entropy`` runs."""

ONE = frozenset((1,))
"""The shares of a mean over rows that have one entry each."""


def _nothing(*_: object) -> None:
    """Leave everything to Python."""


def _found(name: str) -> Call:
    return direct.look(name) or _nothing


tracked_alike = _found("tracked_alike")
"""Return a tree of plain tensors of known shapes as tracked ones, given the state of each."""

entered = _found("entered")
"""Return the rows of a module's only argument, and the arguments as ordinary tensors."""

left = _found("left")
"""Track a module's output that nothing else holds, and return its node in the graph."""

loss_as_before = _found("loss_as_before")
"""Whether a backward pass has one loss, made and scaled as the same call has made it before."""


def follow_cross_entropy(others: Usual) -> Usual:
    """Return a function that follows the mean over all records of a batch, each of one class.

    Args:
        others: follows other calls of ``cross_entropy``.
    """
    _found("follow_rows")(
        {
            "tracked": TrackedTensor,
            "batch": YieldedBatch,
            "per_record": PerRecord,
            "record_sum": RecordSum,
            "written": WRITTEN,
            "writes": WRITES,
            "context": torch._C.DisableTorchFunctionSubclass,
            "one": ONE,
            "cross_entropy": CROSS_ENTROPY,
            "any_negative": _found("any_negative"),
            "other_cross_entropy": others,
        }
    )
    return direct.look("usual_cross_entropy") or others
