"""Releases of some of a parameter's coordinates: chosen before the step, or printed, after it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ...base.phase import MAP, phase
from .release import AddNoise, DiagonalMap, ReleaseMap
from .work import OpAccount


@dataclass(frozen=True, kw_only=True, eq=False)
class SubsetMap(ReleaseMap):
    """The map to some of a parameter's coordinates, chosen before the step.

    Attributes:
        places: int64 ``[m]``, positions in the flat parameter, increasing.
        parameter: its shape.
    """

    label: ClassVar[str] = "kept"

    places: torch.Tensor
    parameter: tuple[int, ...]

    @property
    def mask(self) -> torch.Tensor:
        """float64, of the parameter's shape: 1 where a coordinate is kept, else 0."""
        return self.to_gradient(torch.ones(len(self.places), device=self.places.device))

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.places),)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        lead = rows.shape[: rows.dim() - len(self.parameter)]
        return rows.reshape(*lead, -1)[..., self.places.to(rows.device)].double()

    def to_gradient(self, noisy: torch.Tensor) -> torch.Tensor:
        whole = noisy.new_zeros(math.prod(self.parameter), dtype=torch.float64)
        return whole.index_copy_(0, self.places.to(noisy.device), noisy.double()).view(
            self.parameter
        )

    def count_forward(
        self, work: OpAccount, parameter: tuple[int, ...], rows: int, dtype: torch.dtype
    ) -> None:
        """Count selecting first, then widening."""
        del parameter
        kept = rows * len(self.places)
        work.gathered("kept places", kept, len(self.places))
        work.converted("kept places", kept, dtype, torch.float64)
        work.converted("kept places", kept, torch.float64, dtype)

    def count_back(self, work: OpAccount, parameter: tuple[int, ...], dtype: torch.dtype) -> None:
        """Count zeros, and writing the kept coordinates among them."""
        kept = len(self.places)
        work.filled("kept places", math.prod(parameter))
        work.converted("kept places", kept, dtype, torch.float64)
        work.scattered("kept places", kept, kept)


@dataclass(frozen=True, kw_only=True, eq=False)
class TopKMap(DiagonalMap):
    """The largest coordinates of the sum, found before they are noised, as printed.

    Signals are in units of ``scale``; magnitudes and what is left out are not.

    Attributes:
        count: how many.
        error: takes the rest, divided by ``batch``, in place. None remembers nothing.
        batch: public number of samples.
    """

    label: ClassVar[str] = "largest"

    count: int
    error: torch.Tensor | None
    batch: float

    @property
    def is_identity(self) -> bool:
        return False

    @property
    def covers_all_directions(self) -> bool:
        return False

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return (self.count,)

    def signal_shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return parameter

    def noised(self, signal: torch.Tensor, add_noise: AddNoise) -> torch.Tensor:
        with phase(MAP):
            whole = signal.double().flatten()
            scale = None if self.scale is None else self.scale.to(whole).flatten()
            sizes = whole if scale is None else whole * scale
            places = largest(sizes, self.count)
            kept = torch.zeros_like(whole)
            if self.error is not None:
                rest = sizes.index_fill(0, places, 0.0) / self.batch
                self.error.copy_(rest.view(signal.shape))
            noisy = add_noise(signal.flatten()[places].contiguous()).double()
            kept[places] = noisy if scale is None else noisy * scale[places]
            return kept.view(signal.shape)

    def count_noised(self, work: OpAccount, parameter: tuple[int, ...], dtype: torch.dtype) -> None:
        """Count choosing the largest coordinates before their noise, and remembering the rest."""
        n, k = math.prod(parameter), self.count
        work, line = work.under(MAP), "largest places"
        work.converted(line, n, dtype, torch.float64)
        if self.scale is not None:
            work.each(line, n, reads=2, MUL=1)
        work.largest(line, n, k)
        work.filled(line, n)
        if self.error is not None:
            work.each(line, n)
            work.scattered(line, k, 0)
            work.each(line, n, DIV=1)
            work.each(line, n)
        work.gathered(line, k)
        work.converted(line, k, dtype, torch.float64)
        if self.scale is not None:
            work.gathered(line, k)
            work.each(line, k, reads=2, MUL=1)
        work.scattered(line, k, k)

    def entry_scales(self, parameter: tuple[int, ...]) -> torch.Tensor | None:
        del parameter
        return None


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return positions of the ``count`` largest magnitudes of a flat tensor, increasing."""
    return values.abs().topk(count).indices.sort().values
