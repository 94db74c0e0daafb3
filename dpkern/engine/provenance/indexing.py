"""Indexing: ``x[index]`` and ``x[index] = value``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .rules import Call, action
from .states import NO_RECORD, Ids, Mixed, OneRecord, PerRecord, RecordSum, State
from .tensor import retrack, state_of, track, untracked


@action("__getitem__")
def read(call: Call) -> Any:
    """``x[index]``: rows are picked by the same index from the records."""
    x, index = call.args
    result = call.plain()
    state = _picked(call, x, index, result)
    if state is None:
        return result
    return track(result, state) if result is x else retrack(result, state)


def _picked(call: Call, x: Tensor, index: Any, out: Tensor) -> State | None:
    state = state_of(x)
    if isinstance(state, (RecordSum, Mixed)):
        return state if len(call.tracked) == 1 else call.mixed("picks by the values of samples")
    if isinstance(state, OneRecord):
        alone = all(isinstance(s, OneRecord) and s.record == state.record for s in call.states)
        return state if alone else call.mixed("picks by the values of other samples")
    parts = expanded(index, x.dim())
    if state is None:
        return _looked_up(call, parts, out)
    assert isinstance(state, PerRecord)
    found = rows_of(state, parts, x)
    if found is None:
        return call.mixed("picks samples in a way that cannot be followed")
    ids, place = found
    for other in call.tracked:
        if other is x:
            continue
        their = state_of(other)
        same_rows = isinstance(their, PerRecord) and their.dim == 0
        picked = isinstance(their, PerRecord) and np.array_equal(their.ids, ids)
        masked = getattr(other, "dtype", None) is torch.bool and isinstance(their, PerRecord)
        masked = masked and np.array_equal(their.ids, state.ids)  # type: ignore[union-attr]
        if not same_rows or not (picked or masked):
            return call.mixed("picks samples by the values of other samples")
    if place is None:
        if ids[0] == NO_RECORD:
            return None
        return OneRecord(state.batch, int(ids[0]))
    if not 0 <= place < out.dim() or out.shape[place] != len(ids):
        return call.mixed("picks samples in a way that cannot be followed")
    return PerRecord(state.batch, ids, place)


def _looked_up(call: Call, parts: list[Any], out: Tensor) -> State | None:
    """A table of constants indexed by samples' values: the result's rows are the index's."""
    advanced = [p for p in parts if isinstance(p, (Tensor, list, np.ndarray))]
    states = [state_of(p) for p in advanced]
    if len(advanced) == 1 and parts[0] is advanced[0] and advanced[0].dtype is not torch.bool:
        return states[0]
    return call.mixed("picks constants by the values of samples")


def expanded(index: Any, ndim: int) -> list[Any]:
    """The index with one entry for each dimension, None for new ones."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(
        (p.dim() if isinstance(p, Tensor) and p.dtype is torch.bool else 1)
        for p in parts
        if p is not None and p is not Ellipsis
    )
    place = next((i for i, p in enumerate(parts) if p is Ellipsis), None)
    rest = [slice(None)] * (ndim - taken)
    if place is None:
        return parts + rest
    return parts[:place] + rest + parts[place + 1 :]


def rows_of(state: PerRecord, parts: list[Any], x: Tensor) -> tuple[Ids, int | None] | None:
    """The records of the picked rows and their dimension (None: a single record)."""
    advanced = [p for p in parts if isinstance(p, (Tensor, list, np.ndarray))]
    source = place = 0
    first_advanced: int | None = None
    for part in parts:
        if part is None:
            place += 1
            continue
        is_advanced = isinstance(part, (Tensor, list, np.ndarray))
        values = _values(part) if is_advanced else None
        width = values.ndim if values is not None and values.dtype == bool else 1
        here = source <= state.dim < source + width
        if is_advanced and first_advanced is None:
            first_advanced = place
        if here:
            break
        source += width
        place += 0 if isinstance(part, int) or (is_advanced and part is not advanced[0]) else 1
    else:
        return None
    if isinstance(part, bool):
        return None
    if isinstance(part, int):
        # With another index of several values, this one is broadcast against it.
        return (state.ids[[part]], None) if not advanced else None
    if isinstance(part, slice):
        if len(advanced) > 1 or (advanced and np.ndim(_values(advanced[0])) != 1):
            return None
        return state.ids[part], place
    assert values is not None
    if any(np.ndim(_values(p)) != np.ndim(values) for p in advanced):
        return None
    if values.dtype == bool:
        if source != state.dim or len(advanced) > 1:
            return None
        return state.ids[np.nonzero(values)[0]], place
    if values.ndim != 1:
        return None
    return state.ids[values], first_advanced


def _values(part: Any) -> np.ndarray[Any, Any]:
    if isinstance(part, Tensor):
        return untracked(part).detach().cpu().numpy()
    return np.asarray(part)


@action("__setitem__")
def write(call: Call) -> None:
    """``x[index] = value``: whole rows take the value's records, parts of rows must have the same."""
    x, index, value = call.args
    state = _written(call, x, index, value)
    call.plain()
    if state_of(x) is None and state.batch is not None and state.batch.boundary is not None:
        state.batch.boundary.check_target(x, "__setitem__")
    retrack(x, state)


def _written(call: Call, x: Tensor, index: Any, value: Any) -> State:
    target, new = state_of(x), state_of(value)
    if any(state_of(t) is not None and t is not x and t is not value for t in call.tracked):
        masks = [state_of(t) for t in call.tracked if t is not x and t is not value]
        by_row = all(
            isinstance(m, PerRecord)
            and isinstance(target, PerRecord)
            and m.dim == 0
            and m.matches(target)
            for m in masks
        )
        if not by_row or new is not None:
            return call.mixed("writes where the values of samples say")
        assert target is not None
        return target
    if isinstance(target, (RecordSum, Mixed)) or isinstance(new, (RecordSum, Mixed)):
        return call.mixed("writes a sum over samples")
    batch = (new or target).batch  # type: ignore[union-attr]
    assert batch is not None
    if isinstance(target, OneRecord):
        if new is None or (isinstance(new, OneRecord) and new.record == target.record):
            return target
        return call.mixed("writes one sample into another")
    constants = np.full(x.shape[0] if x.dim() else 0, NO_RECORD)
    rows = target if isinstance(target, PerRecord) else PerRecord(batch, constants, 0)
    parts = expanded(index, x.dim())
    numbered = PerRecord(batch, np.arange(len(rows.ids)), rows.dim)
    found = rows_of(numbered, parts, x)
    if found is None:
        return call.mixed("writes in a way that cannot be followed")
    places, place = found
    if new is None:
        return rows
    if isinstance(new, OneRecord):
        ids = np.full(len(places), new.record)
    elif place is not None and new.dim - value.dim() == place - (x.dim() if len(places) else 1):
        ids = new.ids
    else:
        ids = new.ids if len(new.ids) == len(places) and new.dim == 0 and rows.dim == 0 else None
    if ids is None or len(ids) != len(places):
        return call.mixed("writes rows of other samples")
    whole = all(i == _at(parts, rows.dim) or p == slice(None) for i, p in enumerate(parts))
    result = rows.ids.copy()
    before = result[places]
    if not whole and bool(((before != ids) & (before != NO_RECORD)).any()):
        return call.mixed("writes rows of other samples")
    result[places] = ids
    return PerRecord(batch, result, rows.dim)


def _at(parts: list[Any], dim: int) -> int:
    """The place in the index of the entry for a dimension."""
    source = 0
    for i, part in enumerate(parts):
        if part is None:
            continue
        if source == dim:
            return i
        source += 1
    return -1
