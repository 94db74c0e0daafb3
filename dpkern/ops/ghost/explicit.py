"""Norms, clip factors and weighted sums of per-sample gradients that are materialized.

Biases, scales and kept gradients of all parameters go through one call each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...base import validate as check
from ...base.dispatch import op
from ...base.memory import memory_order
from ...base.signature import Double, Float, FloatDtype, Int32, NonNegative, dense, written
from .. import clip
from .._lattice import round_down
from ._bounds import integers
from ._bounds import squares as sums_of_squares

Tensors = Sequence[Tensor]


@op()
@torch.no_grad()
def explicit_norm(
    grads: Sequence[Float[Tensor, "B *P", dense]],
) -> Double[Tensor, "squares: B"]:
    """Return the squared norm of each sample's gradients together, ``sum_i ||grads[i][b]||^2``.

    Args:
        grads: tensors ``[B, *shape_i]``, float32 or float64, without gaps in memory and the samples
            outermost; the other dimensions in any order.

    Returns:
        float64 ``[B]``, rounded like any float64 sum; not finite for a sample with NaN or inf.

    Raises:
        InvalidInput: no list, or wrong type, shape, dtype, device or layout.
    """
    batch = grads[0].shape[0]
    return sum(
        (sums_of_squares(part.reshape(batch, 1, part[:1].numel())) for part in grads),
        torch.zeros(batch, dtype=torch.float64, device=grads[0].device),
    )


def _check_bound(
    squares: Tensors, max_grad_norm: float, dtype: torch.dtype, scale: float, automatic: bool
) -> None:
    if max_grad_norm.__class__ is float and 0 < max_grad_norm < math.inf:
        return  # the common case
    if automatic or max_grad_norm != math.inf:
        check.positive(max_grad_norm=max_grad_norm)


@op(check=_check_bound)
@torch.no_grad()
def clip_factors(
    squares: Sequence[Double[Tensor, "B"]],
    max_grad_norm: float,
    *,
    dtype: FloatDtype,
    scale: NonNegative = 1.0,
    automatic: bool = False,
) -> tuple[Float[Tensor, "factors: B"], Double[Tensor, "norms: B"]]:
    """Return norms and clip factors from the parameters' squared norms.

    ``n_b = scale sqrt(sum_k squares[k][b])`` and ``c_b = scale min(1, C / n_b)``; automatic:
    ``c_b = scale C / (n_b + 0.01)`` (Bu et al. 2023), with C lowered by 2^-21 against rounding.

    Args:
        squares: float64 ``[B]`` each.
        max_grad_norm: C > 0; infinity does not clip, and is refused if ``automatic``.
        dtype: of the factors, float32 or float64.
        scale: what takes the gradients at hand to those of each sample's own loss.
        automatic: scale instead of clipping.

    Returns:
        Factors ``[B]``, never rounded up, 0 where the norm is not finite; norms, float64 ``[B]``.

    Raises:
        InvalidInput: no list, or wrong type, shape, dtype, device, layout or number.
    """
    norms = torch.stack(list(squares)).sum(0).sqrt() * scale
    aim = max_grad_norm * clip.SLACK
    factors = aim / (norms + clip.GAMMA) if automatic else (aim / norms).clamp(max=1.0)
    factors = factors.where(torch.isfinite(norms), 0.0) * scale
    return round_down(factors, dtype), norms


@op()
@torch.no_grad()
def contract(
    grads: Sequence[Float[Tensor, "B *P", dense]],
    factors: Float[Tensor, "B"],
    outs: Sequence[Float[Tensor, "*P", written]],
) -> None:
    """Add weighted sums, in place: ``outs[i] += sum_b factors[b] grads[i][b]``.

    Args:
        grads: tensors ``[B, *shape_i]``, float32 or float64, without gaps in memory and the samples
            outermost; the other dimensions in any order.
        factors: ``[B]``, same dtype. A sample of factor 0 contributes nothing, NaN or not.
        outs: ``[*shape_i]``, same dtype, contiguous, no two sharing memory.

    Raises:
        InvalidInput: no list, or wrong type, shape, dtype, device or layout.
    """
    used = factors != 0
    for part, out in zip(grads, outs, strict=True):
        out.add_(torch.tensordot(factors[used], part[used], dims=1))


@op()
@torch.no_grad()
def explicit_integer_sum(
    grads: Sequence[Float[Tensor, "B *P", dense]],
    factors: Float[Tensor, "B"],
    outs: Sequence[Int32[Tensor, "*P", written]],
) -> None:
    """Add truncated products in place: ``outs[i] += sum_b trunc(factors[b] grads[i][b])``.

    Each product is rounded once and then truncated: ``docs/exact.md`` says which factors keep the
    norm of a sample's integers below a bound.

    Args:
        grads: tensors ``[B, *shape_i]``, float32 or float64, without gaps in memory and the samples
            outermost; the other dimensions in any order.
        factors: ``[B]``, same dtype. A sample of factor 0 contributes nothing, NaN or not.
        outs: int32 ``[*shape_i]``, contiguous, no two sharing memory. Entries of a term, and their
            sum, must stay below 2^31.

    Raises:
        InvalidInput: no list, or wrong type, shape, dtype, device or layout.
    """
    used = factors != 0
    for part, out in zip(grads, outs, strict=True):
        rows = part[used]
        weights = factors[used].view(-1, *(1,) * (part.dim() - 1))
        out.add_(integers(weights * rows).sum(0, dtype=torch.int32))


__all__ = ["clip_factors", "contract", "explicit_integer_sum", "explicit_norm", "memory_order"]
