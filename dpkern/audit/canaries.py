"""Layer 2: choose where on the clip boundary a canary is seen best.

Isotropic noise is the same in every direction, so every direction of norm C must give the certified
mu. Broken noise is broken in some directions only: the one with the least noise, single
coordinates, all coordinates at once, random ones.
"""

from __future__ import annotations

import torch

from ..base.validate import integer


def directions(
    dimension: int, *, weakest: torch.Tensor | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return unit vectors ``[dimension]`` in L2, float64, by name.

    Args:
        dimension: length of a record's contribution.
        weakest: another one, where it has this dimension.
        seed: seed of the random direction.
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
