"""Linear layers ``y = a W^T``: the gradient of sample b is ``sum_t g[b,t,:] outer a[b,t,:]``.

B samples, T positions, d input and p output features. Sequences, convolutions by patches and plain
batches (T = 1) all have this form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.signature import Double, Float, Int32, Operand, Sum, written
from ._bounds import gamma, integers, of_sums, squares, sum_error, upper_square
from ._operands import rounded_operands

LinearRoute = Literal["auto", "rank_one", "gram", "direct"]
LinearRounding = Literal["truncate", "factors", "operands"]
ROUTES = get_args(LinearRoute)
_CHUNK = 1 << 22  # gradient entries that the reference holds at a time


def _check_route(a: Tensor, g: Tensor, route: str) -> None:
    if route == "rank_one" and a.shape[1] != 1:
        raise InvalidInput(
            "route",
            expected="gram, direct or auto for more than one position",
            got=f"rank_one with T = {a.shape[1]}",
            remedy="Use route='auto'.",
        )


def norm_route(a: Tensor, g: Tensor, route: str = "auto") -> str:
    """Return which way a norm goes.

    This is rank_one for one position, else the one asked for, or for ``auto`` the one that the
    CPU's kernels take; they run direct products about 1.4 times as fast as tables of dots, and
    beyond 128 (Gram: 192) positions in float64.
    """
    positions, d, p = a.shape[1], a.shape[2], g.shape[2]
    if positions == 1:
        return "rank_one"
    if route != "auto":
        return route
    gram = (positions + 4) * (d + p + 32) * (2 if positions > 192 else 1)
    return "gram" if gram < 1.4 * d * p * (2 if positions > 128 else 1) else "direct"


@op(check=_check_route)
@torch.no_grad()
def linear_norm(
    a: Operand[Tensor, "B T d"],
    g: Operand[Tensor, "B T p"],
    *,
    route: LinearRoute = "auto",
) -> Double[Tensor, "squares: B"]:
    """Return each sample's squared gradient norm, ``|| sum_t g[b,t,:] outer a[b,t,:] ||_F^2``.

    ==========  ===============================================================================
    route       how
    ==========  ===============================================================================
    rank_one    ``|a|^2 |g|^2``, one position only
    gram        ``sum_{t,t'} <a_t, a_t'> <g_t, g_t'>`` (Goodfellow 2015; Li et al. 2022)
    direct      the gradient tile by tile, squared and dropped
    auto        the cheapest of them for the shapes
    ==========  ===============================================================================

    Args:
        a: layer inputs ``[B, T, d]``, float32, float64, bfloat16 or float16.
        g: output gradients ``[B, T, p]``, same dtype.
        route: see above.

    Returns:
        float64 ``[B]``: never below the true square for these inputs, and above it by at most 1e-4
        of it (float64: 1e-10; 16-bit operands: 5e-3) except for the rounding floor that
        ``docs/ghost.md`` states.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout; rank_one with T != 1.

    =================== ==========================
    edge case           result
    =================== ==========================
    empty batch         ``[0]``
    T = 0               0
    NaN or inf in a row not finite for the sample
    =================== ==========================
    """
    if a.shape[1] == 1:
        product = squares(a) * squares(g)
        return product * (1 + gamma(2))
    chunk = max(1, _CHUNK // max(1, a.shape[2] * g.shape[2]))
    parts = [
        _direct(a[b : b + chunk].double(), g[b : b + chunk].double())
        for b in range(0, max(1, a.shape[0]), chunk)
    ]
    return torch.cat(parts)


def _direct(a: Tensor, g: Tensor) -> Tensor:
    absolute = (a.norm(dim=2) * g.norm(dim=2)).sum(1)
    # The norms are rounded as well, each by less than the slack of twice as many terms.
    terms = 2 * (a.shape[1] + a.shape[2] + g.shape[2])
    return upper_square(torch.bmm(g.transpose(1, 2), a), terms, absolute)


def _check_layers(a: Sequence[Tensor], g: Sequence[Tensor]) -> None:
    if len(a) != len(g):
        raise InvalidInput(
            "g",
            expected=f"as many tensors as a has, {len(a)}",
            got=f"{len(g)}",
            remedy="Pass one tensor of each layer in a, and one in g.",
        )


@op(check=_check_layers)
@torch.no_grad()
def linear_norms(
    a: Sequence[Operand[Tensor, "B T d"]],
    g: Sequence[Operand[Tensor, "B T p"]],
) -> Double[Tensor, "squares: B"]:
    """Return the squared norm of each sample's gradients of several layers of one shape together.

    It is ``sum_i linear_norm(a[i], g[i])``. A layer by itself may leave half of a device idle.

    Args:
        a: inputs of each layer ``[B, T, d]``, float32, float64, bfloat16 or float16.
        g: output gradients of each layer ``[B, T, p]``, same dtype.

    Returns:
        float64 ``[B]``: never below the true sum for these inputs, and above it by no more than
        ``linear_norm``; not finite for a sample with NaN or inf. T = 0 gives zeros.

    Raises:
        InvalidInput: no list, lists of two lengths, or wrong type, shape, dtype, device or layout.
    """
    total = torch.zeros(a[0].shape[0], dtype=torch.float64, device=a[0].device)
    for inputs, outputs in zip(a, g, strict=True):
        total += linear_norm.reference(inputs, outputs)
    return total * (1 + gamma(len(a)))


@op()
@torch.no_grad()
def linear_gradient(
    a: Operand[Tensor, "B T d"], g: Operand[Tensor, "B T p"]
) -> tuple[Sum[Tensor, "grads: B p d"], Double[Tensor, "squares: B"]]:
    """Materialize the gradients, ``sum_t g[b,t,:] outer a[b,t,:]``; return their squares as well.

    Args:
        a: layer inputs ``[B, T, d]``, float32, float64, bfloat16 or float16.
        g: output gradients ``[B, T, p]``, same dtype.

    Returns:
        ``grads`` ``[B, p, d]`` of the inputs' dtype (16-bit: float32), contiguous, and float64
        squared norms ``[B]`` of these rounded numbers: never below their true squares, above them
        by at most 1e-4 of it (float64: 1e-10); not finite for a sample with NaN or inf. T = 0 gives
        zeros.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    kind = of_sums(a.dtype)
    grads = torch.bmm(g.to(kind).transpose(1, 2), a.to(kind))
    return grads, squares(grads)


@op()
@torch.no_grad()
def linear_sum(
    a: Operand[Tensor, "B T d"],
    g: Operand[Tensor, "B T p"],
    factors: Sum[Tensor, "B"],
    out: Sum[Tensor, "p d", written],
) -> None:
    """Add the weighted sum of the gradients, in place: ``out += sum_b factors[b] grad_b``.

    Args:
        a: layer inputs ``[B, T, d]``, float32, float64, bfloat16 or float16.
        g: output gradients ``[B, T, p]``, same dtype.
        factors: ``[B]``, same dtype (16-bit: float32). A sample of factor 0 contributes nothing,
            NaN or not.
        out: ``[p, d]``, dtype of the factors, contiguous.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    used = factors != 0
    # In float64: float32 products may run in TF32 on a device, and pass a clipping bound.
    scaled = g[used].double() * factors[used, None, None]
    out.add_(scaled.flatten(0, 1).t() @ a[used].double().flatten(0, 1))


def _check_rounding(a: Tensor, g: Tensor, factors: Tensor, out: Tensor, rounding: str) -> None:
    if rounding == "factors" and a.shape[1] != 1:
        raise InvalidInput(
            "rounding",
            expected="truncate for other than one position",
            got=f"factors with T = {a.shape[1]}",
            remedy="Use rounding='truncate'.",
        )


@op(check=_check_rounding)
@torch.no_grad()
def linear_integer_sum(
    a: Operand[Tensor, "B T d"],
    g: Operand[Tensor, "B T p"],
    factors: Sum[Tensor, "B"],
    out: Int32[Tensor, "p d", written],
    *,
    rounding: LinearRounding = "truncate",
) -> None:
    """Sum of whole numbers, in place: ``out += sum_b q_b`` with ``q_b`` near ``factors[b] grad_b``.

    Each term depends on its own sample alone, and integers add up in any order to the same sum.

    ==========  ===============================================================================
    rounding    the whole numbers
    ==========  ===============================================================================
    truncate    one position: integer parts of ``(factors[b] g[b]) a[b]``, each product rounded;
                several: of ``factors[b]`` times the sum over positions, which differs from the
                exact one by at most ``linear_sum_error`` in norm
    operands    inputs and output gradients are rounded to 16-bit integers first: integer parts of
                ``factors[b]`` times the gradient of these, which is exact and whose squared norm
                is ``linear_integer_norm``. Twice as fast where vectors are all a processor has
    factors     one position only: products of two vectors of integers, which are multiples of
                ``a[b]`` and ``g[b]`` to the nearest integers. The norm of ``q_b`` is at most that
                of ``factors[b] grad_b``, and 2^22. Faster than a sum of floats; ``q_b`` is further
                from the gradient: by about ``(d p)^(1/4) sqrt(n / 6)`` for a norm of n
    ==========  ===============================================================================

    ``docs/exact.md`` says which factors keep the norm of a term below a bound.

    Args:
        a: layer inputs ``[B, T, d]``, float32, float64, bfloat16 or float16.
        g: output gradients ``[B, T, p]``, same dtype.
        factors: ``[B]``, same dtype (16-bit: float32). A sample of factor 0 contributes nothing,
            NaN or not; nor does one of a single position for which ``factors[b] g[b]`` is not
            finite.
        out: int32 ``[p, d]``, contiguous. Entries of a term, and their sum, must stay below 2^31.
        rounding: see above.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout; factors with T != 1.
    """
    used, kind = factors != 0, of_sums(a.dtype)
    a, g = a.to(kind), g.to(kind)
    if rounding == "operands":
        alpha, gammas, units = rounded_operands(a[used], g[used])
        scales = (factors[used].double() * units).to(factors.dtype)
        known = (scales.isfinite() & (scales != 0)).nonzero()[:, 0]
        for b in known.tolist():
            gradient = (gammas[b].t() @ alpha[b]).to(factors.dtype)
            out.add_(integers(scales[b] * gradient))
        return
    if rounding == "factors":
        inputs, outputs = a[used, 0], g[used, 0]
        if a.shape[2] >= g.shape[2]:
            outputs, inputs = _vectors(outputs, inputs, factors[used])
        else:
            inputs, outputs = _vectors(inputs, outputs, factors[used])
        out.add_(integers(outputs.t() @ inputs))
        return
    a, g, factors = a[used], g[used], factors[used, None, None]
    if a.shape[1] == 1:
        g = g * factors
        finite = (g.abs() <= torch.finfo(g.dtype).max).flatten(1).all(1)
        a, g, factors = a[finite], g[finite], factors[finite]
    chunk = max(1, _CHUNK // max(1, a.shape[2] * g.shape[2]))
    for b in range(0, len(a), chunk):
        some = slice(b, b + chunk)
        scaled = _scaled(a[some], g[some], factors[some])
        out.add_(integers(scaled).sum(0, dtype=torch.int32))


def _scaled(a: Tensor, g: Tensor, factors: Tensor) -> Tensor:
    """Return the gradients times their factors, which for T = 1 were multiplied into ``g``."""
    if a.shape[1] == 1:
        return g.transpose(1, 2) * a
    return factors * torch.bmm(g.double().transpose(1, 2), a.double()).to(a.dtype)


MOST, LONGEST = 2.0**22, 2.0**14
"""Norms of products of vectors of integers, and of one vector, are cut down to these."""
_SKEW = 2.0**-3


def _vectors(few: Tensor, many: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 vectors of integers of each sample, whose product is its term.

    The one of more entries is rounded last, since its norm comes nearer to what is wanted.
    """
    factors = factors.double()
    few_square, many_square = few.double().square().sum(1), many.double().square().sum(1)
    square = (factors.square() * few_square * many_square).clamp(max=MOST**2)
    fits = (square > 0) & (few_square * many_square).isfinite()
    room = square.sqrt()
    skew = max(math.sqrt(math.sqrt(few.shape[1] / max(1, many.shape[1]))), _SKEW)

    def rounded(x: Tensor, norm: Tensor, x_square: Tensor) -> tuple[Tensor, Tensor]:
        scale = (norm / x_square.sqrt()).to(x.dtype)
        whole = (scale[:, None] * x).round().double()
        whole = whole.where((scale.isfinite() & fits)[:, None], 0.0)
        return whole, whole.square().sum(1)

    first, first_square = rounded(few, room.sqrt() * skew, few_square)
    left = (room / first_square.sqrt()).clamp(max=LONGEST)
    last, waiting = torch.zeros_like(many, dtype=torch.float64), first_square > 0
    less = 0.5
    while bool(waiting.any()):
        left, less = left - less, 2 * less
        waiting = waiting & (left > 0)
        whole, whole_square = rounded(many, left.copysign(factors), many_square)
        done = waiting & (first_square * whole_square <= square)
        last = torch.where(done[:, None], whole, last)
        waiting = waiting & ~done
    return first, last


@op()
@torch.no_grad()
def linear_integer_norm(
    a: Float[Tensor, "B T d"], g: Float[Tensor, "B T p"]
) -> Double[Tensor, "squares: B"]:
    """Return each sample's squared gradient norm once its operands are rounded to integers.

    It is ``unit^2 || sum_t gamma_t outer alpha_t ||_F^2`` of the 16-bit integers that
    ``linear_integer_sum`` multiplies with ``rounding="operands"``: what that op truncates has this
    norm times its factor. The integers are near multiples of ``a`` and ``g`` of the sample, by
    about one part in 1,000 of a norm (``docs/exact.md``, lemma 4).

    Args:
        a: layer inputs ``[B, T, d]``, float32 or float64.
        g: output gradients ``[B, T, p]``, same dtype.

    Returns:
        float64 ``[B]``: never below the true square for these integers, and above it by less than
        ``2^-52 (T^2 + 64)`` of ``(sum_t |gamma_t| |alpha_t|)^2 unit^2``, or ``2^-38`` of itself.
        Infinite for a sample with NaN, inf, or a row whose norm exceeds 2^100; rows with norms
        below 2^-100 count as zero.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    squares = torch.zeros(len(a), dtype=torch.float64, device=a.device)
    alpha, gammas, units = rounded_operands(a, g)
    for b in range(len(a)):
        # Sums of integers below 2^31 are exact in float64.
        whole = (gammas[b].t() @ alpha[b]).square().sum()
        squares[b] = whole * units[b].square() if bool(units[b].isfinite()) else math.inf
    return squares * (1 + gamma(a.shape[2] * g.shape[2] + 8))


@op()
@torch.no_grad()
def linear_sum_error(
    a: Operand[Tensor, "B T d"], g: Operand[Tensor, "B T p"]
) -> Double[Tensor, "errors: B"]:
    """Bound ``|| what linear_integer_sum truncates / factor - grad_b ||_F`` for T > 1.

    ``gamma sum_t |a_t| |g_t|`` with ``gamma = n u / (1 - n u)`` for ``n = T + 4`` roundings (Higham
    2002, section 3.1), and what underflow can hide. A kernel that multiplies otherwise bounds its
    own roundings: tiles of bfloat16 numbers lose up to 34 times as much (``docs/exact.md``).

    Args:
        a: layer inputs ``[B, T, d]``, float32, float64, bfloat16 or float16.
        g: output gradients ``[B, T, p]``, same dtype.

    Returns:
        float64 ``[B]``; infinite for a sample with NaN or inf, or whose sums could overflow.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    absolute = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
    return sum_error(of_sums(a.dtype), a.shape[1], a.shape[2] * g.shape[2], absolute)


__all__ = [
    "ROUTES",
    "linear_gradient",
    "linear_integer_norm",
    "linear_integer_sum",
    "linear_norm",
    "linear_norms",
    "linear_sum",
    "linear_sum_error",
    "norm_route",
]
