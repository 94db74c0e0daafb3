"""What follows if the compiled kernels of coefficients find a target outside [0, 1]."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...base.schema import Bound
from .. import coef


def _outside(place: int, _count: int, bound: Bound, made: tuple[Tensor, ...]) -> None:
    """A target lay outside: the argument at this place."""
    coef.refuse_release(bound.args[place], made)


FOUND = {"coef.perturb": partial(_outside, 0), "coef.quadratic": partial(_outside, 1)}
"""By the names of their ops."""
