"""Thirty convolutions on grids of several sizes, and their correlation maps by plain sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dpkern.ops.spectral import Band
from dpkern.ops.spectral._sizes import ConvolutionGrid, fast


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


def correlation_map(case: Case, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """R ``[B, O, C / groups, P, Q]`` in float64, one output position after the other."""
    layer = case.layer
    p, q = layer.padding[0], layer.padding[1]
    plane = x.double().view(*x.shape[:2], *layer.input)
    padded = torch.nn.functional.pad(plane, (q, q, p, p))[:, :, : layer.least[0], : layer.least[1]]
    grid = padded.new_zeros(*x.shape[:2], *layer.size)
    grid[:, :, : padded.shape[2], : padded.shape[3]] = padded
    inputs = grid.unflatten(1, (case.groups, 1, -1))
    d = g.double().view(*g.shape[:2], *layer.output).unflatten(1, (case.groups, -1))
    total = inputs.new_zeros(len(x), *d.shape[1:3], inputs.shape[3], *layer.size)
    for i in range(layer.output[0]):
        for j in range(layer.output[1]):
            shifted = inputs.roll((-i * layer.stride[0], -j * layer.stride[1]), (-2, -1))
            total += d[:, :, :, i, j, None, None, None] * shifted
    return total.flatten(1, 2)


def through(band: Band, maps: torch.Tensor) -> torch.Tensor:
    """``h * R`` by circular sums with h."""
    response = torch.tensor(band.response).view(maps.shape[-2:])
    total = torch.zeros_like(maps)
    for i in range(response.shape[0]):
        for j in range(response.shape[1]):
            total += response[i, j] * maps.roll((i, j), (-2, -1))
    return total


def taps(case: Case, maps: torch.Tensor) -> torch.Tensor:
    """The entries at the kernel's lags ``[B, O, C / groups, *kernel]``."""
    (s, t), (k, m) = case.layer.dilation, case.layer.kernel
    crop = maps[..., : s * (k - 1) + 1 : s, : t * (m - 1) + 1 : t]
    return crop.reshape(*maps.shape[:3], *case.kernel)
