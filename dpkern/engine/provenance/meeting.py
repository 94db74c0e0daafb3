"""Combine the states of several operands of one operation, by the rules of broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .places import BY_ORDER, at_places
from .rules import TrackedCall
from .states import NO_RECORD, Ids, OneRecord, PerRecord, RecordSum, State
from .tensor import Function, TrackedTensor

REDUCED = -1
"""The place of a dimension that an operation reduces over."""


def joined(ids: Sequence[Ids]) -> Ids | None:
    """Return the record of each row, on which all must agree; None if they disagree."""
    first = ids[0]
    for other in ids[1:]:
        if first is other:
            continue
        if len(first) != len(other):
            return None
        if np.array_equal(first, other):
            continue
        if not bool(((first == other) | (first == NO_RECORD) | (other == NO_RECORD)).all()):
            return None
        first = np.where(first == NO_RECORD, other, first)
    return first


def combined(call: TrackedCall, shape: Sequence[int], *, from_right: bool = True) -> State:
    """Return the state of an operation that combines its operands entry by entry.

    Args:
        call: the operation.
        shape: shape of its result.
        from_right: whether dimensions are aligned as broadcasting does, or from the left.
    """
    tracked, states, ndim = call.tracked, call.states, len(shape)
    state: Any = states[0]
    if len(call.operands) > len(tracked) and _meets_constants(call, ndim):
        at_places(call.batch)
        if state.batch.has_ordered_rows and any(t.requires_grad for t in tracked):
            return call.mixed(BY_ORDER)
    if type(state) is PerRecord and state.dim < ndim and shape[state.dim] == len(state.ids):
        same = (s is state or _same_rows(s, state) for s in states)
        if all(same) and (not from_right or all(t.dim() == ndim for t in tracked)):
            return state  # the usual case, found by a few comparisons
    if any(isinstance(s, RecordSum) for s in states):
        return call.mixed("is not linear in a sum over samples")
    single = {s.record for s in states if isinstance(s, OneRecord)}
    rows = [(t, s) for t, s in zip(tracked, states, strict=True) if isinstance(s, PerRecord)]
    if len(single) > 1 or any(bool((s.ids != r).any()) for _, s in rows for r in single):
        return call.mixed("combines two samples")
    if not rows:
        return states[0]
    places = {s.dim - t.dim() if from_right else s.dim for t, s in rows}
    if len(places) > 1:
        return call.mixed("lets the samples of one operand meet another dimension of the other")
    place = places.pop() + (ndim if from_right else 0)
    ids = joined([s.ids for _, s in rows])
    if ids is None:
        return call.mixed("combines rows of different samples")
    if not 0 <= place < ndim or shape[place] != len(ids):
        if 0 <= place < ndim and len(ids) == 1:
            return PerRecord(state.batch, np.repeat(ids, shape[place]), place)
        return call.mixed("changes the number of rows")
    if ids is state.ids and place == state.dim:
        return state  # type: ignore[no-any-return]
    return PerRecord(state.batch, ids, place)


def _meets_constants(call: TrackedCall, ndim: int) -> bool:
    """Whether a constant has an entry for each row."""
    rows = [(t, s) for t, s in zip(call.tracked, call.states, strict=True) if type(s) is PerRecord]
    if not rows:
        return False
    place, count = rows[0][1].dim - rows[0][0].dim(), len(rows[0][1].ids)
    return count > 1 and any(
        type(t) is not TrackedTensor and t.dim() >= -place and t.shape[place] == count
        for t in call.operands
    )


def _same_rows(one: State, other: PerRecord) -> bool:
    return type(one) is PerRecord and one.ids is other.ids and one.dim == other.dim


def place_of(call: TrackedCall, x: Tensor, dim: int) -> int | None:
    """Return the dimension of the result that ``dim`` of ``x`` becomes.

    It is found by running the operation on a tensor without data.

    ``REDUCED`` if the operation reduces over it, None if it cannot be told.
    """
    position = next((i for i, a in enumerate(call.args) if a is x), None)
    name = next((k for k, a in call.kwargs.items() if a is x), None)
    args = tuple(
        None if a is x else tuple(a) if isinstance(a, (list, torch.Size)) else a for a in call.args
    )
    kwargs = tuple((k, tuple(v) if isinstance(v, list) else v)
                   for k, v in call.kwargs.items() if v is not x and k != "out")  # fmt: skip
    try:
        return _place_of(call.func, x.dim(), dim, x.dtype, position, name, args, kwargs)
    except TypeError:  # tensors or other unhashable arguments
        return None


@lru_cache(maxsize=4096)
def _place_of(
    func: Function,
    ndim: int,
    dim: int,
    dtype: torch.dtype,
    position: int | None,
    name: str | None,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
) -> int | None:
    if any(isinstance(a, Tensor) for a in (*args, *(v for _, v in kwargs))):
        return None
    numbered = torch.empty(tuple(range(2, ndim + 2)), device="meta", dtype=dtype)
    given = [numbered if i == position else a for i, a in enumerate(args)]
    named = dict(kwargs) if name is None else {**dict(kwargs), name: numbered}
    try:
        result = func(*given, **named)
    except (RuntimeError, NotImplementedError, ValueError, IndexError):
        return None
    out = result[0] if isinstance(result, (tuple, list)) else result
    return list(out.shape).index(dim + 2) if dim + 2 in out.shape else REDUCED
