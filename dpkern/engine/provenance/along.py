"""Follow rows through operations along one dimension, which must not be that of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from .meeting import combined
from .rules import TrackedCall, action, finish_as, rule
from .states import PerRecord, State
from .tensor import state_of, untracked


def dims_of(value: Any, ndim: int) -> set[int] | None:
    """Return dimensions as non-negative numbers; None stands for all."""
    if value is None:
        return None
    values = value if isinstance(value, (tuple, list)) else (value,)
    return {int(v) % max(ndim, 1) for v in values} or None


_ALONG = {
    # name: place and default of the dimension
    **dict.fromkeys(
        """softmax log_softmax special_softmax special_log_softmax softmin cumsum cumprod
        logcumsumexp cummax cummin""".split(),
        (1, None),
    ),
    **dict.fromkeys("argsort msort glu".split(), (1, -1)),
    **dict.fromkeys("normalize".split(), (2, 1)),
    **dict.fromkeys("topk diff".split(), (2, -1)),
    **dict.fromkeys("rot90".split(), (2, (0, 1))),
    **dict.fromkeys("gumbel_softmax".split(), (4, -1)),
    **dict.fromkeys("gather scatter scatter_add".split(), (1, None)),
    **dict.fromkeys("take_along_dim".split(), (2, None)),
    **dict.fromkeys("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft".split(), (2, -1)),
    **dict.fromkeys("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2".split(), (2, (-2, -1))),
    **dict.fromkeys("fft_fftn fft_ifftn fft_rfftn fft_irfftn".split(), (2, None)),
    **dict.fromkeys("fft_fftshift fft_ifftshift".split(), (1, None)),
}


@rule(*_ALONG)
def along(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows unless the operation works along them."""
    place, default = _ALONG[call.name]
    x = call.argument(0, "input", "self")
    given = call.argument(place, "dim", "dims", default=default)
    if call.name == "argsort" and isinstance(given, bool):
        given = call.kwargs.get("dim", -1)
    if call.name == "msort":
        given = 0
    if call.name in ("gather", "take_along_dim") and state_of(x) is None and given is not None:
        # A table of constants, which each sample indexes by its own numbers.
        return combined(call, out.shape, from_right=call.name != "gather")
    dims = dims_of(given, x.dim())
    if any(isinstance(s, PerRecord) and (dims is None or s.dim in dims) for s in call.states):
        return call.mixed("works along the dimension of the samples")
    return combined(call, out.shape, from_right=False)


@rule("index_add", "index_fill", "index_copy")
def indexed(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows of writes at constant positions of another dimension."""
    x, index = call.args[0], call.argument(2, "index")
    dims = dims_of(call.argument(1, "dim"), x.dim())
    rows = [s for s in call.states if isinstance(s, PerRecord)]
    if any(t is index for t in call.tracked) or any(s.dim in (dims or ()) for s in rows):
        return call.mixed("writes where the values of samples say")
    return combined(call, out.shape, from_right=False)


@action("sort")
def sort(call: TrackedCall) -> Any:
    """Sort within samples, or sort one number per sample and reorder the records with it."""
    x, state = call.args[0], state_of(call.args[0])
    dim = call.argument(1, "dim", default=-1)
    dim = -1 if isinstance(dim, bool) else int(dim)
    result = call.plain()
    if not isinstance(state, PerRecord):
        return finish_as(call, result, state)
    if state.dim != dim % x.dim():
        return finish_as(call, result, state)
    order = call.mixed("sorts the samples")
    if x.dim() != 1:
        return finish_as(call, result, order)
    ids = state.ids[untracked(result[1]).cpu().numpy()]
    state.batch.has_ordered_rows = True
    return finish_as(call, result, PerRecord(state.batch, ids), order)


@rule("cosine_similarity", "pairwise_distance")
def pairwise(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows of pairs of vectors that belong to the same samples."""
    first, second = call.argument(0, "x1"), call.argument(1, "x2")
    ndim = max(first.dim(), second.dim())
    cosine = call.name == "cosine_similarity"
    dim = int(call.argument(2, "dim", default=1)) % ndim if cosine else ndim - 1
    keeps = bool(call.argument(4, "keepdim", default=False)) and not cosine
    shape = np.broadcast_shapes(tuple(first.shape), tuple(second.shape))
    state = combined(call, shape)
    if not isinstance(state, PerRecord):
        return state
    if state.dim == dim:
        return call.mixed("compares the samples of a batch")
    return PerRecord(state.batch, state.ids, state.dim - (dim < state.dim and not keeps))
