"""Make the sums of a program in floating point, or in integers of proved norm (docs/exact.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...privacy.mechanisms import Plan
from ..exact_sums import Aim, add_clipped, most_samples, squared_norms_rounded
from ..per_sample_gradients import PerSampleGradients, squared_norms
from ..uses import ParameterSource

Add = Callable[[PerSampleGradients, Tensor, Tensor], None]
"""Adds the clipped gradients of a record, given the factors, to its sum."""


@dataclass(frozen=True)
class SumArithmetic:
    """Norms and sums of one kind, of records that the calls of a step do not hold.

    Attributes:
        exact: whether the sums are integers.
        squares: returns the share of a record in its clip group's squared norms.
        add: adds the clipped gradients of a record to its sum, as its clip group's aim says.
    """

    exact: bool
    squares: Callable[[PerSampleGradients], Tensor]
    add: Callable[[Aim, PerSampleGradients, Tensor, Tensor], None]

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the sums of parameters of this dtype."""
        return torch.int32 if self.exact else dtype

    def sum_shape(self, slot: ParameterSource) -> tuple[int, ...]:
        """Return the shape of a parameter's sum: integers are clipped as release coordinates."""
        if not self.exact or slot.release is None:
            return slot.shape
        return slot.release.signal_shape(slot.shape)

    def aims(self, plan: Plan) -> tuple[Aim, ...]:
        """Return what each group's factors aim at."""
        if self.exact:
            return tuple(Aim.of(plan.blocks[members[0]]) for members in plan.groups)
        return tuple(Aim(1.0, bound, factored=False) for bound in plan.group_bounds)

    def most_samples(self, plan: Plan) -> float:
        """Return how many samples the sums are sure to hold."""
        return most_samples(plan) if self.exact else math.inf


def _add_floats(aim: Aim, record: PerSampleGradients, factors: Tensor, out: Tensor) -> None:
    del aim
    record.add_sum(factors, out)


FLOAT = SumArithmetic(False, squared_norms, _add_floats)
EXACT = SumArithmetic(True, squared_norms_rounded, add_clipped)


def arithmetic_of(plan: Plan) -> SumArithmetic:
    """Return the arithmetic of a plan."""
    return EXACT if plan.arithmetic == "exact" else FLOAT


__all__ = ["EXACT", "FLOAT", "Add", "SumArithmetic", "arithmetic_of"]
