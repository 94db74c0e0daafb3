"""Follow rows through operations that work entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .meeting import combined
from .rules import TrackedCall, action, rule
from .states import FilledSum, OneRecord, PerRecord, RecordSum, Reduction, State
from .tensor import retrack, state_of

ELEMENTWISE = """
    mul multiply div divide true_divide floor_divide pow float_power mod remainder fmod rsub
    and or xor bitwise_and bitwise_or bitwise_xor bitwise_not invert lshift rshift
    logical_and logical_or logical_xor logical_not
    eq ne lt le gt ge greater less greater_equal less_equal not_equal isclose
    maximum minimum fmax fmin clamp clip clamp_min clamp_max heaviside hypot
    abs absolute neg negative pos positive sign sgn square sqrt rsqrt reciprocal
    exp expm1 exp2 log log1p log2 log10 logit logaddexp logaddexp2 xlogy special_xlogy
    special_xlog1py special_expit special_expm1 special_exp2 special_log1p special_erf special_logit
    special_entr special_ndtr special_log_ndtr special_ndtri special_i0 special_i0e i0
    sin cos tan asin acos atan atan2 arctan2 sinh cosh tanh asinh acosh atanh sinc deg2rad rad2deg
    erf erfc erfinv lgamma digamma
    sigmoid softplus relu relu6 leaky_relu elu selu celu gelu silu mish hardtanh hardswish
    hardsigmoid hardshrink softshrink tanhshrink softsign logsigmoid log_sigmoid threshold rrelu
    floor ceil round trunc fix frac nan_to_num isnan isinf isfinite isneginf isposinf isreal signbit
    copysign lerp addcmul addcdiv masked_fill where
    polar angle conj conj_physical resolve_conj resolve_neg real imag complex
    dropout alpha_dropout bernoulli poisson normal uniform zero fill random exponential cauchy
    log_normal geometric tril triu
""".split()


@rule(*ELEMENTWISE)
def elementwise(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows entry by entry, with broadcasting."""
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        return call.mixed("lists positions in all samples")
    sums = [s for s in call.states if isinstance(s, RecordSum)]
    if not sums:
        if call.name in _SCALING and len(call.operands) == 1 and _follows_size(call):
            return replace(call.mixed(_BY_SIZE), late=True)
        return combined(call, out.shape)
    if call.name in ("neg", "negative", "pos", "positive"):
        return sums[0]
    if len(call.states) > 1 or call.kwargs.get("rounding_mode") is not None:
        return call.mixed("is not linear in a sum over samples")
    if call.name in ("div", "divide", "true_divide"):
        if call.has_reversed_operands or state_of(call.args[0]) is None:
            return call.mixed("divides by a sum over samples")
    elif call.name not in ("mul", "multiply"):
        return call.mixed("is not linear in a sum over samples")
    other = call.argument(1, "other")
    factor = _number(call.argument(0, "input") if state_of(other) is not None else other)
    if factor and call.name in ("div", "divide", "true_divide"):
        factor = 1 / factor
    return rescaled(sums[0], factor)


def _follows_size(call: TrackedCall) -> bool:
    """Whether rows are scaled by a number that follows the sizes of batches."""
    state, batch = call.states[0], call.batch
    if type(state) is not PerRecord or batch is None or batch.boundary is None:
        return False
    number = next((a for a in call.args if type(a) is float or type(a) is int), None)
    return number is not None and batch.boundary.follows_size(call.name, number, batch)


_SCALING = frozenset("mul multiply div divide true_divide".split())

_BY_SIZE = "is by a number which has followed the number of samples in every batch"


def _number(value: Any) -> float | None:
    """Return a constant factor as a number, or None if that would wait for a device."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
        return None if value.is_complex() else float(value)
    return None


def rescaled(state: RecordSum, factor: float | None = None) -> RecordSum:
    """Return the state of a sum over records times a constant; None is an unknown constant."""
    terms = () if factor is None else ((r, s * factor) for r, s in state.terms)
    return type(state)(state.batch, state.reduction, True, state.shares, frozenset(terms))


@rule("add", "sub", "subtract")
def add(call: TrackedCall, out: Tensor) -> State | None:
    """Add sums over records term by term, or rows that belong to the same records."""
    states = call.states
    records = {s.record for s in states if isinstance(s, OneRecord)}
    terms = [s for s in states if isinstance(s, RecordSum)]
    if not terms and len(records) < 2:
        return combined(call, out.shape)
    if any(isinstance(s, PerRecord) for s in states):
        return call.mixed("adds a sum over samples to every sample")
    alone = [RecordSum(s.batch, "sum") for s in states if isinstance(s, OneRecord)]
    total = added(call, terms + alone)
    operands = call.argument(0, "input"), call.argument(1, "other")
    if isinstance(total, FilledSum) and any(map(_is_constant, operands)):
        return RecordSum(total.batch, total.reduction, True, total.shares, total.scales)
    return total


def _is_constant(value: Any) -> bool:
    """Whether an operand adds something that is no term of a record: not so the 0 of ``sum``."""
    return state_of(value) is None if isinstance(value, Tensor) else value != 0


def added(call: TrackedCall, terms: Sequence[RecordSum]) -> State:
    """Return the state of the sum of sums over records."""
    fixed = {term.reduction for term in terms if not term.rescaled}
    if len(fixed) > 1:
        return call.mixed("adds a mean over the samples to a sum over them")
    reduction = fixed.pop() if fixed else terms[0].reduction
    shares = frozenset[int]().union(*(term.shares for term in terms))
    scales = frozenset[tuple[Reduction, float]]().union(*(term.terms for term in terms))
    alike = all(type(t) is FilledSum and t.reduction == reduction for t in terms)
    kind = FilledSum if alike else RecordSum
    return kind(terms[0].batch, reduction, any(t.rescaled for t in terms), shares, scales)


@rule("bucketize", "searchsorted")
def bucketize(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows of values that are sorted into bins with constant boundaries."""
    values = call.argument(0 if call.name == "bucketize" else 1, "input", "self")
    one_row = call.name == "bucketize" or call.argument(0, "sorted_sequence").dim() == 1
    if not call.tracks_only(values) or not one_row:
        return call.mixed("compares samples with boundaries made of samples")
    return combined(call, out.shape)


_SAME = """
    to cpu cuda float double half bfloat16 int long bool short byte char type type_as clone detach
    contiguous pin_memory requires_grad_ data.get real.get imag.get view_as_real view_as_complex
    zeros_like ones_like empty_like rand_like randn_like randint_like retain_grad
    cfloat cdouble
""".split()


@rule(*_SAME)
def same(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows that are moved, cast or copied, also in tensors like ``zeros_like`` of them."""
    state = state_of(call.args[0])
    if state is None:
        return None  # a constant, cast like a sample
    if isinstance(state, FilledSum) and call.name.endswith("_like"):
        return RecordSum(state.batch, state.reduction, True)  # its values are no sum
    if call.name.startswith("view_as") or out.shape == call.args[0].shape:
        return state
    return call.mixed("changes the number of rows")


@rule("full_like")
def filled(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows of the tensor whose shape is taken, unless the number comes from samples."""
    return same(call, out) if call.tracks_only(call.args[0]) else combined(call, out.shape)


@rule("copy")
def copied(call: TrackedCall, out: Tensor) -> State | None:
    """Give the target of ``copy_`` the records of the values written into it."""
    written = call.argument(1, "src", "other")
    new = state_of(written)
    if new is None:
        return state_of(call.args[0])
    if written.shape == out.shape or isinstance(new, OneRecord):
        return new
    return (
        combined(call, out.shape)
        if len(call.tracked) == 1
        else call.mixed("writes rows into several")
    )


@action("data.set")
def assigned(call: TrackedCall) -> None:
    """Give a tensor whose ``data`` is assigned the records of the new values."""
    target, value = call.args
    call.plain()
    new = state_of(value) or state_of(target)
    if new is not None:
        retrack(target, new)
