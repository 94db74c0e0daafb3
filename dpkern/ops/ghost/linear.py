"""Linear layers ``y = a W^T``: the gradient of sample b is ``sum_t g[b,t,:] outer a[b,t,:]``.

B samples, T positions, d input and p output features. Sequences, convolutions by patches and plain
batches (T = 1) all have this form.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.signature import Double, Operand, Sum, written
from ._bounds import gamma, of_sums, squares, upper_square

LinearRoute = Literal["auto", "rank_one", "gram", "direct"]
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
    """Which way a norm goes: rank_one for one position, else the one asked for, or for ``auto`` the
    one that the CPU's kernels take; they run direct products about 1.4 times as fast as tables of
    dots, and beyond 128 (Gram: 192) positions in float64."""
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
    """Squared norm of each sample's gradient, ``|| sum_t g[b,t,:] outer a[b,t,:] ||_F^2``.

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

    =================== ==========================
    edge case           result
    =================== ==========================
    empty batch         ``[0]``
    T = 0               0
    NaN or inf in a row not finite for the sample
    =================== ==========================

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout; rank_one with T != 1.
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


@op()
@torch.no_grad()
def linear_gradient(
    a: Operand[Tensor, "B T d"], g: Operand[Tensor, "B T p"]
) -> tuple[Sum[Tensor, "grads: B p d"], Double[Tensor, "squares: B"]]:
    """The gradients themselves, ``grads[b] = sum_t g[b,t,:] outer a[b,t,:]``, and their squares.

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
    """Weighted sum of the gradients, in place: ``out += sum_b factors[b] grad_b``.

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


__all__ = ["ROUTES", "linear_gradient", "linear_norm", "linear_sum", "norm_route"]
