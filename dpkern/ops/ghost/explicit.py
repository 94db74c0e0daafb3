"""Per-sample gradients that exist anyway: their norms, clip factors and weighted sums.

Biases, scales and kept gradients of all parameters go through one call each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...base import validate as check
from ...base.dispatch import op
from ...base.errors import InvalidInput
from .. import clip
from .._lattice import round_down
from ._bounds import FLOATS, squares

Tensors = Sequence[torch.Tensor]


def memory_order(grads: torch.Tensor) -> list[int]:
    """The dimensions behind dim 0 from the outermost in memory to the innermost."""
    if grads.is_contiguous():
        return list(range(1, grads.dim()))
    strides = grads.stride()
    return sorted(range(1, grads.dim()), key=lambda i: (-strides[i], i))


def _check_list(name: str, tensors: object) -> torch.Tensor:
    """A list with at least one tensor: the first."""
    if not isinstance(tensors, (list, tuple)) or not tensors:
        raise InvalidInput(
            name,
            expected="a list of at least one tensor",
            got=type(tensors).__name__ if not isinstance(tensors, (list, tuple)) else "none",
            remedy="Wrap a single tensor in a list.",
        )
    return check.tensor_at(f"{name}[0]", tensors[0], dtypes=FLOATS)


def _check_gradients(grads: Tensors) -> str:
    first = _check_list("grads", grads)
    for i, part in enumerate(grads):
        name = f"grads[{i}]"
        check.tensor_at(name, part, dtypes=(first.dtype,), device=first.device)
        dense = part.is_contiguous() or (
            part.dim() > 0 and part.permute(0, *memory_order(part)).is_contiguous()
        )
        if not dense or part.dim() < 1 or part.shape[0] != first.shape[0]:
            raise InvalidInput(
                name,
                expected="[B, ...] without gaps, the samples outermost, one B for all",
                got=f"shape {list(part.shape)} with strides {part.stride()}",
                remedy="Call .contiguous() first.",
            )
    return first.device.type


def _validate_norm(grads: Tensors, *, backend: str | None = None) -> str:
    return _check_gradients(grads)


@op(validate=_validate_norm)
@torch.no_grad()
def explicit_norm(grads: Tensors, *, backend: str | None = None) -> torch.Tensor:
    """Squared norm of each sample's gradients together, ``sum_i ||grads[i][b]||^2``.

    Args:
        grads: tensors ``[B, *shape_i]``, float32 or float64, without gaps in memory and the samples
            outermost; the other dimensions in any order.
        backend: who runs it.

    Returns:
        float64 ``[B]``, rounded like any float64 sum; not finite for a sample with NaN or inf.

    Raises:
        InvalidInput: no list, or wrong type, shape, dtype, device or layout.
    """
    batch = grads[0].shape[0]
    return sum(
        (squares(part.reshape(batch, 1, part[:1].numel())) for part in grads),
        torch.zeros(batch, dtype=torch.float64, device=grads[0].device),
    )


def _validate_factors(
    squares: Tensors,
    max_grad_norm: float,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    automatic: bool = False,
    backend: str | None = None,
) -> str:
    first = _check_list("squares", squares)
    kind: dict[str, Any] = {"dtypes": (torch.float64,), "device": first.device, "contiguous": True}
    for i, part in enumerate(squares):
        check.tensor_at(f"squares[{i}]", part, shape=(first.shape[:1] or (None,)), **kind)
    if max_grad_norm != float("inf"):
        check.positive(max_grad_norm=max_grad_norm)
    check.non_negative(scale=scale)
    check.choice(FLOATS, dtype=dtype)
    return first.device.type


@op(validate=_validate_factors)
@torch.no_grad()
def clip_factors(
    squares: Tensors,
    max_grad_norm: float,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    automatic: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms and clip factors from the parameters' squared norms.

    ``n_b = scale sqrt(sum_k squares[k][b])`` and ``c_b = scale min(1, C / n_b)``; automatic:
    ``c_b = scale C / (n_b + 0.01)`` (Bu et al. 2023), with C lowered by 2^-21 against rounding.

    Args:
        squares: float64 ``[B]`` each.
        max_grad_norm: C > 0; infinity does not clip.
        dtype: of the factors, float32 or float64.
        scale: what takes the gradients at hand to those of each sample's own loss.
        automatic: scale instead of clipping.
        backend: who runs it.

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


def _validate_contract(
    grads: Tensors, factors: torch.Tensor, outs: Tensors, *, backend: str | None = None
) -> str:
    device = _check_gradients(grads)
    first = grads[0]
    kind: dict[str, Any] = {"dtypes": (first.dtype,), "device": first.device, "contiguous": True}
    check.tensor(factors=factors, shape=first.shape[:1], **kind)
    _check_list("outs", outs)
    if len(outs) != len(grads):
        raise InvalidInput(
            "outs",
            expected=f"{len(grads)} tensors, one for each of grads",
            got=str(len(outs)),
            remedy="Give every gradient its own sum.",
        )
    if not check.alike(outs, shapes=[part.shape[1:] for part in grads], **kind):
        for i, (part, out) in enumerate(zip(grads, outs, strict=True)):
            check.tensor_at(f"outs[{i}]", out, shape=part.shape[1:], **kind)
    return device


@op(validate=_validate_contract)
@torch.no_grad()
def contract(
    grads: Tensors, factors: torch.Tensor, outs: Tensors, *, backend: str | None = None
) -> None:
    """Weighted sums, in place: ``outs[i] += sum_b factors[b] grads[i][b]``.

    Args:
        grads: tensors ``[B, *shape_i]``, float32 or float64, without gaps in memory and the samples
            outermost; the other dimensions in any order.
        factors: ``[B]``, same dtype. A sample of factor 0 contributes nothing, NaN or not.
        outs: ``[*shape_i]``, same dtype, contiguous, no two sharing memory.
        backend: who runs it.

    Raises:
        InvalidInput: no list, or wrong type, shape, dtype, device or layout.
    """
    used = factors != 0
    for part, out in zip(grads, outs, strict=True):
        out.add_(torch.tensordot(factors[used], part[used], dims=1))


__all__ = ["clip_factors", "contract", "explicit_norm", "memory_order"]
