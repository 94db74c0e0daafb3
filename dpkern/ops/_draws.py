"""Draws of one step that were prefetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..base import validate as check
from ..base.errors import InvalidInput


@dataclass(frozen=True)
class Draws:
    """Prefetched draws of one step, which belong to that step alone.

    Attributes:
        first: position of the first of them.
        values: X at positions ``first, first + 1, ...``, int32.
        rounding: the 16 bits of each position's stochastic rounding as int16, for float sums.
    """

    first: int
    values: torch.Tensor
    rounding: torch.Tensor | None = None

    def at(self, position: int, count: int) -> torch.Tensor:
        """Return X from ``position`` on, int32 ``[count]``."""
        return self.values[position - self.first :][:count]

    def bits_at(self, position: int, count: int) -> torch.Tensor:
        """Return the rounding bits from ``position`` on, int32 ``[count]``."""
        assert self.rounding is not None
        return self.rounding[position - self.first :][:count].to(torch.int32) & 0xFFFF


def check_draws(name: str, draws: object, first: int, end: int, device: torch.device) -> None:
    """Check draws at the positions ``first .. end - 1``, on this device.

    Raises:
        InvalidInput: anything else.
    """
    if not isinstance(draws, Draws):
        raise InvalidInput(
            name,
            expected="an update.Draws",
            got=type(draws).__name__,
            remedy="Take draws from a noise source.",
        )
    kind: dict[str, Any] = {"device": device, "contiguous": True}
    check.tensor_at(f"{name}.values", draws.values, shape=(None,), dtypes=(torch.int32,), **kind)
    if draws.rounding is not None:
        check.tensor_at(
            f"{name}.rounding",
            draws.rounding,
            shape=draws.values.shape,
            dtypes=(torch.int16,),
            **kind,
        )
    check.integer(0, 2**62, **{f"{name}.first": draws.first})
    end_of_draws = draws.first + len(draws.values)
    if first < end and (first < draws.first or end > end_of_draws):
        raise InvalidInput(
            name,
            expected=f"draws at positions {first} to {end - 1}",
            got=f"{draws.first} to {end_of_draws - 1}",
            remedy="Make draws for every position of the step.",
        )


__all__ = ["Draws", "check_draws"]
