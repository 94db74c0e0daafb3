"""Write the draws of a noise source to memory, for kernels that read them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...base.rng import Stream
from .. import _cdt, coef, update
from .._draws import CdtDraws, Draws, SampleReads


@dataclass(frozen=True)
class Ahead:
    """The ops by which a backend writes draws and rounding bits.

    Attributes:
        source_draws: its ``noise.source_draws``.
        rounding_bits: its ``noise.rounding_bits``.
    """

    source_draws: Callable[..., torch.Tensor]
    rounding_bits: Callable[..., torch.Tensor]

    def written(
        self,
        draws: Draws,
        position: int,
        count: int,
        device: torch.device,
        rounding: Stream | None,
    ) -> Draws:
        """Return draws in memory for these positions, with their bits if ``rounding`` gives any."""
        place: dict[str, Any] = {"position": position, "count": count, "device": device}
        if not draws.in_memory:
            draws = Draws(position, self.source_draws(draws, **place))
        if rounding is None or draws.rounding is not None:
            return draws
        bits = self.rounding_bits(rounding, **place)
        return Draws(position, draws.at(position, count), bits)

    def of_update(
        self, noise: update.Noise, sums: Sequence[torch.Tensor], *, bits: bool = True
    ) -> update.Noise:
        """Return the noise of these sums with its draws in memory, and ``bits`` of float sums."""
        if noise.draws is None:
            return noise
        ends = [at + total.numel() for at, total in zip(noise.positions, sums, strict=True)]
        first = min(noise.positions)
        rounding = noise.rounding if bits and sums[0].is_floating_point() else None
        place = first, max(ends) - first, sums[0].device
        return replace(noise, draws=self.written(noise.draws, *place, rounding))

    def of_coefficients(
        self, noise: coef.Noise | None, linear: int, quadratic: int, device: torch.device
    ) -> coef.Noise | None:
        """Return the noise of so many coefficients with its draws in memory."""
        if noise is None or noise.draws is None:
            return noise
        end = coef.quadratic_position(noise.position, linear) + quadratic
        place = noise.position, end - noise.position, device
        return replace(noise, draws=self.written(noise.draws, *place, noise.rounding))


def reads(draws: SampleReads, position: int) -> dict[str, int]:
    """Return how a table of samples is read from ``position`` on."""
    entries = len(draws.values)
    start = (draws.cursor + position - draws.first) % entries
    return {"entries": entries, "start": start, "shift": draws.shift}


def look_ups(draws: CdtDraws) -> tuple[Stream, str, int]:
    """Return the stream, law and number of boundaries of a cumulative table."""
    assert draws.stream is not None
    return draws.stream, draws.distribution, _cdt.boundaries_in(draws.values)


__all__ = ["Ahead", "look_ups", "reads"]
