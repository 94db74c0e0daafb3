"""The sizes of a convolution on its FFT grid, and grids that give the same norm faster.

A layer's correlation map ``R[o, c](u) = sum_a D[o](a) Xp[c](u + a mod (P, Q))`` lives on a grid
``(P, Q)``, which belongs to the mechanism: it changes what is clipped and filtered. ``Xp`` is the
zero-padded input up to the last row and column that an output uses, ``D`` the output gradient on
the grid of the strides. One spatial dimension is a plane of height 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ...base.errors import InvalidInput
from ..ghost._conv_geometry import Geometry, Size, check_geometry

Pair = tuple[int, int]


def fast(least: int, multiple: int = 1) -> int:
    """Return the smallest even ``2^a 3^b 5^c >= least`` that ``multiple`` divides; 1 stays 1."""
    if least == 1 and multiple == 1:
        return 1
    step = math.lcm(2, multiple)
    size = -(-least // step) * step
    while not _smooth(size // multiple):
        size += step
    return size


def _smooth(n: int) -> bool:
    for prime in (2, 3, 5):
        while n % prime == 0:
            n //= prime
    return n == 1


def _pair(numbers: Sequence[int], missing: int) -> Pair:
    height, width = (missing, *numbers)[-2:]
    return height, width


@dataclass(frozen=True, kw_only=True)
class ConvolutionGrid:
    """A convolution of one or two spatial dimensions and its grid.

    Attributes:
        geometry: the convolution.
        size: ``(P, Q)``.
    """

    geometry: Geometry
    size: Pair

    @cached_property
    def input(self) -> Pair:
        """Sizes of the input without padding."""
        return _pair(self.geometry.input, 1)

    @cached_property
    def output(self) -> Pair:
        """Positions of the output."""
        return _pair(self.geometry.output, 1)

    @cached_property
    def kernel(self) -> Pair:
        """Taps per dimension."""
        return _pair(self.geometry.kernel, 1)

    @cached_property
    def stride(self) -> Pair:
        """Strides between outputs."""
        return _pair(self.geometry.stride, 1)

    @cached_property
    def padding(self) -> Pair:
        """Zeros in front."""
        return _pair(self.geometry.padding, 0)

    @cached_property
    def dilation(self) -> Pair:
        """Distances between taps."""
        return _pair(self.geometry.dilation, 1)

    @cached_property
    def extent(self) -> Pair:
        """Sizes of the output gradient on the grid of the strides: ``s (Ho - 1) + 1``."""
        y, x = (s * (n - 1) + 1 for s, n in zip(self.stride, self.output, strict=True))
        return y, x

    @cached_property
    def least(self) -> Pair:
        """Rows and columns of the padded input that outputs use.

        This is the smallest grid that is right at the lags of the kernel.
        """
        y, x = (
            e + t * (d - 1) for e, t, d in zip(self.extent, self.dilation, self.kernel, strict=True)
        )
        return y, x

    @cached_property
    def linear(self) -> Pair:
        """The smallest grid on which no lag wraps around."""
        y, x = (n + e - 1 for n, e in zip(self.least, self.extent, strict=True))
        return y, x

    @cached_property
    def norm_size(self) -> Pair:
        """A fast grid of the same norm: where no lag wraps around, every grid has the same."""
        y, x = (
            fast(linear, s) if size >= linear else size
            for size, linear, s in zip(self.size, self.linear, self.stride, strict=True)
        )
        return y, x

    @staticmethod
    def of(
        x: torch.Tensor,
        g: torch.Tensor,
        kernel_size: Size,
        stride: Size,
        padding: Size,
        dilation: Size,
        groups: int,
        size: Sequence[int],
    ) -> ConvolutionGrid:
        """Make the layer of an op's arguments, which are not checked."""
        geometry = Geometry.of(x, g, kernel_size, stride, padding, dilation, groups)
        return _layer(geometry, _pair(tuple(size), 1))


@lru_cache(maxsize=1024)
def _layer(geometry: Geometry, size: Pair) -> ConvolutionGrid:
    return ConvolutionGrid(geometry=geometry, size=size)


def check_layer(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel_size: Size,
    stride: Size,
    padding: Size,
    dilation: Size,
    groups: int,
    size: Sequence[int],
) -> ConvolutionGrid:
    """Return the checked sizes; ``InvalidInput`` names the argument that is wrong."""
    geometry = check_geometry(x, g, kernel_size, stride, padding, dilation, groups)
    spatial = len(geometry.input)
    if spatial == 3:
        raise InvalidInput(
            "x",
            expected="one or two spatial dimensions",
            got="3",
            remedy="Use a mechanism in the time domain for 3-D convolutions.",
        )
    right = isinstance(size, (list, tuple)) and len(size) in (spatial, 2)
    if not right or not all(type(n) is int and n >= 1 for n in size) or (1, *size)[-2] < 1:
        raise InvalidInput(
            "size",
            expected=f"{spatial} positive ints, the grid of the transforms",
            got=size,
            remedy="Take it from the mechanism's configuration.",
        )
    layer = _layer(geometry, _pair(tuple(size), 1))
    if any(have < need for have, need in zip(layer.size, layer.least, strict=True)):
        raise InvalidInput(
            "size",
            expected=f"a grid of at least {layer.least}, where the kernel's lags do not wrap",
            got=layer.size,
            remedy="Use the padded input's size or larger.",
        )
    return layer


def planes(x: torch.Tensor) -> torch.Tensor:
    """Return a view ``[B, channels, height, width]``."""
    return x if x.dim() == 4 else x.unsqueeze(2)


__all__ = ["ConvolutionGrid", "Pair", "check_layer", "fast", "planes"]
