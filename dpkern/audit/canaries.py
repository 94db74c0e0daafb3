"""Layer 2: where on the clip boundary a record is seen best.

Flat noise is the same in every direction, so every direction of norm C must give the certified mu;
what is broken is broken in some directions only: the one with least noise, single coordinates, all
coordinates at once, random ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._validate import integer


def directions(
    dimension: int, *, weakest: torch.Tensor | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Unit vectors ``[dimension]`` in L2, float64, by name.

    Args:
        dimension: of a record's contribution.
        weakest: another one, where it has this dimension.
        seed: of the random one.
    """
    integer(1, dimension=dimension)
    one = torch.zeros(dimension, dtype=torch.float64)
    one[dimension // 2] = 1.0
    found = {"coordinate": one}
    if dimension > 1:
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.ones(dimension, dtype=torch.float64)
        drawn = torch.randn(dimension, dtype=torch.float64, generator=generator)
        alternating = 1.0 - 2.0 * (torch.arange(dimension, dtype=torch.float64) % 2)
        found |= {"uniform": uniform, "alternating": alternating, "random": drawn}
    if weakest is not None and weakest.numel() == dimension:
        found = {"weakest": weakest.flatten().double(), **found}
    return {name: vector / vector.norm() for name, vector in found.items()}


def on_boundary(
    shapes: Sequence[tuple[int, ...]],
    groups: Sequence[Sequence[int]],
    bounds: Sequence[float],
    direction: torch.Tensor,
) -> list[torch.Tensor]:
    """A record whose every clip group has the largest L2 norm that is left alone.

    Args:
        shapes: of the parameters.
        groups: which parameters are clipped together.
        bounds: of each group.
        direction: ``[sum of sizes]``; a group in which it is 0 gets a uniform one.

    Returns:
        float64 gradients of the parameters' shapes.
    """
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = list(torch.split(direction.double().flatten(), sizes))
    for group, bound in zip(groups, bounds, strict=True):
        square = sum(float(parts[i].square().sum()) for i in group)
        if square == 0:
            count = sum(sizes[i] for i in group)
            for i in group:
                parts[i] = torch.full_like(parts[i], bound / count**0.5)
            continue
        for i in group:
            parts[i] = parts[i] * (bound / square**0.5)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
