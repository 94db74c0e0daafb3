"""Closed forms: what each op takes, from its arguments alone; the same as its counted execution."""

from __future__ import annotations

from . import (
    clip,
    coef,
    ghost_affine,
    ghost_conv,
    ghost_embedding,
    ghost_explicit,
    ghost_linear,
    noise,
    spectral,
    symbols,
    update,
)
from ._form import Form

FORMS: dict[str, Form] = {
    **noise.FORMS,
    **update.FORMS,
    **clip.FORMS,
    **ghost_explicit.FORMS,
    **ghost_linear.FORMS,
    **ghost_conv.FORMS,
    **ghost_embedding.FORMS,
    **ghost_affine.FORMS,
    **spectral.FORMS,
    **coef.FORMS,
    **symbols.FORMS,
}
"""By the name of the op; they take the op's arguments, and what its data decides by keyword."""

__all__ = ["FORMS", "Form"]
