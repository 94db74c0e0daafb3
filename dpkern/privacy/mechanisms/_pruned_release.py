"""Releases of some of a parameter's coordinates: chosen before the step, or printed, after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...base.phase import MAP, phase
from .release import AddNoise, Diagonal, Release
from .work import Work


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept(Release):
    """Some of a parameter's coordinates, chosen before the step.

    Attributes:
        places: int64 ``[m]``, positions in the flat parameter, increasing.
        parameter: its shape.
    """

    places: torch.Tensor
    parameter: tuple[int, ...]

    @property
    def mask(self) -> torch.Tensor:
        """float64, of the parameter's shape: 1 where a coordinate is kept, else 0."""
        return self.back(torch.ones(len(self.places), device=self.places.device))

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.places),)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        lead = rows.shape[: rows.dim() - len(self.parameter)]
        return rows.reshape(*lead, -1)[..., self.places.to(rows.device)].double()

    def back(self, noisy: torch.Tensor) -> torch.Tensor:
        whole = noisy.new_zeros(math.prod(self.parameter), dtype=torch.float64)
        return whole.index_copy_(0, self.places.to(noisy.device), noisy.double()).view(
            self.parameter
        )

    def count_forward(
        self, work: Work, parameter: tuple[int, ...], rows: int, dtype: torch.dtype
    ) -> None:
        """Selected first, then widened."""
        del parameter
        kept = rows * len(self.places)
        work.gathered("kept places", kept, len(self.places))
        work.converted("kept places", kept, dtype, torch.float64)
        work.converted("kept places", kept, torch.float64, dtype)

    def count_back(self, work: Work, parameter: tuple[int, ...], dtype: torch.dtype) -> None:
        """Zeros, and the kept coordinates among them."""
        kept = len(self.places)
        work.filled("kept places", math.prod(parameter))
        work.converted("kept places", kept, dtype, torch.float64)
        work.scattered("kept places", kept, kept)


@dataclass(frozen=True, kw_only=True, eq=False)
class Largest(Diagonal):
    """The coordinates of the sum that are largest, found before they are noised, as printed.

    Attributes:
        count: how many.
        error: takes the rest, divided by ``batch``, in place; None: nothing is remembered.
        batch: public number of samples.
    """

    count: int
    error: torch.Tensor | None
    batch: float

    @property
    def plain(self) -> bool:
        return False

    @property
    def protects(self) -> bool:
        return False

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return (self.count,)

    def signal_shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return parameter

    def noised(self, signal: torch.Tensor, add_noise: AddNoise) -> torch.Tensor:
        with phase(MAP):
            whole = signal.double().flatten()
            places = largest(whole, self.count)
            kept = torch.zeros_like(whole)
            if self.error is not None:
                rest = whole.index_fill(0, places, 0.0) / self.batch
                self.error.copy_(rest.view(signal.shape))
            kept[places] = add_noise(signal.flatten()[places].contiguous()).double()
            return kept.view(signal.shape)

    def count_noised(self, work: Work, parameter: tuple[int, ...], dtype: torch.dtype) -> None:
        """The largest coordinates chosen before their noise, and the rest remembered."""
        n, k = math.prod(parameter), self.count
        work, line = work.under(MAP), "largest places"
        work.converted(line, n, dtype, torch.float64)
        work.largest(line, n, k)
        work.filled(line, n)
        if self.error is not None:
            work.each(line, n)
            work.scattered(line, k, 0)
            work.each(line, n, DIV=1)
            work.each(line, n)
        work.gathered(line, k)
        work.converted(line, k, dtype, torch.float64)
        work.scattered(line, k, k)

    def entry_scales(self, parameter: tuple[int, ...]) -> torch.Tensor | None:
        del parameter
        return None


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the ``count`` largest magnitudes of a flat tensor, increasing."""
    return values.abs().topk(count).indices.sort().values
