"""Operations that keep rows apart: elementwise ones, and those that work within each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .rules import Call, combined, reversed_operands, rule
from .states import Mixed, OneRecord, PerRecord, RecordSum, State

_ELEMENTWISE = (
    *(
        "mul",
        "div",
        "true_divide",
        "divide",
        "multiply",
        "floor_divide",
        "pow",
        "mod",
        "remainder",
        "fmod",
        "rsub",
    ),
    *("and", "or", "xor", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "invert"),
    *(
        "logical_and",
        "logical_or",
        "logical_xor",
        "logical_not",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    ),
    *(
        "greater",
        "less",
        "greater_equal",
        "less_equal",
        "not_equal",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
    ),
    *(
        "abs",
        "absolute",
        "neg",
        "negative",
        "pos",
        "positive",
        "sign",
        "sgn",
        "exp",
        "expm1",
        "exp2",
        "log",
        "log1p",
    ),
    *(
        "log2",
        "log10",
        "logit",
        "sqrt",
        "rsqrt",
        "square",
        "reciprocal",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
    ),
    *(
        "atan2",
        "sinh",
        "cosh",
        "tanh",
        "erf",
        "erfc",
        "erfinv",
        "lgamma",
        "digamma",
        "xlogy",
        "logaddexp",
        "hypot",
    ),
    *(
        "sigmoid",
        "softplus",
        "relu",
        "relu6",
        "leaky_relu",
        "elu",
        "selu",
        "celu",
        "gelu",
        "silu",
        "mish",
        "hardtanh",
    ),
    *(
        "hardswish",
        "hardsigmoid",
        "hardshrink",
        "softshrink",
        "tanhshrink",
        "softsign",
        "logsigmoid",
        "threshold",
    ),
    *(
        "rrelu",
        "floor",
        "ceil",
        "round",
        "trunc",
        "frac",
        "clamp",
        "clip",
        "clamp_min",
        "clamp_max",
        "nan_to_num",
    ),
    *(
        "isnan",
        "isinf",
        "isfinite",
        "where",
        "masked_fill",
        "lerp",
        "addcmul",
        "addcdiv",
        "heaviside",
        "bernoulli",
    ),
    *(
        "bucketize",
        "deg2rad",
        "rad2deg",
        "isclose",
        "polar",
        "angle",
        "conj",
        "real",
        "imag",
        "complex",
        "float_power",
    ),
    *("dropout", "alpha_dropout", "feature_dropout"),
    *(
        "normal",
        "uniform",
        "zero",
        "fill",
        "random",
        "exponential",
        "cauchy",
        "log_normal",
        "geometric",
    ),
)


@rule(*_ELEMENTWISE)
def elementwise(call: Call, out: Tensor) -> State | None:
    """Entry by entry, with broadcasting."""
    sums = [s for s in call.states if isinstance(s, RecordSum)]
    if not sums:
        return combined(call, out, from_right=True)
    if call.name in ("neg", "negative", "pos", "positive"):
        return sums[0]
    scaling = ("mul", "multiply", "div", "divide", "true_divide")
    if call.name not in scaling or len(call.states) > 1:
        return call.mixed("is not linear in a sum over samples")
    if call.name not in ("mul", "multiply"):
        numerator = call.args[1] if reversed_operands(call) else call.args[0]
        if numerator is not call.tracked[0] and not reversed_operands(call):
            return call.mixed("divides by a sum over samples")
        if reversed_operands(call):
            return call.mixed("divides by a sum over samples")
    old = sums[0]
    return RecordSum(old.batch, old.reduction, True, old.shares)


@rule("add", "sub", "subtract")
def add(call: Call, out: Tensor) -> State | None:
    """Sums stay sums of single records' terms; rows need the same records."""
    states = call.states
    records = {s.record for s in states if isinstance(s, OneRecord)}
    terms = [s for s in states if isinstance(s, RecordSum)]
    if terms or len(records) > 1:
        if any(isinstance(s, PerRecord) for s in states):
            return call.mixed("adds a sum over samples to every sample")
        return added(call, terms + [_alone(s) for s in states if isinstance(s, OneRecord)])
    return combined(call, out, from_right=True)


def _alone(state: OneRecord) -> RecordSum:
    return RecordSum(state.batch, "sum")


def added(call: Call, terms: Sequence[RecordSum]) -> State:
    """The sum of sums over records."""
    fixed = {term.reduction for term in terms if not term.rescaled}
    if len(fixed) > 1:
        return call.mixed("adds a mean over the samples to a sum over them")
    reduction = fixed.pop() if fixed else terms[0].reduction
    shares = frozenset[int]().union(*(term.shares for term in terms))
    return RecordSum(terms[0].batch, reduction, any(t.rescaled for t in terms), shares)


_WITHIN_ROWS = (
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *(
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "lp_pool1d",
        "lp_pool2d",
    ),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d"),
    *(
        "adaptive_max_pool2d",
        "max_pool2d_with_indices",
        "max_pool1d_with_indices",
        "group_norm",
        "instance_norm",
    ),
    *(
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "interpolate",
        "upsample",
        "grid_sample",
        "affine_grid",
        "pixel_shuffle",
    ),
    *(
        "pixel_unshuffle",
        "channel_shuffle",
        "fold",
        "unfold_rows",
        "prelu",
        "embedding",
        "embedding_bag",
        "one_hot",
    ),
    *("bilinear", "local_response_norm"),
)
_UNBATCHED = {
    name: ndim
    for ndim, names in (
        (2, ("embedding_bag",)),
        (
            3,
            (
                "conv1d",
                "max_pool1d",
                "avg_pool1d",
                "adaptive_avg_pool1d",
                "lp_pool1d",
                "conv_transpose1d",
                "dropout1d",
            ),
        ),
        (
            4,
            (
                "conv2d",
                "max_pool2d",
                "avg_pool2d",
                "adaptive_avg_pool2d",
                "lp_pool2d",
                "conv_transpose2d",
                "dropout2d",
            ),
        ),
        (
            5,
            (
                "conv3d",
                "max_pool3d",
                "avg_pool3d",
                "adaptive_avg_pool3d",
                "conv_transpose3d",
                "dropout3d",
            ),
        ),
    )
    for name in names
}
"""Number of dimensions of a batched input, where one less means a single sample."""


@rule(*_WITHIN_ROWS)
def within_rows(call: Call, out: Tensor) -> State | None:
    """Layers whose first dimension is the batch."""
    batched = _UNBATCHED.get(call.name)
    for tensor, state in zip(call.tracked, call.states, strict=True):
        if isinstance(state, PerRecord) and (
            state.dim != 0 or (batched is not None and tensor.dim() < batched)
        ):
            return call.mixed("does not have the samples in its first dimension")
    return combined(call, out, from_right=False)


@rule("batch_norm", "native_batch_norm")
def batch_norm(call: Call, out: Tensor) -> State | None:
    """With running statistics it is a constant map of each sample."""
    if call.argument(5, "training", default=False) or call.argument(1, "running_mean") is None:
        return call.mixed("normalises every sample with the statistics of the batch")
    return within_rows(call, out)


@rule("layer_norm", "rms_norm")
def layer_norm(call: Call, out: Tensor) -> State | None:
    """The last dimensions are normalised, which must not hold the rows."""
    normalized = len(tuple(call.argument(1, "normalized_shape")))
    x = call.tracked[0]
    state = x._state  # type: ignore[attr-defined]
    if isinstance(state, PerRecord) and state.dim >= x.dim() - normalized:
        return call.mixed("normalises over the samples")
    return combined(call, out, from_right=False)


@rule("scaled_dot_product_attention")
def attention(call: Call, out: Tensor) -> State | None:
    """All dimensions but the last two are batch dimensions."""
    for tensor, state in zip(call.tracked, call.states, strict=True):
        if isinstance(state, PerRecord) and state.dim >= tensor.dim() - 2:
            return call.mixed("attends from one sample to another")
    return combined(call, out, from_right=True)


@rule("multi_head_attention_forward")
def multi_head_attention(call: Call, out: Tensor) -> State | None:
    """Time comes first, the samples second."""
    rows = [s for s in call.states if isinstance(s, PerRecord)]
    masks = [
        s
        for t, s in zip(call.tracked, call.states, strict=True)
        if t is call.kwargs.get("key_padding_mask")
    ]
    if any(s.dim != (0 if s in masks else 1) for s in rows):
        return call.mixed("expects the samples in the second dimension")
    ids = rows[0].ids
    if any(not rows[0].matches(s) for s in rows):
        return call.mixed("combines rows of different samples")
    place = 1 if out is not None and out.dim() == 3 and out.shape[1] == len(ids) else 0
    return PerRecord(rows[0].batch, ids, place)


def dims_of(value: Any, ndim: int) -> set[int] | None:
    """Dimensions as non-negative numbers; None stands for all."""
    if value is None:
        return None
    values = value if isinstance(value, (tuple, list)) else (value,)
    return {int(v) % max(ndim, 1) for v in values} or None


_ALONG = {
    # name: place and default of the dimension that the operation works along
    **dict.fromkeys(
        (
            "softmax",
            "log_softmax",
            "softmin",
            "cumsum",
            "cumprod",
            "logcumsumexp",
            "cummax",
            "cummin",
        ),
        (1, None),
    ),
    **dict.fromkeys(("sort", "argsort", "glu"), (1, -1)),
    **dict.fromkeys(("normalize",), (2, 1)),
    **dict.fromkeys(("topk", "kthvalue", "renorm"), (2, -1)),
    **dict.fromkeys(("gumbel_softmax",), (4, -1)),
    **dict.fromkeys(
        ("gather", "scatter", "scatter_add", "take_along_dim", "index_add", "index_fill"), (1, None)
    ),
    **dict.fromkeys(("diff",), (2, -1)),
    **dict.fromkeys(("fft", "ifft", "rfft", "irfft"), (2, -1)),
    **dict.fromkeys(("fft2", "ifft2", "rfft2", "irfft2"), (2, (-2, -1))),
    **dict.fromkeys(("cosine_similarity",), (2, 1)),
    **dict.fromkeys(("pairwise_distance",), (99, -1)),
}


@rule(*_ALONG)
def along(call: Call, out: Tensor) -> State | None:
    """Operations along one dimension, which must not be that of the rows."""
    place, default = _ALONG[call.name]
    x = call.tracked[0]
    dims = dims_of(call.argument(place, "dim", "dims", default=default), x.dim())
    rows = [s for s in call.states if isinstance(s, PerRecord)]
    if any(dims is None or s.dim in dims for s in rows):
        return call.mixed("works along the dimension of the samples")
    if call.name in ("cosine_similarity", "pairwise_distance") and rows and dims is not None:
        lower = sum(1 for d in dims if d < rows[0].dim)
        keep = bool(call.argument(4, "keepdim", default=False))
        merged = call.mixed("compares one sample with another")
        if any(not rows[0].matches(s) or s.dim != rows[0].dim for s in rows):
            return merged
        return PerRecord(rows[0].batch, rows[0].ids, rows[0].dim - (0 if keep else lower))
    return combined(call, out, from_right=False)


@rule("matmul", "mm", "bmm", "mv", "dot", "vdot", "linear", "inner")
def product(call: Call, out: Tensor) -> State | None:
    """Rows are kept, summed over with constant weights, or meet: by where they stand in the factors."""
    a, b = (call.args[1], call.args[0]) if reversed_operands(call) else call.args[:2]
    transposed = call.name in ("linear", "inner")
    places = [_place(a, True), _place(b, not transposed if b.dim() == 1 else transposed)]
    found = [(t, p) for t, p in zip((a, b), places, strict=True) if p is not None]
    states: list[Any] = [t._state for t, _ in found]
    if any(isinstance(s, RecordSum) for s in states):
        if len(states) > 1:
            return call.mixed("is not linear in a sum over samples")
        return RecordSum(states[0].batch, states[0].reduction, True, states[0].shares)
    if all(isinstance(s, OneRecord) for s in states) or len(found) < len(call.tracked):
        return combined(call, out, from_right=True)
    if any(isinstance(s, OneRecord) for s in states):
        return call.mixed("combines two samples")
    kinds = [p for _, p in found]
    if len(found) == 2 and (kinds[0] != kinds[1] or not states[0].matches(states[1])):
        return call.mixed("multiplies rows of one sample with those of another")
    kind, state = kinds[0], states[0]
    if kind == "sum":
        return RecordSum(state.batch, "sum", len(found) == 1)
    if kind == "batch":
        return combined(call, out, from_right=True)
    if len(found) == 2:
        return call.mixed("multiplies rows of one sample with those of another")
    other = b if found[0][0] is a else a
    place = out.dim() - 1 if found[0][0] is b or other.dim() == 1 else out.dim() - 2
    return PerRecord(state.batch, state.ids, place)


def _place(factor: Any, last: bool) -> str | None:
    """Whether the rows are summed over, kept or a batch dimension of a factor; None: no records."""
    state = getattr(factor, "_state", None)
    if state is None:
        return None
    if not isinstance(state, PerRecord):
        return "whole"
    contracted = factor.dim() - 1 if last or factor.dim() == 1 else factor.dim() - 2
    if state.dim == contracted:
        return "sum"
    return "row" if state.dim >= factor.dim() - 2 else "batch"


@rule("einsum")
def einsum(call: Call, out: Tensor) -> State | None:
    """The letter of the rows must be the same in all operands; left out of the result, it is summed."""
    equation = call.args[0]
    operands = call.args[1:]
    operands = (
        list(operands[0])
        if len(operands) == 1 and isinstance(operands[0], (list, tuple))
        else list(operands)
    )
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return call.mixed("has an equation whose samples cannot be told")
    left, right = equation.replace(" ", "").split("->")
    letters, states = set(), []
    for part, operand in zip(left.split(","), operands, strict=True):
        state = getattr(operand, "_state", None)
        if state is None:
            continue
        if not isinstance(state, PerRecord):
            return call.mixed("is not linear in a sum over samples")
        letters.add(part[state.dim])
        states.append((state, part))
    if len(letters) != 1:
        return call.mixed("multiplies rows of one sample with those of another")
    letter = letters.pop()
    if any(part.count(letter) != 1 for _, part in states) or any(
        not states[0][0].matches(s) for s, _ in states
    ):
        return call.mixed("combines rows of different samples")
    batch, ids = states[0][0].batch, states[0][0].ids
    return (
        PerRecord(batch, ids, right.index(letter)) if letter in right else RecordSum(batch, "sum")
    )


_SAME = (
    *(
        "to",
        "cpu",
        "cuda",
        "float",
        "double",
        "half",
        "bfloat16",
        "int",
        "long",
        "bool",
        "short",
        "byte",
        "char",
    ),
    *(
        "type",
        "type_as",
        "clone",
        "detach",
        "contiguous",
        "pin_memory",
        "requires_grad_",
        "data.get",
        "alias",
    ),
    *(
        "real.get",
        "imag.get",
        "view_as_real",
        "view_as_complex",
        "copy",
        "zeros_like",
        "ones_like",
        "full_like",
    ),
    *("empty_like", "rand_like", "randn_like", "randint_like", "view_as_same", "retain_grad"),
)


@rule(*_SAME)
def same(call: Call, out: Tensor) -> State | None:
    """The same rows, moved, cast or copied; constants of the same shape count as the rows' own."""
    if call.name == "copy":
        written = call.args[1]
        state = getattr(written, "_state", None)
        if state is None:
            return call.states[0]
        whole = written.shape == out.shape
        return state if whole else call.mixed("writes a row into several")
    state = call.tracked[0]._state  # type: ignore[attr-defined]
    if call.name in ("view_as_real", "view_as_complex") or tuple(out.shape) == tuple(
        call.tracked[0].shape
    ):
        return state  # type: ignore[no-any-return]
    return call.mixed("changes the number of rows")


@rule("pad")
def pad(call: Call, out: Tensor) -> State | None:
    """Padding of other dimensions than the rows'."""
    x = call.tracked[0]
    state: Any = x._state  # type: ignore[attr-defined]
    if isinstance(state, PerRecord):
        first = x.dim() - len(call.argument(1, "pad")) // 2
        if state.dim >= first:
            return call.mixed("adds rows that belong to no sample")
        return PerRecord(state.batch, state.ids, state.dim)
    return state if isinstance(state, (OneRecord, Mixed)) else call.mixed("pads a sum over samples")
