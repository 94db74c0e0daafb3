"""Convolutions on grids of several sizes, and their correlation maps by plain sums."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dpkern.ops.spectral import Band
from dpkern.ops.spectral._sizes import ConvolutionGrid, fast, planes


@dataclass(frozen=True)
class Case:
    """A convolution and which grid it is transformed on."""

    ins: int
    outs: int
    input: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    grid: str = "padded"

    @property
    def name(self) -> str:
        """For the test's id."""
        numbers = f"{self.ins}-{self.outs}g{self.groups} {self.kernel}@{self.input}"
        return f"{numbers} s{self.stride} p{self.padding} t{self.dilation} {self.grid}"

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """The arguments of the layer."""
        return {
            "kernel_size": self.kernel,
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }

    def operands(self, batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and output gradients."""
        output = [
            (n + 2 * self.padding - self.dilation * (k - 1) - 1) // self.stride + 1
            for n, k in zip(self.input, self.kernel, strict=True)
        ]
        generator = torch.Generator().manual_seed(len(self.name))
        x = torch.randn(batch, self.ins, *self.input, generator=generator, dtype=torch.float64)
        g = torch.randn(batch, self.outs, *output, generator=generator, dtype=torch.float64)
        return x.to(dtype), g.to(dtype)

    @cached_property
    def layer(self) -> ConvolutionGrid:
        """Its sizes on the grid."""
        x, g = self.operands(1, torch.float64)
        padded = tuple(n + 2 * self.padding for n in self.input)
        bare = ConvolutionGrid.of(
            x, g, self.kernel, self.stride, self.padding, self.dilation, 1, padded
        )
        axes = len(self.input)
        size = {
            "least": bare.least[-axes:],
            "padded": padded,
            "fast": tuple(fast(n, self.stride) for n in padded),
            "linear": bare.linear[-axes:],
            "large": tuple(n + 3 for n in bare.linear[-axes:]),
        }[self.grid]
        return ConvolutionGrid.of(
            x, g, self.kernel, self.stride, self.padding, self.dilation, self.groups, size
        )

    @property
    def size(self) -> tuple[int, ...]:
        """Of the grid, one per spatial dimension."""
        return self.layer.size[-len(self.input) :]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of filters on it; the authors' slice is of lines and planes."""
        of_all = "shells", "rectangle"
        return of_all if len(self.input) == 3 else (*of_all, "authors_slice")

    def band(self, kind: str = "shells", keep: float = 0.4) -> Band:
        """A filter on the grid."""
        return Band(self.size, kind, keep)


_LAYERS = (
    (2, 3, (8, 8), (3, 3), 1, 0, 1, 1),
    (2, 3, (8, 8), (3, 3), 1, 1, 1, 1),
    (1, 6, (9, 7), (5, 5), 1, 2, 1, 1),
    (4, 4, (9, 9), (3, 3), 2, 1, 1, 2),
    (4, 8, (8, 10), (3, 3), 2, 0, 1, 4),
    (3, 2, (11, 9), (3, 3), 1, 2, 2, 1),
    (2, 2, (10, 10), (4, 4), 3, 2, 1, 1),
    (3, 5, (6, 6), (1, 1), 1, 0, 1, 1),
    (2, 4, (5, 5), (5, 5), 1, 0, 1, 1),
    (2, 4, (12, 8), (3, 2), 2, 1, 2, 2),
)
CASES = [
    *(Case(*layer, grid) for layer in _LAYERS for grid in ("padded", "fast", "linear")),
    Case(2, 3, (12,), (3,), 1, 1, 1, 1, "padded"),
    Case(4, 2, (13,), (4,), 2, 2, 2, 2, "linear"),
    Case(2, 3, (9, 9), (3, 3), 2, 1, 1, 1, "least"),
    Case(2, 3, (8, 8), (3, 3), 2, 1, 1, 1, "large"),
]
VOLUMES = [
    Case(2, 3, (4, 5, 6), (3, 3, 3), 1, 1, 1, 1, "padded"),
    Case(4, 4, (5, 6, 4), (2, 3, 3), 2, 1, 1, 2, "fast"),
    Case(1, 2, (6, 5, 5), (1, 3, 2), 1, 0, 2, 1, "linear"),
    Case(2, 3, (4, 7, 3), (2, 3, 3), 3, 1, 1, 1, "padded"),
    Case(2, 2, (3, 3, 3), (3, 3, 3), 1, 0, 1, 1, "least"),
    Case(2, 1, (3, 1, 8), (3, 1, 3), 1, 1, 1, 1, "padded"),
]
"""Three spatial dimensions."""
EVERY = slice(None), slice(None)


def correlation_map(case: Case, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """R ``[B, O, C / groups, *size]`` in float64, one output position after the other."""
    layer = case.layer
    inputs = placed(case, x).unflatten(1, (case.groups, 1, -1))
    d = planes(g).double().unflatten(1, (case.groups, -1, 1))
    total = inputs.new_zeros(len(x), case.groups, d.shape[2], inputs.shape[3], *layer.size)
    axes = tuple(range(-len(layer.size), 0))
    for at in itertools.product(*map(range, layer.output)):
        lag = tuple(-i * s for i, s in zip(at, layer.stride, strict=True))
        total += d[(..., *at)][(..., *(None,) * len(axes))] * inputs.roll(lag, axes)
    return total.flatten(1, 2)


def placed(case: Case, x: torch.Tensor) -> torch.Tensor:
    """Return the padded input up to the last position that is used, on the grid, float64."""
    layer = case.layer
    pads = [p for n in reversed(layer.padding) for p in (n, n)]
    padded = torch.nn.functional.pad(planes(x).double(), pads)
    padded = padded[EVERY + tuple(slice(n) for n in layer.least)]
    grid = padded.new_zeros(*x.shape[:2], *layer.size)
    grid[EVERY + tuple(slice(n) for n in padded.shape[2:])] = padded
    return grid


def through(band: Band, maps: torch.Tensor) -> torch.Tensor:
    """``h * R`` by circular sums with h."""
    axes = max(2, len(band.size))
    response = torch.tensor(band.response).view(maps.shape[-axes:])
    total = torch.zeros_like(maps)
    for lag in itertools.product(*map(range, response.shape)):
        total += response[lag] * maps.roll(lag, tuple(range(-axes, 0)))
    return total


def taps(case: Case, maps: torch.Tensor) -> torch.Tensor:
    """The entries at the kernel's lags ``[B, O, C / groups, *kernel]``."""
    each = zip(case.layer.dilation, case.layer.kernel, strict=True)
    crop = maps[(..., *(slice(0, t * (k - 1) + 1, t) for t, k in each))]
    return crop.reshape(*maps.shape[:3], *case.kernel)


def powers(case: Case, maps: torch.Tensor) -> torch.Tensor:
    """Return the powers ``[B, groups, *size]`` of maps on the grid, summed over channels."""
    spectra = torch.fft.fftn(maps, dim=tuple(range(2, maps.dim())))
    return torch.view_as_real(spectra).square().sum(-1).unflatten(1, (case.groups, -1)).sum(2)


def squares_by_transforms(
    case: Case, x: torch.Tensor, g: torch.Tensor, band: Band | None
) -> torch.Tensor:
    """Return squared norms of the correlation maps by transforms in float64."""
    layer = case.layer
    spread = g.new_zeros(*g.shape[:2], *layer.size, dtype=torch.float64)
    places = zip(layer.extent, layer.stride, strict=True)
    spread[EVERY + tuple(slice(0, n, s) for n, s in places)] = planes(g).double()
    both = powers(case, placed(case, x)) * powers(case, spread)
    gains = 1.0 if band is None else torch.tensor(band.gains).view(layer.size).square()
    return (gains * both).flatten(1).sum(1) / math.prod(layer.size)
