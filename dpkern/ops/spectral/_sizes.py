"""The sizes of a convolution on its FFT grid, and grids that give the same norm faster.

A layer's correlation map ``R[o, c](u) = sum_a D[o](a) Xp[c](u + a mod (P, Q))`` lives on a grid
``(P, Q)``, which belongs to the mechanism: it changes what is clipped and filtered. ``Xp`` is the
zero-padded input up to the last row and column that an output uses, ``D`` the output gradient on
the grid of the strides. One spatial dimension is a plane of height 1; three are volumes, with their
depth in front.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ...base.errors import InvalidInput
from ..ghost._conv_geometry import Geometry, Size, check_geometry

Axes = tuple[int, ...]
"""A size per axis of planes or volumes: two or three."""


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


def axes(numbers: Sequence[int], missing: int = 1) -> Axes:
    """Return numbers per axis; those of a line stand behind ``missing``, a plane's of height 1."""
    return (missing, *numbers) if len(numbers) == 1 else tuple(numbers)


@dataclass(frozen=True, kw_only=True)
class ConvolutionGrid:
    """A convolution of one to three spatial dimensions and its grid.

    Attributes:
        geometry: the convolution.
        size: ``(P, Q)``, or ``(depth, P, Q)``.
    """

    geometry: Geometry
    size: Axes

    @cached_property
    def input(self) -> Axes:
        """Sizes of the input without padding."""
        return axes(self.geometry.input)

    @cached_property
    def output(self) -> Axes:
        """Positions of the output."""
        return axes(self.geometry.output)

    @cached_property
    def kernel(self) -> Axes:
        """Taps per dimension."""
        return axes(self.geometry.kernel)

    @cached_property
    def stride(self) -> Axes:
        """Strides between outputs."""
        return axes(self.geometry.stride)

    @cached_property
    def padding(self) -> Axes:
        """Zeros in front."""
        return axes(self.geometry.padding, 0)

    @cached_property
    def dilation(self) -> Axes:
        """Distances between taps."""
        return axes(self.geometry.dilation)

    @cached_property
    def extent(self) -> Axes:
        """Sizes of the output gradient on the grid of the strides: ``s (Ho - 1) + 1``."""
        return tuple(s * (n - 1) + 1 for s, n in zip(self.stride, self.output, strict=True))

    @property
    def single(self) -> bool:
        """Whether the output has one place, whose gradient is its own spectrum."""
        return math.prod(self.extent) == 1

    @cached_property
    def least(self) -> Axes:
        """Rows and columns of the padded input that outputs use.

        This is the smallest grid that is right at the lags of the kernel.
        """
        return tuple(
            e + t * (d - 1) for e, t, d in zip(self.extent, self.dilation, self.kernel, strict=True)
        )

    @cached_property
    def linear(self) -> Axes:
        """The smallest grid on which no lag wraps around."""
        return tuple(n + e - 1 for n, e in zip(self.least, self.extent, strict=True))

    @cached_property
    def norm_size(self) -> Axes:
        """A fast grid of the same norm: where no lag wraps around, every grid has the same."""
        return tuple(
            fast(linear, s) if size >= linear else size
            for size, linear, s in zip(self.size, self.linear, self.stride, strict=True)
        )

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
        return _layer(geometry, axes(tuple(size)))


@lru_cache(maxsize=1024)
def _layer(geometry: Geometry, size: Axes) -> ConvolutionGrid:
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
    right = isinstance(size, (list, tuple)) and len(size) in (spatial, max(spatial, 2))
    if not right or not all(type(n) is int and n >= 1 for n in size):
        raise InvalidInput(
            "size",
            expected=f"{spatial} positive ints, the grid of the transforms",
            got=size,
            remedy="Take it from the mechanism's configuration.",
        )
    layer = _layer(geometry, axes(tuple(size)))
    if any(have < need for have, need in zip(layer.size, layer.least, strict=True)):
        raise InvalidInput(
            "size",
            expected=f"a grid of at least {layer.least}, where the kernel's lags do not wrap",
            got=layer.size,
            remedy="Use the padded input's size or larger.",
        )
    return layer


def corner(sizes: Sequence[int], before: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Return the index of the first places of all maps ``[B, channels, ...]``.

    With ``before``, of those behind so many.
    """
    each = zip([0] * len(sizes) if before is None else before, sizes, strict=True)
    return (slice(None), slice(None), *(slice(p, p + n) for p, n in each))


def planes(x: torch.Tensor) -> torch.Tensor:
    """Return a view ``[B, channels, height, width]``, or volumes as they are."""
    return x.unsqueeze(2) if x.dim() == 3 else x


def volumes(x: torch.Tensor) -> torch.Tensor:
    """Return a view ``[B, channels, depth, height, width]``."""
    x = planes(x)
    return x.unsqueeze(2) if x.dim() == 4 else x


__all__ = ["Axes", "ConvolutionGrid", "axes", "check_layer", "corner", "fast", "planes", "volumes"]
