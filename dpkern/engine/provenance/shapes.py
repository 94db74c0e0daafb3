"""Follow rows through views, permutations of dimensions and repetition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .aliases import WRITTEN
from .meeting import place_of
from .rules import TrackedCall, action, finish_as, rule
from .states import Ids, OneRecord, PerRecord, RecordSum, State
from .tensor import USUAL, Function, TrackedTensor, retrack, state_of


def usual_reshape(
    func: Function, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Tensor | None:
    """Follow rows of all records in their order that are merged with positions inside them.

    So do logits and targets on their way to most losses. It returns None for all other calls.
    """
    x = args[0]
    if kwargs or WRITTEN or type(x) is not TrackedTensor or not {*map(type, args[1:])} <= {int}:
        return None
    state: Any = x._state
    if type(state) is not PerRecord or state.ids is not state.batch.all or state.dim:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        made: Tensor = func(*args)
        rows, records = made.shape[0] if made.dim() else 0, len(state.ids)
        if made is x or not (rows and records) or rows % records:
            return None
        return retrack(made, state.batch.spread_over(rows))


USUAL.update(dict.fromkeys((Tensor.flatten, Tensor.view, Tensor.reshape), usual_reshape))


@rule(*"view reshape flatten unflatten squeeze ravel view_as reshape_as atleast_1d".split())
def reshaped(call: TrackedCall, out: Tensor) -> State | None:
    """Keep the records of rows that are merged with other dimensions or split."""
    x, state = call.args[0], state_of(call.args[0])
    if not isinstance(state, PerRecord):
        return state
    before, after = tuple(x.shape), tuple(out.shape)
    if before == after or (math.prod(before) != math.prod(after) and state.dim < x.dim() - 1):
        return state  # view(dtype) changes the last dimension
    if math.prod(before) != math.prod(after):
        return call.mixed("reads several samples as one number, or one as several")
    found = reshape_ids(state.ids, state.dim, before, after)
    if found is None:
        return call.mixed("joins rows of different samples into one")
    if found[1] is None:
        return OneRecord(state.batch, int(state.ids[0]))
    return PerRecord(state.batch, found[0], found[1])


def reshape_ids(
    ids: Ids, dim: int, before: Sequence[int], after: Sequence[int]
) -> tuple[Ids, int | None] | None:
    """Return records and dimension of the rows after a view, or None if a row mixes records.

    The dimension is None for a single number of one record.
    """
    lead, rows, inner = math.prod(before[:dim]), before[dim], math.prod(before[dim + 1 :])
    if lead * rows * inner == 0:
        place = list(after).index(0)
        return ids[:0], place
    seen = 1  # product of the dimensions in front of ``place``
    for place, size in enumerate(after):
        rest = math.prod(after[place + 1 :])
        if size != 1 or seen * size == lead * rows:
            if seen == lead and size % rows == 0 and rest * (size // rows) == inner:
                return _repeated(ids, size // rows), place  # merged with what follows
            if seen == 1 and size % (lead * rows) == 0:
                return np.repeat(np.tile(ids, lead), size // (lead * rows)), place
            if seen == lead and rows % size == 0 and 1 < size < rows:
                table = ids.reshape(size, rows // size)
                if bool((table == table[:, :1]).all()):
                    return table[:, 0], place
                following = after[place + 1] if place + 1 < len(after) else 0
                if bool((table == table[:1]).all()) and following == rows // size:
                    return table[0], place + 1
        seen *= size
    if bool((ids == ids[0]).all()):
        return (np.full(after[0], ids[0]), 0) if len(after) else (ids, None)
    return None


def _repeated(ids: Ids, times: int) -> Ids:
    return ids if times == 1 else np.repeat(ids, times)


@rule(
    *"""permute transpose swapaxes swapdims movedim moveaxis t T.get mT.get H.get mH.get adjoint
    unsqueeze""".split()
)
def permuted(call: TrackedCall, out: Tensor) -> State | None:
    """Move the rows' dimension with the others."""
    x, state = call.args[0], state_of(call.args[0])
    if isinstance(state, OneRecord) and call.name == "unsqueeze" and out.dim() == 1:
        return PerRecord(state.batch, np.array([state.record]))
    if not isinstance(state, PerRecord):
        return state
    place = place_of(call, x, state.dim)
    if place is None or place < 0:
        return call.mixed("moves the samples where they cannot be followed")
    return PerRecord(state.batch, state.ids, place)


@rule("atleast_2d", "atleast_3d")
def at_least(call: TrackedCall, out: Tensor) -> State | None:
    """Add dimensions of size 1."""
    state = state_of(call.args[0])
    if not isinstance(state, PerRecord) or out.dim() == call.args[0].dim():
        return state
    place = place_of(call, call.args[0], state.dim)
    return call.mixed("is given a list") if place is None else PerRecord(
        state.batch, state.ids, place
    )  # fmt: skip


@rule("expand", "expand_as", "broadcast_to", "repeat", "tile")
def repeated(call: TrackedCall, out: Tensor) -> State | None:
    """Repeat rows: each copy belongs to the same record."""
    x, state = call.args[0], state_of(call.args[0])
    if state is None or isinstance(state, OneRecord):
        return state  # a constant with the shape of samples stays one
    if not isinstance(state, PerRecord):
        return call.mixed("repeats a sum over samples")
    place = state.dim + out.dim() - x.dim()
    size, rows = out.shape[place], len(state.ids)
    if size == rows:
        return PerRecord(state.batch, state.ids, place)
    if rows and size % rows == 0:
        return PerRecord(state.batch, np.tile(state.ids, size // rows), place)
    return call.mixed("changes the number of rows")


@rule("repeat_interleave")
def interleaved(call: TrackedCall, out: Tensor) -> State | None:
    """Repeat rows next to each other."""
    x, state = call.args[0], state_of(call.args[0])
    repeats, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if repeats is None or not call.tracks_only(x):
        return call.mixed("repeats samples as often as their values say")
    if isinstance(state, RecordSum):
        return call.mixed("repeats a sum over samples")
    if not isinstance(state, PerRecord):
        return state
    ids: Ids = state.ids
    if dim is None:
        found = reshape_ids(ids, state.dim, tuple(x.shape), (x.numel(),))
        if found is None:
            return call.mixed("flattens the samples")
        ids = found[0]
    elif int(dim) % x.dim() != state.dim:
        return state
    times = repeats.tolist() if isinstance(repeats, Tensor) else repeats
    place = 0 if dim is None else state.dim
    return PerRecord(state.batch, np.repeat(ids, times), place)


@action("broadcast_tensors", "meshgrid")
def broadcast(call: TrackedCall) -> Any:
    """Expand each tensor by itself; the results of ``meshgrid`` mix samples."""
    if call.name == "meshgrid":
        return finish_as(call, call.plain(), call.mixed("pairs all samples with each other"))
    given = call.args[0] if isinstance(call.args[0], (tuple, list)) else call.args
    shape = np.broadcast_shapes(*(tuple(t.shape) for t in given))
    return tuple(t.expand(shape) for t in given)
