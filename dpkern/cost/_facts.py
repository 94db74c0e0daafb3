"""Read from a call's data what its cost depends on, as keywords of the closed forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ops import clip, update

Facts = dict[str, Any]


def _clip_sum(
    grads: clip.Gradients,
    max_grad_norm: float | Sequence[float],
    *,
    p: clip.Power = 2,
    style: str = "flat",
    **_: Any,
) -> Facts:
    """Count the samples that are not finite, and those (per layer: samples and tensors) clipped."""
    tensors = clip.tensors_of(grads)
    each = torch.stack([clip.sample_norm.reference(g, p=p) for g in tensors], dim=1)
    norms = clip.combine_norms(each, p)
    finite = torch.isfinite(norms)
    if style == "per_layer":
        norms = each
    bounds = torch.tensor(max_grad_norm, dtype=torch.float64)
    over = (norms > bounds * clip.SLACK)[finite]
    return {"clipped": int(over.sum()), "nonfinite": int((~finite).sum())}


def _contract(grads: Any, factors: torch.Tensor, *_: Any) -> Facts:
    return {"dropped": len(factors) - int(torch.count_nonzero(factors))}


def _clip_factors(
    squares: Sequence[torch.Tensor], max_grad_norm: float, *, scale: float = 1.0, **_: Any
) -> Facts:
    """Count the samples that are not finite, and those beyond the bound."""
    norms = torch.stack([square.double() for square in squares]).sum(0).sqrt() * abs(scale)
    finite = torch.isfinite(norms)
    over = norms[finite] > max_grad_norm * clip.SLACK
    return {"clipped": int(over.sum()), "nonfinite": int((~finite).sum())}


def _project(params: Sequence[torch.Tensor], onto: update.Projection) -> Facts:
    if not isinstance(onto, update.Ball):
        return {}
    norm = torch.stack([part.double().norm() for part in params]).norm()
    return {"moved": not bool(norm <= onto.radius)}


_FACTS: dict[str, Callable[..., Facts]] = {
    "clip.clip_sum": _clip_sum,
    "ghost.clip_factors": _clip_factors,
    "ghost.contract": _contract,
    "ghost.explicit_integer_sum": _contract,
    "update.project": _project,
}


def facts_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Facts:
    """Read from the arguments before the call; other ops' forms read theirs themselves."""
    found = _FACTS.get(op)
    return {} if found is None else found(*args, **kwargs)


__all__ = ["facts_of"]
