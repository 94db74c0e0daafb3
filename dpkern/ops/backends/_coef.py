"""Undo a call whose target the compiled kernels of coefficients found outside [0, 1]."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...base.schema import BoundCall
from .. import coef


def _outside(place: int, _count: int, bound: BoundCall, made: tuple[Tensor, ...]) -> None:
    """Raise for a target outside the interval, in the argument at this place."""
    coef.refuse_release(bound.args[place], made)


FOUND = {"coef.perturb": partial(_outside, 0), "coef.quadratic": partial(_outside, 1)}
"""Kernels by the names of their ops."""
