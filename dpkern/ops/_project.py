"""Project onto convex sets: ball, box and simplex, over all parameters together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base import validate
from ..base.errors import InvalidInput


@dataclass(frozen=True)
class Ball:
    """The ball ``||x||_2 <= radius`` around the origin."""

    radius: float

    def __post_init__(self) -> None:
        validate.positive(radius=self.radius)

    def diameter(self, dimension: int) -> float:
        """Return the largest distance of two points."""
        del dimension
        return 2 * self.radius


@dataclass(frozen=True)
class Box:
    """The box ``low <= x_i <= high``."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise InvalidInput(
                "low", expected=f"a number below {self.high}", got=self.low, remedy="Swap the two."
            )

    def diameter(self, dimension: int) -> float:
        """Return the largest distance of two points."""
        return math.sqrt(dimension) * (self.high - self.low)


@dataclass(frozen=True)
class Simplex:
    """The simplex ``x_i >= 0`` and ``sum x_i = total``."""

    total: float = 1.0

    def __post_init__(self) -> None:
        validate.positive(total=self.total)

    def diameter(self, dimension: int) -> float:
        """Return the largest distance of two points."""
        return math.sqrt(2) * self.total if dimension > 1 else 0.0


Projection = Ball | Box | Simplex


def check(params: Sequence[torch.Tensor], onto: Projection) -> None:
    if not isinstance(onto, (Ball, Box, Simplex)):
        raise InvalidInput(
            "onto",
            expected="a Ball, a Box or a Simplex",
            got=type(onto).__name__,
            remedy="Take one from dpkern.ops.update.",
        )


@torch.no_grad()
def move(params: Sequence[torch.Tensor], onto: Projection) -> None:
    """Move the parameters to the set: the reference of ``update.project``.

    On a device it waits for nothing.
    """
    if isinstance(onto, Box):
        for param in params:
            param.clamp_(onto.low, onto.high)
        return
    # With a dimension, so that a product with a float64 number is made in float64.
    flat = [param if param.dim() else param.view(1) for param in params]
    if isinstance(onto, Ball):
        parts = [torch.linalg.vector_norm(part.double()) for part in flat]
        norm = torch.linalg.vector_norm(torch.stack(parts)).view(1)
        factor = torch.where(norm <= onto.radius, 1.0, onto.radius / norm)  # NaN is not inside
        for part in flat:
            torch.mul(part, factor, out=part)
        return
    whole = torch.cat([part.double().flatten() for part in flat])
    if whole.numel():
        threshold = _threshold(whole, onto.total)
        for part in flat:
            part.copy_((part.double() - threshold).clamp_(min=0))


def _threshold(whole: torch.Tensor, total: float) -> torch.Tensor:
    """Return ``[1]``, the t for which ``sum max(x - t, 0)`` is the total."""
    falling = whole.sort(descending=True).values
    count = torch.arange(1, whole.numel() + 1, dtype=torch.float64, device=whole.device)
    thresholds = (falling.cumsum(0) - total) / count
    last = (falling > thresholds).sum() - 1
    return thresholds.gather(0, last.clamp_(min=0).view(1))
