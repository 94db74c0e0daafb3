"""Transform a layer's operands, and form powers and the product that is the squared norm.

With unnormalised transforms, gains Gamma of the band (1 without one) and weights w(kx) = 1 where
kx is 0 or Q/2, else 2,

    || h * R ||^2 = 1/(PQ) sum_groups sum_ky sum_{kx <= Q/2} w Gamma^2 (sum_o |D^|^2)(sum_c |X^|^2)

Where the stride s divides P, D^ has period P/s: D is transformed without its gaps on P/s, and the
other factor is folded, sum_j X^2(k + j P/s). Other strides do so by their greatest common divisor.
Volumes have one more axis in front, of which all frequencies stand as those of ky do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from ._band import Band, half_weights
from ._sizes import Axes, ConvolutionGrid, corner, planes

_ERROR = 8
"""Higham 2002, Theorem 24.2: a transform of n values is off by at most log2(n) (4 sqrt(2) + 1) u of
its norm (to first order, exact twiddles rounded to u), which we take for radices 3 and 5 too."""


def transform_error(dtype: torch.dtype, size: Axes) -> float:
    """Return eta of one map's transform: ``|| computed - exact || <= eta || exact ||``."""
    unit = torch.finfo(dtype).eps / 2
    return _ERROR * unit * math.log2(max(2, math.prod(size)))


@dataclass(frozen=True)
class Grid:
    """The grid of X and the folded one of D, on which the norm of a layer is computed."""

    layer: ConvolutionGrid
    size: Axes
    band: Band | None

    @staticmethod
    def of(layer: ConvolutionGrid, band: Band | None) -> Grid:
        """Return the declared grid under a band, else a fast one of the same norm."""
        return Grid(layer, layer.norm_size if band is None else layer.size, band)

    @cached_property
    def folds(self) -> Axes:
        """Repetitions of D's spectrum per axis: what the stride and the grid have in common."""
        return tuple(math.gcd(n, s) for n, s in zip(self.size, self.layer.stride, strict=True))

    @cached_property
    def folded(self) -> Axes:
        """The grid of D."""
        return tuple(n // f for n, f in zip(self.size, self.folds, strict=True))

    @cached_property
    def rows(self) -> Axes:
        """Rows and columns of the unpadded input that outputs use."""
        layer = self.layer
        each = zip(layer.input, layer.least, layer.padding, strict=True)
        return tuple(max(0, min(n, least - p)) for n, least, p in each)

    def place_input(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Write the padded input on the grid; ``to`` holds zeros elsewhere."""
        to[corner(self.rows, self.layer.padding)] = planes(x)[corner(self.rows)]
        return to

    def place_gradient(self, g: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Write the output gradient on the folded grid; ``to`` holds zeros elsewhere."""
        steps = [s // f for s, f in zip(self.layer.stride, self.folds, strict=True)]
        spans = [(n - 1) * s + 1 for n, s in zip(self.layer.output, steps, strict=True)]
        places = tuple(slice(0, span, s) for span, s in zip(spans, steps, strict=True))
        to[(slice(None), slice(None), *places)] = planes(g)
        return to

    @cached_property
    def index(self) -> torch.Tensor | None:
        """Indices ``[bins of X]`` of D's bins with the same value or its conjugate.

        None means that every bin is its own.
        """
        return None if self.size == self.folded else fold_index(self.size, self.folded)[0]

    @cached_property
    def factors(self) -> torch.Tensor:
        """``[bins of X]``: ``w Gamma^2 / PQ``."""
        return _factors(self.size, self.band)


@lru_cache(maxsize=1024)
def of_one_sample(grid: Grid) -> Grid:
    """Return the grid without its batch size, which tables do not depend on."""
    layer = replace(grid.layer, geometry=replace(grid.layer.geometry, batch=1))
    return Grid(layer, grid.size, grid.band)


@lru_cache(maxsize=1024)
def on(device: torch.device, make: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Return ``make(*args)``, kept on the device: a copy at every call would let the host wait."""
    return make(*args).to(device)


@lru_cache(maxsize=256)
def parseval(size: Axes) -> torch.Tensor:
    """Return ``[P (Q/2 + 1)]``: the share of each bin of a half plane in the map's squared norm."""
    weights = torch.from_numpy(half_weights(size[-1])) / math.prod(size)
    return weights.repeat(math.prod(size[:-1]))


def half(size: Axes) -> Axes:
    """Return the sizes of a half spectrum."""
    return (*size[:-1], size[-1] // 2 + 1)


def transformed(maps: torch.Tensor) -> torch.Tensor:
    """Return the half spectra ``[B, channels, *bins]`` of real planes or volumes."""
    spectra: torch.Tensor = torch.fft.rfftn(maps, dim=tuple(range(2, maps.dim())))
    return spectra


@lru_cache(maxsize=256)
def _factors(size: Axes, band: Band | None) -> torch.Tensor:
    factors = parseval(size)
    return factors if band is None else factors * half_gains(band).square().flatten()


@lru_cache(maxsize=256)
def fold_index(size: Axes, folded: Axes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[bins of X]``: the bin of D with its value or conjugate, and bool: which."""
    lines = [torch.arange(k, device="cpu") % n for k, n in zip(half(size), folded, strict=True)]
    grids = torch.meshgrid(*lines, indexing="ij")
    beyond = grids[-1] > folded[-1] // 2
    index = torch.zeros_like(grids[-1])
    for k, n, stored in zip(grids, folded, half(folded), strict=True):
        index = index * stored + torch.where(beyond, (n - k) % n, k)
    return index.flatten(), beyond.flatten()


def _folding(size: Axes, folded: Axes) -> torch.Tensor:
    """Return ``[bins of D, most]``: bins of X that fold onto each, filled with one behind the last.

    Sums over it have one order; scattered additions on a device have none.
    """
    index, _ = fold_index(size, folded)
    counts = index.bincount()
    order = index.argsort(stable=True)
    place = torch.arange(len(index), device="cpu") - (counts.cumsum(0) - counts)[index[order]]
    table = torch.full((len(counts), int(counts.max())), len(index), device="cpu")
    table[index[order], place] = order
    return table


def half_gains(band: Band) -> torch.Tensor:
    """Return gains of a half spectrum; a band of one axis is a plane of height 1."""
    gains = torch.tensor(band.gains, device="cpu")
    gains = gains[None] if gains.dim() == 1 else gains
    return gains[..., : gains.shape[-1] // 2 + 1]


def powers(spectra: torch.Tensor, groups: int) -> torch.Tensor:
    """Return sums of ``|x|^2`` over the channels of each group: float64 ``[B, groups, bins]``."""
    plane = torch.view_as_real(spectra.to(torch.complex128)).square().sum(-1)
    return torch.stack([part.sum(1) for part in plane.flatten(2).chunk(groups, 1)], 1)


def product_squares(
    grid: Grid, x_powers: torch.Tensor, g_powers: torch.Tensor, eta: float
) -> torch.Tensor:
    """Return squared norms ``[B]``, from above, of spectra that are off by ``eta`` of their norms.

    With A = |D^| and B = |X^| over channels, ||(A + e)(B + f)|| <= ||A B|| + max A ||f|| +
    max B ||e|| + ||e|| ||f||, where ||e|| <= eta ||A|| and ||f|| <= eta ||B||.

    Args:
        grid: both grids.
        x_powers, g_powers: ``[B, groups, bins]``.
        eta: of ``transform_error``.
    """
    device = x_powers.device
    folded = on(device, _factors, grid.size, grid.band) * x_powers
    if grid.index is not None:
        bins = on(device, _folding, grid.size, grid.folded)
        folded = torch.nn.functional.pad(folded, (0, 1))[:, :, bins].sum(-1)
    squares = (folded * g_powers).flatten(1).sum(1)
    # The operands' norms come from computed spectra.
    x_norm, g_norm = (
        (p * on(device, parseval, size)).flatten(1).sum(1).sqrt() * (1 + 2.0**-10)
        for p, size in ((x_powers, grid.size), (g_powers, grid.folded))
    )
    # A folded bin counts with its mirror: at least the largest value.
    x_most, g_most = (p.flatten(1).amax(1).sqrt() for p in (folded, g_powers))
    share = math.prod(grid.folded) ** 0.5
    slack = eta * (g_most * x_norm + share * g_norm * (x_most + eta * x_norm))
    above: torch.Tensor = squares.sqrt() + slack
    return above.square() * (1 + 2.0**-42)


__all__ = [
    "Grid",
    "fold_index",
    "half",
    "half_gains",
    "of_one_sample",
    "on",
    "parseval",
    "powers",
    "product_squares",
    "transform_error",
    "transformed",
]
