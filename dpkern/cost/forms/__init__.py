"""Closed forms: what each op takes, computed from its arguments alone.

A form is the one statement of an op's cost: ``Op.cost`` is its projection to bytes, floating
operations and random words.

Each line carries its evidence (``primitives.EVIDENCE``). With a counted kernel every line of an op
is ``executed``; otherwise some lines are compared with a reference walk, the rest are formulas.
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
    ghost_integers,
    ghost_linear,
    noise,
    recurrent,
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
    **recurrent.FORMS,
    **ghost_integers.FORMS,
    **spectral.FORMS,
    **coef.FORMS,
    **symbols.FORMS,
}

FORMS = {name: executed(form) if name in KERNELS else form for name, form in _ALL.items()}
"""Forms by op name; they take the op's arguments, and by keyword what its data decides."""

register_costs({name: cost_of(form) for name, form in _ALL.items()})

__all__ = ["FORMS", "Form"]
