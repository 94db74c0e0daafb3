"""Follow rows that are selected, reordered, split or concatenated."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .along import dims_of
from .meeting import joined
from .rules import TrackedCall, action, finish_as, note_size, rule
from .states import NO_RECORD, Mixed, OneRecord, PerRecord, RecordSum, State
from .tensor import retrack, state_of, untracked

_MOVES = {
    # name: place and default of the dimension
    **dict.fromkeys(("flip",), (1, None)),
    **dict.fromkeys(("fliplr",), (9, 1)),
    **dict.fromkeys(("flipud",), (9, 0)),
    **dict.fromkeys(("roll",), (2, None)),
    **dict.fromkeys(("index_select", "narrow", "select"), (1, None)),
    **dict.fromkeys("chunk split tensor_split split_with_sizes".split(), (2, 0)),
    **dict.fromkeys("unsafe_chunk unsafe_split unsafe_split_with_sizes".split(), (2, 0)),
}


@action(*_MOVES)
def moved(call: TrackedCall) -> Any:
    """Select or reorder positions along a dimension, and the records of the rows with them."""
    x, state = call.args[0], state_of(call.args[0])
    result = call.plain()
    if call.name == "index_select" and state is None:
        return finish_as(call, result, _looked_up(call))
    orders = [t for t in call.tracked if t is not x and not isinstance(state_of(t), Mixed)]
    if orders or state is None:
        return finish_as(call, result, call.mixed("picks samples by other samples"))
    if not isinstance(state, PerRecord):
        if isinstance(result, (tuple, list)):
            note_size(x)
        return finish_as(call, result, state)
    place, default = _MOVES[call.name]
    given = call.argument(place, "dim", "dims", default=default)
    if call.name == "flip" and len(call.args) > 2:
        given = call.args[1:]
    dims = dims_of(given, x.dim())
    if dims is None and x.dim() == 1:
        dims = {0}
    if dims is None or (len(dims) > 1 and call.name == "roll" and state.dim in dims):
        return finish_as(call, result, call.mixed("moves entries between samples"))
    if state.dim not in dims:
        lower = call.name == "select" and min(dims) < state.dim
        return finish_as(call, result, PerRecord(state.batch, state.ids, state.dim - lower))
    shape = [1] * x.dim()
    shape[state.dim] = len(state.ids)
    rows = torch.from_numpy(state.ids.copy()).reshape(shape)
    args = [rows if a is x else _on_cpu(a) for a in call.args]
    picked = call.func(*args, **{k: rows if v is x else _on_cpu(v) for k, v in call.kwargs.items()})
    parts = picked if isinstance(picked, (tuple, list)) else (picked,)
    if parts is picked:
        note_size(x)
    if call.name == "select" and state.batch.has_ordered_rows:
        return finish_as(call, result, call.mixed("picks one of samples that were sorted"))
    if call.name == "select":
        return finish_as(call, result, _one(state, int(parts[0].reshape(-1)[0])))
    states = [PerRecord(state.batch, part.reshape(-1).numpy(), state.dim) for part in parts]
    return finish_as(call, result, *states)


def _on_cpu(value: Any) -> Any:
    return untracked(value).cpu() if isinstance(value, Tensor) else value


def _one(state: PerRecord, record: int) -> OneRecord | None:
    return None if record == NO_RECORD else OneRecord(state.batch, record)


def _looked_up(call: TrackedCall) -> State:
    """Return the state of constants that are picked by each sample's own number."""
    index = call.argument(2, "index")
    state = state_of(index)
    dim = int(call.argument(1, "dim")) % call.args[0].dim()
    if isinstance(state, PerRecord) and index.dim() == 1:
        return PerRecord(state.batch, state.ids, dim)
    return state if isinstance(state, OneRecord) else call.mixed("picks constants by a sum")


@action("unbind", "__iter__", "__reversed__")
def unbound(call: TrackedCall) -> Any:
    """Return one tensor for each position along a dimension."""
    x = call.args[0]
    state: Any = state_of(x)
    dim = int(call.argument(1, "dim", default=0)) % max(x.dim(), 1)
    if call.name == "__reversed__":
        return x.flip(0)
    with torch._C.DisableTorchFunctionSubclass():
        parts = x.unbind(dim)
    if not isinstance(state, PerRecord) or state.dim == dim:
        note_size(x)
    if not isinstance(state, PerRecord):
        states: list[State | None] = [state] * len(parts)
    elif state.dim == dim and state.batch.has_ordered_rows:
        states = [call.mixed("picks single samples of some that were sorted")] * len(parts)
    elif state.dim == dim:
        states = [_one(state, int(i)) for i in state.ids]
    else:
        states = [PerRecord(state.batch, state.ids, state.dim - (dim < state.dim))] * len(parts)
    made = [p if s is None else retrack(p, s) for p, s in zip(parts, states, strict=True)]
    made = [untracked(p) if s is None else p for p, s in zip(made, states, strict=True)]
    return iter(made) if call.name == "__iter__" else tuple(made)


@rule("cat", "concat", "concatenate", "hstack", "vstack", "row_stack")
def concatenated(call: TrackedCall, out: Tensor) -> State | None:
    """Concatenate the records of several tensors' rows; rows of constants have none."""
    tensors = list(call.argument(0, "tensors"))
    dim = int(call.argument(1, "dim", "axis", default=0)) % max(out.dim(), 1)
    if call.name in ("vstack", "row_stack", "hstack"):
        if any(t.dim() < (1 if call.name == "hstack" else 2) for t in tensors):
            return stacked_rows(call, tensors, out)
        dim = 1 if call.name == "hstack" and out.dim() > 1 else 0
    return _in_a_row(call, tensors, dim)


def stacked_rows(call: TrackedCall, tensors: list[Tensor], out: Tensor) -> State:
    """Return the state of vectors of single samples that become rows of one tensor."""
    states = [state_of(t) for t in tensors]
    single = all(isinstance(s, OneRecord) for s in states if s is not None)
    if single and len(states) == out.shape[0]:
        return _rows_of_single(states)
    return call.mixed("puts rows of different samples side by side")


def _rows_of_single(states: list[State | None], dim: int = 0) -> PerRecord:
    ids = np.array([s.record if isinstance(s, OneRecord) else NO_RECORD for s in states])
    return PerRecord(next(s.batch for s in states if isinstance(s, OneRecord)), ids, dim)


def _in_a_row(call: TrackedCall, tensors: list[Tensor], dim: int) -> State:
    states = [state_of(t) for t in tensors]
    known = [s for s in states if s is not None]
    rows = [s for s in known if isinstance(s, PerRecord)]
    if any(isinstance(s, RecordSum) for s in known):
        return call.mixed("joins sums over samples")
    first: Any = known[0]
    if any(s.dim != dim for s in rows):
        ids = joined([s.ids for s in rows]) if len(rows) == len(known) else None
        if ids is None or len({s.dim for s in rows}) > 1:
            return call.mixed("puts rows of different samples side by side")
        return PerRecord(first.batch, ids, rows[0].dim)
    if all(isinstance(s, OneRecord) and s.record == first.record for s in known):
        return first  # type: ignore[no-any-return]
    parts = []
    for tensor, state in zip(tensors, states, strict=True):
        if isinstance(state, PerRecord):
            parts.append(state.ids)
        else:
            record = state.record if isinstance(state, OneRecord) else NO_RECORD
            parts.append(np.full(tensor.shape[dim], record))
    return PerRecord(first.batch, np.concatenate(parts), dim)


@rule("stack")
def stacked(call: TrackedCall, out: Tensor) -> State | None:
    """Turn single samples into rows, and keep rows that belong to the same samples."""
    tensors = list(call.argument(0, "tensors"))
    dim = int(call.argument(1, "dim", default=0)) % out.dim()
    states = [state_of(t) for t in tensors]
    known = [s for s in states if s is not None]
    if all(isinstance(s, OneRecord) for s in known):
        return _rows_of_single(states, dim)
    first: Any = known[0]
    if all(isinstance(s, RecordSum) for s in known):
        sums: list[Any] = known
        if len({(s.reduction, s.rescaled) for s in sums}) > 1:
            return call.mixed("puts sums and means over samples side by side")
        shares = frozenset[int]().union(*(s.shares for s in sums))
        return RecordSum(first.batch, first.reduction, first.rescaled, shares)
    rows = [s for s in known if isinstance(s, PerRecord)]
    ids = joined([s.ids for s in rows]) if len(rows) == len(known) else None
    if ids is None or len({s.dim for s in rows}) > 1:
        return call.mixed("puts rows of different samples side by side")
    return PerRecord(first.batch, ids, rows[0].dim + (dim <= rows[0].dim))


@action("_pack_padded_sequence")
def packed(call: TrackedCall) -> Any:
    """Follow packing: for each time step, the rows of all samples that are long enough."""
    data, sizes = call.plain()
    x, lengths, batch_first = call.args[:3]
    state, own = state_of(x), state_of(lengths)
    dim = 0 if batch_first else 1
    known = isinstance(state, PerRecord) and state.dim == dim and call.tracks_only(x, lengths)
    if own is not None and known:
        known = isinstance(own, PerRecord) and isinstance(state, PerRecord) and own.matches(state)
    if not known:
        mixed = call.mixed("packs sequences of unknown samples")
        return finish_as(call, (data, sizes), mixed)
    assert isinstance(state, PerRecord)
    ids = [state.ids[:size] for size in sizes.tolist()]
    return retrack(data, PerRecord(state.batch, np.concatenate(ids))), sizes


@action("_pad_packed_sequence")
def unpacked(call: TrackedCall) -> Any:
    """Follow unpacking; the first time step has a row of every sample."""
    padded, lengths = call.plain()
    state, sizes, batch_first = state_of(call.args[0]), call.args[1], call.args[2]
    if not isinstance(state, PerRecord) or not call.tracks_only(call.args[0]):
        return finish_as(call, (padded, lengths), call.mixed("unpacks unknown samples"))
    counts = sizes.tolist()
    steps = np.split(state.ids, np.cumsum(counts)[:-1])
    if any(not np.array_equal(step, steps[0][: len(step)]) for step in steps):
        return finish_as(call, (padded, lengths), call.mixed("unpacks unknown samples"))
    return retrack(padded, PerRecord(state.batch, steps[0], 0 if batch_first else 1)), lengths
