"""Operations that move, repeat or join rows: views, permutations, concatenation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .rowwise import dims_of
from .rules import Call, action, joined, rule
from .states import NO_RECORD, Ids, OneRecord, PerRecord, RecordSum, State
from .tensor import retrack, track


def _state(call: Call) -> Any:
    return call.tracked[0]._state  # type: ignore[attr-defined]


@rule(
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "ravel",
    "view_as",
    "reshape_as",
    "atleast_2d",
)
def reshaped(call: Call, out: Tensor) -> State | None:
    """Rows that are merged with other dimensions, or split again, keep their records."""
    state = _state(call)
    if not isinstance(state, PerRecord):
        return state  # type: ignore[no-any-return]
    found = reshape_ids(state.ids, state.dim, tuple(call.tracked[0].shape), tuple(out.shape))
    if found is None:
        return call.mixed("joins rows of different samples into one")
    return PerRecord(state.batch, *found)


def reshape_ids(
    ids: Ids, dim: int, before: Sequence[int], after: Sequence[int]
) -> tuple[Ids, int] | None:
    """Records and dimension of the rows after a view; None if a row then has several records."""
    lead, rows = math.prod(before[:dim]), before[dim]
    # Each dimension of the result spans a block of the flattened input.
    seen = 1
    for place, size in enumerate(after):
        rest = math.prod(after[place + 1 :])
        if size != 1 or seen * size == lead * rows:
            inner = math.prod(before[dim + 1 :])
            if seen == lead and size == rows and rest == inner:
                return ids, place
            if seen == lead and rows and size % rows == 0 and rest * (size // rows) == inner:
                return np.repeat(ids, size // rows), place  # rows merged with what follows them
            if seen == 1 and size == lead * rows and rest == inner:
                return np.tile(ids, lead), place  # rows merged with what stands before them
            if (
                seen == 1
                and lead * rows
                and size % (lead * rows) == 0
                and rest * size == lead * rows * inner
            ):
                return np.repeat(np.tile(ids, lead), size // (lead * rows)), place
            if seen == lead and size and rows % size == 0 and size < rows and size > 1:
                table = ids.reshape(size, rows // size)
                if bool((table == table[:, :1]).all()):
                    return table[:, 0], place
                if (
                    (table == table[:1]).all()
                    and place + 1 < len(after)
                    and after[place + 1] == rows // size
                ):
                    return table[0], place + 1
        seen *= size
    if rows == 1:
        return ids, _spare(after)
    return None


def _spare(after: Sequence[int]) -> int:
    """A dimension of size 1 that can stand for the only row."""
    return next((i for i, size in enumerate(after) if size == 1), 0)


@rule(
    "permute",
    "transpose",
    "swapaxes",
    "swapdims",
    "movedim",
    "moveaxis",
    "t",
    "T.get",
    "mT.get",
    "adjoint",
    "numpy_T",
)
def permuted(call: Call, out: Tensor) -> State | None:
    """The rows' dimension moves with the others: found by permuting the numbers of the dimensions."""
    state = _state(call)
    if not isinstance(state, PerRecord):
        return state  # type: ignore[no-any-return]
    x = call.tracked[0]
    numbered = torch.empty(tuple(range(2, x.dim() + 2)), device="meta")
    args = [numbered if a is x else a for a in call.args]
    kwargs = {k: numbered if v is x else v for k, v in call.kwargs.items()}
    moved = call.func(*args, **kwargs)
    return PerRecord(state.batch, state.ids, list(moved.shape).index(state.dim + 2))


@rule("expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave")
def repeated(call: Call, out: Tensor) -> State | None:
    """Rows may be repeated: each copy belongs to the same record."""
    state, x = _state(call), call.tracked[0]
    if isinstance(state, OneRecord):
        return state
    if not isinstance(state, PerRecord):
        return call.mixed("repeats a sum over samples")
    place = state.dim + out.dim() - x.dim()
    if call.name == "repeat_interleave":
        repeats, dim = call.argument(1, "repeats"), call.argument(2, "dim")
        if dim is None:
            return call.mixed("flattens the samples")
        if int(dim) % x.dim() == state.dim:
            times = repeats.tolist() if isinstance(repeats, Tensor) else repeats
            return PerRecord(state.batch, np.repeat(state.ids, times), state.dim)
        return PerRecord(state.batch, state.ids, state.dim)
    size, rows = out.shape[place], len(state.ids)
    if rows and size % rows == 0:
        return PerRecord(state.batch, np.tile(state.ids, size // rows), place)
    return (
        call.mixed("changes the number of rows")
        if rows != size
        else PerRecord(state.batch, state.ids, place)
    )


_MOVES = {
    # name: place and default of the dimension
    **dict.fromkeys(("flip",), (1, None)),
    **dict.fromkeys(("fliplr",), (9, 1)),
    **dict.fromkeys(("flipud",), (9, 0)),
    **dict.fromkeys(("roll",), (2, None)),
    **dict.fromkeys(("index_select", "narrow"), (1, None)),
    **dict.fromkeys(("chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split"), (2, 0)),
}


@action(*_MOVES)
def moved(call: Call) -> Any:
    """Operations that pick or reorder positions along a dimension, applied to the records as well."""
    state, x = _state(call), call.tracked[0]
    if not isinstance(state, PerRecord) or len(call.tracked) > 1 or x is not call.args[0]:
        return _with(call, call.mixed("picks samples by other samples"))
    place, default = _MOVES[call.name]
    dim = call.argument(place, "dim", "dims", default=default)
    if call.name == "flip" and len(call.args) > 2:
        dim = call.args[1:]
    dims = dims_of(dim, x.dim())
    if dims is None:
        return _with(call, call.mixed("moves entries between samples"))
    if state.dim not in dims:
        return _each(call, call.plain(), lambda out: PerRecord(state.batch, state.ids, state.dim))
    if len(dims) > 1 and call.name == "roll":
        return _with(call, call.mixed("moves entries between samples"))
    shape = [1] * x.dim()
    shape[state.dim] = len(state.ids)
    rows = torch.from_numpy(state.ids.copy()).reshape(shape)
    args = [rows if a is x else a.cpu() if isinstance(a, Tensor) else a for a in call.args]
    ids = call.func(
        *args, **{k: v.cpu() if isinstance(v, Tensor) else v for k, v in call.kwargs.items()}
    )
    result = call.plain()
    parts = ids if isinstance(ids, (tuple, list)) else (ids,)
    states = iter([PerRecord(state.batch, part.reshape(-1).numpy(), state.dim) for part in parts])
    return _each(call, result, lambda out: next(states))


def _with(call: Call, state: State) -> Any:
    return _each(call, call.plain(), lambda out: state)


def _each(call: Call, result: Any, state: Callable[[Tensor], State]) -> Any:
    """The result with a state for each of its tensors."""
    if isinstance(result, Tensor):
        return (
            track(result, state(result))
            if result is call.args[0]
            else retrack(result, state(result))
        )
    if isinstance(result, (tuple, list)):
        return type(result)([_each(call, item, state) for item in result])
    return result


@action("unbind", "__iter__", "__reversed__")
def unbound(call: Call) -> Any:
    """One tensor for each position along a dimension."""
    state, x = _state(call), call.tracked[0]
    dim = int(call.argument(1, "dim", default=0)) % max(x.dim(), 1)
    with torch._C.DisableTorchFunctionSubclass():
        parts = x.unbind(dim)
    if not isinstance(state, PerRecord):
        made: list[Any] = [_each(call, p, lambda out: state) for p in parts]
    elif state.dim == dim:
        alone = [OneRecord(state.batch, int(i)) if i != NO_RECORD else None for i in state.ids]
        made = [
            p if s is None else _each(call, p, lambda out, s=s: s)
            for p, s in zip(parts, alone, strict=True)
        ]
    else:
        less = state.dim - (dim < state.dim)
        made = [_each(call, p, lambda out: PerRecord(state.batch, state.ids, less)) for p in parts]
    if call.name == "__iter__":
        return iter(made)
    return made[::-1] if call.name == "__reversed__" else tuple(made)


@rule("cat", "concat", "concatenate", "hstack", "vstack")
def concatenated(call: Call, out: Tensor) -> State | None:
    """Rows of several tensors one after the other; rows of constants belong to no record."""
    tensors = list(call.argument(0, "tensors"))
    dim = {"hstack": 1, "vstack": 0}.get(call.name, call.argument(1, "dim", default=0))
    dim = int(dim) % out.dim()
    states = [getattr(t, "_state", None) for t in tensors]
    known = [s for s in states if s is not None]
    batch = known[0].batch
    rows = [s for s in known if isinstance(s, PerRecord)]
    if all(isinstance(s, OneRecord) for s in known) and len({s.record for s in known}) == 1:
        return known[0]
    if any(isinstance(s, RecordSum) for s in known):
        return call.mixed("joins sums over samples")
    if any(isinstance(s, PerRecord) and s.dim != dim for s in known):
        ids = joined(call, [s.ids for s in rows]) if len(rows) == len(known) else None
        if ids is None or len({s.dim for s in rows}) > 1:
            return call.mixed("puts rows of different samples side by side")
        return PerRecord(batch, ids, rows[0].dim)
    parts = []
    for tensor, state in zip(tensors, states, strict=True):
        size = tensor.shape[dim]
        if isinstance(state, PerRecord):
            parts.append(state.ids)
        else:
            parts.append(np.full(size, NO_RECORD if state is None else state.record))
    return PerRecord(batch, np.concatenate(parts), dim)


@rule("stack")
def stacked(call: Call, out: Tensor) -> State | None:
    """Single samples become rows; rows of the same samples stay rows."""
    tensors = list(call.argument(0, "tensors"))
    dim = int(call.argument(1, "dim", default=0)) % out.dim()
    states = [getattr(t, "_state", None) for t in tensors]
    known = [s for s in states if s is not None]
    batch = known[0].batch
    if all(isinstance(s, OneRecord) for s in known):
        ids = np.array([NO_RECORD if s is None else s.record for s in states])
        return PerRecord(batch, ids, dim)
    if all(isinstance(s, RecordSum) for s in known):
        reductions = {(s.reduction, s.rescaled) for s in known}
        shares = frozenset[int]().union(*(s.shares for s in known))
        if len(reductions) == 1:
            return RecordSum(batch, known[0].reduction, known[0].rescaled, shares)
        return call.mixed("puts sums and means over samples side by side")
    rows = [s for s in known if isinstance(s, PerRecord)]
    ids_of_rows = joined(call, [s.ids for s in rows]) if len(rows) == len(known) else None
    if ids_of_rows is None or len({s.dim for s in rows}) > 1:
        return call.mixed("puts rows of different samples side by side")
    return PerRecord(batch, ids_of_rows, rows[0].dim + (dim <= rows[0].dim))


@rule("unfold")
def unfolded(call: Call, out: Tensor) -> State | None:
    """Windows within each sample: ``Tensor.unfold`` along another dimension, or ``F.unfold``."""
    state, x = _state(call), call.tracked[0]
    method = call.func is Tensor.unfold
    if not isinstance(state, PerRecord) or state.dim != 0:
        return state if isinstance(state, OneRecord) else call.mixed("cuts windows across samples")
    if method and int(call.argument(1, "dimension")) % x.dim() == 0:
        return call.mixed("cuts windows across samples")
    if not method and x.dim() != 4:
        return call.mixed("does not have the samples in its first dimension")
    return PerRecord(state.batch, state.ids, 0)
