"""Follow rows through layers that work on each sample: convolution, pooling, attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...base.errors import PrivacyError
from .meeting import combined
from .rules import TrackedCall, rule
from .states import Mixed, OneRecord, PerRecord, RecordSum, State
from .tensor import state_of

_MIN_NDIM = {
    # fewest dimensions of a batched input; with fewer, the first dimension is no batch
    **dict.fromkeys("embedding one_hot prelu".split(), 1),
    **dict.fromkeys("embedding_bag group_norm instance_norm feature_dropout".split(), 2),
    **dict.fromkeys(
        """conv1d conv_transpose1d max_pool1d avg_pool1d lp_pool1d adaptive_avg_pool1d
        adaptive_max_pool1d max_pool1d_with_indices dropout1d interpolate upsample fold
        feature_alpha_dropout local_response_norm channel_shuffle affine_grid""".split(),
        3,
    ),
    **dict.fromkeys(
        """conv2d conv_transpose2d max_pool2d avg_pool2d lp_pool2d adaptive_avg_pool2d
        adaptive_max_pool2d max_pool2d_with_indices dropout2d grid_sample pixel_shuffle
        pixel_unshuffle""".split(),
        4,
    ),
    **dict.fromkeys(
        """conv3d conv_transpose3d max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d
        max_pool3d_with_indices dropout3d""".split(),
        5,
    ),
}


@rule(*_MIN_NDIM)
def within_rows(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows of layers whose first dimension is the batch and whose weights are constants."""
    operands = [call.argument(0, "input", "theta")]
    if call.name == "grid_sample":
        operands.append(call.argument(1, "grid"))
    if not call.tracks_only(*operands):
        return call.mixed("takes its weights from samples")
    if call.name == "one_hot" and call.argument(1, "num_classes", default=-1) < 0:
        return call.mixed("takes the number of classes from the batch; pass num_classes=")
    if call.name == "instance_norm" and call.argument(1, "running_mean") is not None:
        return call.mixed("updates running statistics")
    least = _MIN_NDIM[call.name]
    for tensor, state in zip(call.tracked, call.states, strict=True):
        if isinstance(state, PerRecord) and (state.dim != 0 or tensor.dim() < least):
            return call.mixed("does not have the samples in its first dimension")
    if any(isinstance(s, RecordSum) for s in call.states):
        return call.mixed("is not linear in a sum over samples")
    return combined(call, out.shape, from_right=False)


@rule("batch_norm", "native_batch_norm")
def batch_norm(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows with running statistics, which make the layer a constant map of each sample."""
    training = call.argument(5, "training", default=False)
    if training and call.argument(1, "running_mean") is not None:
        raise PrivacyError(
            "batch_norm",
            expected="no running statistics of private samples outside the private module",
            got="a layer that updates them",
            remedy="Put the other model into eval(), or calibrate it on public data.",
        )
    if training or call.argument(1, "running_mean") is None:
        return call.mixed("normalises every sample with the statistics of the batch")
    if not call.tracks_only(call.args[0]) or getattr(call.states[0], "dim", 0) != 0:
        return call.mixed("takes its statistics from samples")
    return combined(call, out.shape, from_right=False)


@rule("layer_norm", "rms_norm")
def layer_norm(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows unless they are among the last dimensions, which are normalised."""
    normalized = len(tuple(call.argument(1, "normalized_shape")))
    x = call.args[0]
    if not call.tracks_only(x):
        return call.mixed("takes its weights from samples")
    state = call.states[0]
    if isinstance(state, PerRecord) and state.dim >= x.dim() - normalized:
        return call.mixed("normalises over the samples")
    return combined(call, out.shape)


@rule("scaled_dot_product_attention", "cdist")
def attention(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows in the batch dimensions, which are all but the last two."""
    for tensor, state in zip(call.tracked, call.states, strict=True):
        if isinstance(state, PerRecord) and state.dim >= tensor.dim() - 2:
            return call.mixed("attends from one sample to another")
    return combined(call, out.shape)


@rule("multi_head_attention_forward")
def multi_head_attention(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows in the second dimension of inputs that have time first."""
    padding = call.kwargs.get("key_padding_mask")
    if not call.tracks_only(*call.args[:3], padding):
        return call.mixed("takes its weights from samples")
    rows: list[Any] = []
    for tensor, state in zip(call.tracked, call.states, strict=True):
        if isinstance(state, Mixed | RecordSum | OneRecord):
            return call.mixed("attends from one sample to another")
        if state.dim != (0 if tensor is padding else 1) or (tensor is not padding and
                                                           tensor.dim() != 3):  # fmt: skip
            return call.mixed("expects the samples in the second dimension")
        rows.append(state)
    if any(not rows[0].matches(s) for s in rows):
        return call.mixed("combines rows of different samples")
    weights = out.dim() != 3 or out.shape[:2] != call.args[0].shape[:2]
    place = 0 if weights or out.shape[-1] != call.args[0].shape[-1] else 1
    if place == 1 and call.kwargs.get("need_weights", True) and out.shape[0] == len(rows[0].ids):
        # Output [T, B, D] and weights [B, T, S] have one shape here.
        return call.mixed("has weights of the shape of its output")
    return PerRecord(rows[0].batch, rows[0].ids, place)


@rule("pad")
def pad(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows when other dimensions are padded."""
    x, state = call.args[0], state_of(call.args[0])
    if isinstance(state, PerRecord) and call.tracks_only(x):
        if state.dim >= x.dim() - len(call.argument(1, "pad")) // 2:
            widths = list(call.argument(1, "pad"))
            place = 2 * (x.dim() - 1 - state.dim)
            if any(widths[place : place + 2]):
                return call.mixed("adds rows that belong to no sample")
        return state
    return state if isinstance(state, OneRecord) else call.mixed("pads a sum over samples")


@rule("stft", "istft")
def spectrogram(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows of signals ``[B, length]`` and of their spectra ``[B, frequencies, frames]``."""
    x, state = call.args[0], state_of(call.args[0])
    if not call.tracks_only(x):
        return call.mixed("takes its window from samples")
    batched = 2 if call.name == "stft" else 3
    if isinstance(state, PerRecord) and (state.dim or x.dim() < batched):
        return call.mixed("does not have the samples in its first dimension")
    return combined(call, out.shape, from_right=False)


@rule("multinomial")
def multinomial(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows of draws from each sample's own weights."""
    x, state = call.args[0], state_of(call.args[0])
    if isinstance(state, PerRecord) and (x.dim() < 2 or state.dim):
        return call.mixed("draws among the samples")
    return combined(call, out.shape, from_right=False)


@rule("unfold")
def unfolded(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows of windows within each sample: ``Tensor.unfold`` or ``F.unfold``."""
    state, x = state_of(call.args[0]), call.args[0]
    if not isinstance(state, PerRecord):
        return state if isinstance(state, OneRecord) else call.mixed("cuts windows across samples")
    if call.func is Tensor.unfold:
        if int(call.argument(1, "dimension")) % x.dim() == state.dim:
            return call.mixed("cuts windows across samples")
        return state
    if x.dim() != 4 or state.dim:
        return call.mixed("does not have the samples in its first dimension")
    return state
