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
from .states import PerRecord, RecordSum
from .tensor import WRITES, TrackedTensor

Call = Callable[..., Any]

ONE = frozenset((1,))
"""The shares of a mean over rows that have one entry each."""


def _nothing(*_: object) -> None:
    """Leave everything to Python."""


def _found(name: str) -> Call:
    return direct.look(name) or _nothing


_found("follow_rows")(
    {
        "tracked": TrackedTensor,
        "per_record": PerRecord,
        "record_sum": RecordSum,
        "written": WRITTEN,
        "writes": WRITES,
        "context": torch._C.DisableTorchFunctionSubclass,
        "one": ONE,
        "cross_entropy": torch._C._nn.cross_entropy_loss,  # type: ignore[attr-defined]
        "any_negative": _found("any_negative"),
    }
)

tracked_alike = _found("tracked_alike")
"""Return a tree of plain tensors of known shapes as tracked aliases, given the state of each."""

entered = _found("entered")
"""Return the rows of a module's only argument, and the arguments as ordinary tensors."""

usual_cross_entropy = _found("usual_cross_entropy")
"""Follow ``cross_entropy`` where it is the mean over all records, each of one class."""
