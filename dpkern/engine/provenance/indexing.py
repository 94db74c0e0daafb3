"""Follow rows through ``x[index]`` and ``x[index] = value``.

The index is applied to the numbers 0, 1, ... of the rows, laid out like ``x`` with its other
dimensions shortened to 1: what comes back says which row every picked entry is from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .places import at_places, written_at_places
from .rules import TrackedCall, action, ends_of, with_state
from .states import NO_RECORD, Ids, Mixed, OneRecord, PerRecord, RecordSum, State
from .tensor import state_of, track, untracked

_Rows = tuple[Ids, int | None]
"""Numbers of the selected rows, and their dimension in the result; None for a single row."""


@action("__getitem__")
def read(call: TrackedCall) -> Any:
    """Select rows, and their records by the same index."""
    x, index = call.args
    result = call.plain()
    state = _picked(call, x, index, result)
    if not _cuts_by_own(state, index):
        state = call.mixed("cuts samples at a number computed over others")
    if state is None:
        return result
    return track(result, state) if result is x else with_state(call, result, state)


def _picked(call: TrackedCall, x: Tensor, index: Any, out: Tensor) -> State | None:
    state = state_of(x)
    if isinstance(state, RecordSum):
        return state if call.tracks_only(x) else call.mixed("picks by the values of samples")
    if isinstance(state, OneRecord):
        same = all(isinstance(s, OneRecord) and s.record == state.record for s in call.states)
        if not same:
            return call.mixed("picks by the values of other samples")
        alone = out.dim() == x.dim() + 1 and _is_new_row(index)
        return PerRecord(state.batch, np.array([state.record])) if alone else state
    if isinstance(state, PerRecord) and state.dim == 0 and len(call.tracked) == 1:
        if isinstance(index, slice):
            return PerRecord(state.batch, state.ids[index])
        if type(index) is int and not state.batch.has_ordered_rows:
            return _one(state, int(state.ids[index]))
        if isinstance(index, Tensor) and index.dtype is torch.int64 and index.dim() == 1:
            return PerRecord(state.batch, state.ids[index.cpu().numpy()])
        if isinstance(index, tuple) and all(isinstance(i, slice) for i in index):
            first = index[0] if index else slice(None)
            if first.start is first.stop is first.step is None:
                return state
            return PerRecord(state.batch, state.ids[first])
    parts = expanded(index, x.dim())
    if state is None:
        return _looked_up(call, parts, out)
    if not isinstance(state, PerRecord):
        return state
    found = rows_of(parts, x, state.dim, len(state.ids))
    if found is None or (found[1] is not None and out.shape[found[1]] != len(found[0])):
        return call.mixed("picks samples in a way that cannot be followed")
    ids, place = state.ids[found[0]], found[1]
    if any(state_of(p) is not None and _is_mask(p) for p in parts):
        state.batch.has_chosen_rows = True
    if not _picked_by_own(call, x, state, parts, ids, place):
        return call.mixed("picks samples by the values of other samples")
    if place is not None:
        return PerRecord(state.batch, ids, place)
    if state.batch.has_ordered_rows:
        return call.mixed("picks one of samples that were sorted")
    return _one(state, int(ids[0]))


def _cuts_by_own(state: State | None, index: Any) -> bool:
    """Whether slices end at constants, or at numbers of the only record that they cut."""
    ends: list[Any] = ends_of(index)
    if not ends:
        return True
    record = state.record if isinstance(state, OneRecord) else NO_RECORD
    return all(isinstance(end, OneRecord) and end.record == record for end in ends)


def _one(state: PerRecord, record: int) -> OneRecord | None:
    return None if record == NO_RECORD else OneRecord(state.batch, record)


def _is_new_row(index: Any) -> bool:
    return index is None or (isinstance(index, tuple) and index[:1] == (None,))


def _picked_by_own(
    call: TrackedCall, x: Tensor, state: PerRecord, parts: list[Any], ids: Ids, place: int | None
) -> bool:
    """Whether every entry was selected by a number or a mask of its own record."""
    source = 0
    advanced = [p for p in parts if _is_advanced(p)]
    ndim = max((1 if _is_mask(p) else np.ndim(_values(p)) for p in advanced), default=0)
    start = _place_of_advanced(parts)
    for part in parts:
        if part is None:
            continue
        width = part.dim() if isinstance(part, Tensor) and _is_mask(part) else 1
        their = state_of(part)
        if isinstance(their, (OneRecord, RecordSum)):
            return False
        if isinstance(their, PerRecord):
            if _is_mask(part):
                own = their.dim + source == state.dim and their.matches(state)
            else:
                own = their.dim - part.dim() + ndim + start == place
                own = own and np.array_equal(their.ids, ids)
            if not own or their.batch is not state.batch:
                return False
        source += width
    return True


def _looked_up(call: TrackedCall, parts: list[Any], out: Tensor) -> State | None:
    """Return the state of constants that samples index; their rows are those of the index."""
    found: PerRecord | None = None
    advanced = [p for p in parts if _is_advanced(p)]
    ndim = max(np.ndim(_values(p)) for p in advanced) if advanced else 0
    start = _place_of_advanced(parts)
    for part in parts:
        their = state_of(part)
        if their is None:
            continue
        if isinstance(their, OneRecord) and len(call.tracked) == 1 and not _is_mask(part):
            return their
        if not isinstance(their, PerRecord) or _is_mask(part):
            return call.mixed("picks constants by the values of samples")
        place = start + their.dim - part.dim() + ndim
        if found is not None and (found.dim != place or not found.matches(their)):
            return call.mixed("picks constants by the values of different samples")
        found = PerRecord(their.batch, their.ids, place)
    if found is None or out.shape[found.dim] != len(found.ids):
        return call.mixed("picks constants by the values of samples")
    return found


def expanded(index: Any, ndim: int) -> list[Any]:
    """Return the index with one entry for each dimension that it uses, None for new ones."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(
        (part.dim() if isinstance(part, Tensor) and _is_mask(part) else np.ndim(part))
        if _is_advanced(part) and _is_mask(part)
        else 1
        for part in parts
        if part is not None and part is not Ellipsis
    )
    place = next((i for i, p in enumerate(parts) if p is Ellipsis), None)
    rest = [slice(None)] * (ndim - taken)
    if place is None:
        return parts + rest
    return parts[:place] + rest + parts[place + 1 :]


def _is_advanced(part: Any) -> bool:
    """Whether an entry is an index of several values; single numbers count as ints."""
    if isinstance(part, Tensor):
        return part.dim() > 0 or part.dtype is torch.bool
    return isinstance(part, (list, tuple, np.ndarray)) and np.ndim(part) > 0


def _is_mask(part: Any) -> bool:
    if isinstance(part, Tensor):
        return part.dtype in (torch.bool, torch.uint8)
    return np.asarray(part).dtype == bool


def _values(part: Any) -> np.ndarray[Any, Any]:
    if isinstance(part, Tensor):
        return untracked(part).detach().cpu().numpy()
    return np.asarray(part)


def _place_of_advanced(parts: list[Any]) -> int:
    """Return the first dimension of the result that advanced indices make; 0 if they are apart."""
    places = [i for i, p in enumerate(parts) if _is_advanced(p)]
    between = parts[places[0] : places[-1] + 1] if places else []
    # Torch applies integers first, so that only slices and new dimensions separate indices.
    if any(p is None or isinstance(p, slice) for p in between):
        return 0
    return sum(1 for p in parts[: places[0]] if p is None or isinstance(p, slice)) if places else 0


def rows_of(parts: list[Any], x: Tensor, dim: int, rows: int) -> _Rows | None:
    """Return the rows that an index selects, or None if a position of the result has several."""
    if any(isinstance(p, bool) or (_is_advanced(p) and _is_mask(p) and not np.ndim(_values(p)))
           for p in parts):  # fmt: skip
        return None
    if any(isinstance(p, (list, tuple)) and np.ndim(p) > 1 for p in parts):
        return None  # torch unpacks some nested lists and not others
    index: Any = []
    shape: list[int] = []
    source = 0
    for part in parts:
        if part is None:
            index.append(None)
            continue
        if _is_advanced(part):
            values = _values(part)
            positions: tuple[Any, ...] = np.nonzero(values) if _is_mask(part) else (values,)
        else:
            positions = (int(part) if np.ndim(part) == 0 and not isinstance(part, slice) else part,)
        for position in positions:
            own = source == dim
            shape.append(rows if own else 1)
            if own:
                index.append(position)
            elif isinstance(position, np.ndarray) and position.ndim:
                index.append(np.zeros_like(position, dtype=np.int64))
            else:
                index.append(slice(None) if isinstance(position, slice) else 0)
            source += 1
    given = tuple(torch.from_numpy(i) if isinstance(i, np.ndarray) else i for i in index)
    numbers = torch.arange(rows).reshape(shape)[given].numpy()
    own_part = _part_at(parts, dim)
    advanced = any(_is_advanced(p) for p in parts)
    if not isinstance(own_part, slice) and not _is_advanced(own_part) and not advanced:
        return numbers.reshape(-1)[:1], None
    if isinstance(own_part, slice):
        place = _place_of_slice(parts, dim)
    else:
        place = None
    return _constant_rows(numbers, place)


def _part_at(parts: list[Any], dim: int) -> Any:
    source = 0
    for part in parts:
        if part is None:
            continue
        source += np.ndim(_values(part)) if _is_advanced(part) and _is_mask(part) else 1
        if source > dim:
            return part
    return None


def _place_of_slice(parts: list[Any], dim: int) -> int:
    """Return the dimension of the result that a slice of dimension ``dim`` becomes."""
    source = place = 0
    seen = False
    apart = _place_of_advanced(parts) == 0
    ndim = max((1 if _is_mask(p) else np.ndim(_values(p)) for p in parts if _is_advanced(p)),
               default=0)  # fmt: skip
    for part in parts:
        if part is None:
            place += 1
            continue
        if isinstance(part, slice):
            if source == dim:
                break
            source, place = source + 1, place + 1
            continue
        advanced = _is_advanced(part)
        source += np.ndim(_values(part)) if advanced and _is_mask(part) else 1
        if ndim and not seen:
            place, seen = place + ndim, True
    if ndim and not seen and apart:
        place += ndim  # indices that are apart put their dimensions first
    return place


def _constant_rows(numbers: Ids, place: int | None) -> _Rows | None:
    """Return the rows along the only dimension on which their numbers depend."""
    if numbers.ndim == 0:
        return numbers.reshape(1), None
    for candidate in range(numbers.ndim) if place is None else (place,):
        if candidate >= numbers.ndim:
            return None
        if numbers.size == 0:
            count = numbers.shape[candidate]
            return np.zeros(count, dtype=np.int64), candidate
        table = np.moveaxis(numbers, candidate, 0).reshape(numbers.shape[candidate], -1)
        if bool((table == table[:, :1]).all()):
            return table[:, 0], candidate
    return None


@action("__setitem__")
def write(call: TrackedCall) -> None:
    """Write values, whose records become those of whole rows; parts of rows must match."""
    x, index, value = call.args
    state = _written(call, x, index, value)
    if type(value) is Tensor and value.numel() > 1:
        at_places(call.batch)
    call.plain()
    with_state(call, x, state)


def _written(call: TrackedCall, x: Tensor, index: Any, value: Any) -> State:
    target, new = state_of(x), state_of(value)
    if ends_of(index) and not _cuts_by_own(_picked(call, x, index, untracked(x)[index]), index):
        return call.mixed("writes where the values of samples say")
    if not call.tracks_only(x, value):
        return _written_by_mask(call, target, new)
    if isinstance(target, (RecordSum, Mixed)) or isinstance(new, (RecordSum, Mixed)):
        return call.mixed("writes a sum over samples")
    if isinstance(target, OneRecord):
        if new is None or (isinstance(new, OneRecord) and new.record == target.record):
            return target
        return call.mixed("writes one sample into another")
    parts = expanded(index, x.dim())
    region = _region_ndim(x, index)
    dim = target.dim if isinstance(target, PerRecord) else _target_dim(parts, value, new, region)
    if target is None and dim is None:
        return call.mixed("writes in a way that cannot be followed")
    assert dim is not None
    size = x.shape[dim] if x.dim() else 0
    ids = target.ids if isinstance(target, PerRecord) else np.full(size, NO_RECORD)
    batch = (new or target).batch  # type: ignore[union-attr]
    assert batch is not None
    found = rows_of(parts, x, dim, size) if x.dim() else None
    if new is None:
        if found is None or len(np.unique(found[0])) < size:
            written_at_places(batch)
        return PerRecord(batch, ids, dim)
    if found is None:
        return call.mixed("writes in a way that cannot be followed")
    places, place = found
    if isinstance(new, OneRecord):
        written = np.full(len(places), new.record)
    elif place is not None and new.dim - value.dim() + region == place:
        written = np.repeat(new.ids, len(places)) if len(new.ids) == 1 else new.ids
    else:
        return call.mixed("writes rows of other samples")
    whole = all(p is None or p == slice(None) for p in parts if p is not _part_at(parts, dim))
    before = ids[places]
    several = len(written) != len(places) or len(np.unique(places)) != len(places)
    if several and not np.array_equal(before, written):
        return call.mixed("writes several samples into one")
    if not whole and bool(((before != written) & (before != NO_RECORD)).any()):
        return call.mixed("writes rows of other samples")
    result = ids.copy()
    result[places] = written
    return PerRecord(batch, result, dim)


def _region_ndim(x: Tensor, index: Any) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return untracked(x)[index].dim()


def _target_dim(parts: list[Any], value: Any, new: Any, region: int) -> int | None:
    """Return the dimension of constants that rows are written along."""
    if isinstance(new, OneRecord) or not any(isinstance(p, slice) for p in parts):
        return 0
    source = 0
    for part in parts:
        if part is None:
            continue
        place = new.dim - value.dim() + region
        if isinstance(part, slice) and _place_of_slice(parts, source) == place:
            return source
        source += np.ndim(_values(part)) if _is_advanced(part) and _is_mask(part) else 1
    return 0


def _written_by_mask(call: TrackedCall, target: State | None, new: State | None) -> State:
    """Return the state after writing constants where each sample's own mask says."""
    x, mask = call.args[:2]
    own = state_of(mask)
    if new is None and isinstance(target, PerRecord) and isinstance(own, PerRecord):
        same = target.dim == own.dim == 0 and own.matches(target)
        if same and call.tracks_only(x, mask) and _is_mask(mask):
            return target
    return call.mixed("writes where the values of samples say")
