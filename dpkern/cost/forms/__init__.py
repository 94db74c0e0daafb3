"""Closed forms: what each op takes, from its arguments alone.

They are the one statement of an op's cost: ``Op.cost`` is the projection of its form to bytes,
floating operations and random words.

Each line says how it is known (``primitives.EVIDENCE``): of ops with a counted kernel every line is
``executed``; of the others some are compared with a walk of the reference, the rest are formulas.
"""

from __future__ import annotations

from ...base.dispatch import register_costs
from ..counted import KERNELS
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
from ._form import Form, cost_of, executed

_ALL: dict[str, Form] = {
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

FORMS = {name: executed(form) if name in KERNELS else form for name, form in _ALL.items()}
"""By the name of the op; they take the op's arguments, and what its data decides by keyword."""

register_costs({name: cost_of(form) for name, form in _ALL.items()})

__all__ = ["FORMS", "Form"]
