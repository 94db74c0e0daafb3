"""The facts and the timed sizes of every op, a file for each stem or family.

Conformance tests vary these calls, benchmarks time them. A new op, or a new size, is an entry of
one file here.
"""

from __future__ import annotations

from ..case import Facts
from . import (
    clip,
    coef,
    ghost_affine,
    ghost_conv,
    ghost_embedding,
    ghost_explicit,
    ghost_linear,
    noise,
    product,
    recurrent,
    spectral,
    symbols,
    update,
)

FACTS: dict[str, Facts] = {
    **clip.FACTS,
    **coef.FACTS,
    **ghost_affine.FACTS,
    **ghost_conv.FACTS,
    **ghost_embedding.FACTS,
    **ghost_explicit.FACTS,
    **ghost_linear.FACTS,
    **noise.FACTS,
    **product.FACTS,
    **recurrent.FACTS,
    **spectral.FACTS,
    **symbols.FACTS,
    **update.FACTS,
}
"""The facts of each op, by its name ``stem.function``."""

__all__ = ["FACTS"]
