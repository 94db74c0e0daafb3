"""Public feature maps: a row becomes a vector of integers that depends on nothing but the row.

    affine      (2 x - 1, 1): a table's columns, and a constant
    centred     x less the row's own mean: the pixels of an image
    random      cos(W z + b) of affine or centred z of length 1, with public random W and b
    scattering  local means of the image and of the moduli of its oriented wavelet transforms

Rows lie in [0, 1]. Every sum here is a sum of whole numbers below 2^53, so that no order of
additions, and no company in a batch, changes a feature; ``to_radius`` bounds its norm with integer
arithmetic. The sensitivity of ``mechanisms.ObjectiveRelease`` rests on both.

References: Rahimi and Recht, Random features for large-scale kernel machines, 2007; Bruna and
Mallat, Invariant scattering convolution networks, 2013 (first order); Tramer and Boneh,
Differentially private learning needs better features, 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import InvalidInput, PrivacyError
from ..base.validate import choice, integer, tensor, that

MAPS = ("affine", "centred", "random", "scattering")

_UNIT = 1 << 12
"""Features of rows are counted in units of 2^-12."""
_TABLE = 1 << 12
"""Entries of a full turn of the cosine."""
_RANDOM_RADIUS = 1 << 10
_PIXEL, _FILTER = 255, 256
_SHIFT = 6
_AT_ONCE = 1 << 24
"""Numbers of one intermediate result."""


@dataclass(frozen=True, kw_only=True)
class FeatureMap:
    """A public map from rows to integer features.

    Args:
        map: one of ``MAPS``. None is ``scattering`` for images of at least 8 x 8, else ``affine``.
        row_shape: shape of a row; images are ``[H, W]`` or ``[C, H, W]``.
        size: number of random features.
        bandwidth: standard deviation of the random frequencies.
        map_seed: public seed of the random features.
        scales: scales of the wavelets, each twice as wide as the last. None is 1 below 16 pixels,
            else 2.
        orientations: of the wavelets.
        window: side of the squares that a local mean is of. None is 2 to the number of scales.

    Raises:
        InvalidInput: a field out of its range, or a map of images for rows that are none.
    """

    map: str | None = None
    row_shape: tuple[int, ...]
    size: int = 512
    bandwidth: float = 2.0
    map_seed: int = 0
    scales: int | None = None
    orientations: int = 6
    window: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.row_shape, tuple | list | torch.Size) or not self.row_shape:
            raise InvalidInput(
                "row_shape",
                expected="sizes of a row, such as (28, 28)",
                got=self.row_shape,
                remedy="Pass tuple(x.shape[1:]).",
            )
        for extent in self.row_shape:
            integer(1, row_shape=extent)
        # A list would not equal the shape of any tensor.
        object.__setattr__(self, "row_shape", tuple(map(int, self.row_shape)))
        image = len(self.row_shape) in (2, 3)
        side = min(self.row_shape[-2:]) if image else 0
        choice((None, *MAPS), map=self.map)
        if self.map is None:
            object.__setattr__(self, "map", "scattering" if side >= 8 else "affine")
        if self.map == "scattering" and not image:
            raise InvalidInput(
                "map",
                expected="'affine' or 'random' for rows that are no images",
                got=self.map,
                remedy="Set map=random, or give rows of shape [H, W] or [C, H, W].",
            )
        if self.scales is None:
            object.__setattr__(self, "scales", 1 if side < 16 else 2)
        integer(1, 4, scales=self.scales)
        if self.window is None:
            object.__setattr__(self, "window", 2 ** int(self.scales or 1))
        if self.map == "scattering":
            integer(1, side, window=self.window)
        integer(1, 2**20, size=self.size)
        that(
            0 < self.bandwidth <= 1024,  # products of whole frequencies stay below 2^53
            "bandwidth",
            "a number > 0 and <= 1024",
            self.bandwidth,
            "Start with 2.",
        )
        integer(0, 2**62, map_seed=self.map_seed)
        integer(1, 64, orientations=self.orientations)

    @property
    def _columns(self) -> int:
        return math.prod(self.row_shape)

    @property
    def length(self) -> int:
        """The number of features, D."""
        if self.map == "random":
            return self.size
        if self.map == "scattering":
            assert self.scales is not None
            assert self.window is not None
            colors = math.prod(self.row_shape[:-2])
            places = math.prod(extent // self.window for extent in self.row_shape[-2:])
            return colors * places * (1 + self.scales * self.orientations)
        return self._columns + (1 if self.map == "affine" else 0)

    def __call__(self, x: Tensor, *, radius: int) -> Tensor:
        """Return integer features of L2 norm at most ``radius``, int64 ``[n, D]``.

        Args:
            x: rows in [0, 1], ``[n, *row_shape]``.
            radius: R.

        Raises:
            InvalidInput: rows of another shape, or entries that are NaN or outside.
        """
        return to_radius(self.features(x), radius)

    def features(self, x: Tensor) -> Tensor:
        """Return whole numbers of any length, int64 ``[n, D]``, for ``to_radius``.

        Args and errors are those of a call.
        """
        tensor(x=x)
        if tuple(x.shape[1:]) != self.row_shape:
            raise InvalidInput(
                "x",
                expected=f"rows of shape {list(self.row_shape)}",
                got=str(list(x.shape[1:])),
                remedy="Pass rows like those that the map was made for.",
            )
        if not len(x):
            return torch.zeros(0, self.length, dtype=torch.int64)
        if not bool(((x >= 0) & (x <= 1)).all()):
            raise InvalidInput(
                "x",
                expected="entries in [0, 1]",
                got="NaN, or an entry outside",
                remedy="Divide by a public constant (--feature-scale), or give --ranges.",
            )
        rows = max(1, _AT_ONCE // max(1, self.length, 8 * self._columns))
        return torch.cat([self._raw(part) for part in torch.split(x, rows)])

    def _raw(self, x: Tensor) -> Tensor:
        if self.map == "scattering":
            return self._scattered(x)
        if self.map == "random":
            image = len(self.row_shape) in (2, 3)
            base = _less_mean(_counts(x)) if image else _with_constant(_counts(x))
            return self._random(to_radius(base, _RANDOM_RADIUS))
        return _with_constant(_counts(x)) if self.map == "affine" else _less_mean(_counts(x))

    def _random(self, base: Tensor) -> Tensor:
        frequencies, phases, cosine = self._frequencies(base.shape[1])
        turned = (base.double() @ frequencies).to(torch.int64) >> 8
        cell = (turned + phases) & (_TABLE - 1)
        found: Tensor = cosine[cell]
        return found

    def _frequencies(self, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return W in whole cells of 2^-18 of a table entry, phases, and the table of cosines."""
        generator = torch.Generator().manual_seed(self.map_seed)
        drawn = torch.randn(columns, self.size, generator=generator, dtype=torch.float64)
        cells = self.bandwidth * _TABLE / (2 * math.pi) * 256 / _RANDOM_RADIUS
        phases = torch.randint(0, _TABLE, (self.size,), generator=generator)
        turn = torch.arange(_TABLE, dtype=torch.float64) * (2 * math.pi / _TABLE)
        return (drawn * cells).round_(), phases, (turn.cos() * 1024).round().to(torch.int64)

    def _scattered(self, x: Tensor) -> Tensor:
        window = self.window
        assert window is not None
        colors = math.prod(self.row_shape[:-2])
        images = (x.double() * _PIXEL).round_().reshape(-1, 1, *self.row_shape[-2:])
        channels = [images * _FILTER]
        for bank in self._banks:
            parts = F.conv2d(images, bank, padding=bank.shape[-1] // 2)
            squares = parts.view(len(x) * colors, -1, 2, *parts.shape[2:]).square_().sum(2)
            channels.append(squares.sqrt_().round_())
        sums = F.avg_pool2d(torch.cat(channels, 1), window, divisor_override=1)
        found = sums.to(torch.int64) >> _SHIFT
        return _less_mean(found.reshape(len(x), colors * found[0].numel()))

    @cached_property
    def _banks(self) -> list[Tensor]:
        """Return each scale's wavelets in whole numbers, ``[2 orientations, 1, k, k]``."""
        assert self.scales is not None
        return [
            wavelets(self.orientations, 0.8 * 2**j, 0.75 * math.pi / 2**j)
            for j in range(self.scales)
        ]


def wavelets(orientations: int, width: float, frequency: float) -> Tensor:
    """Return real and imaginary parts of Morlet wavelets of norm 256, rounded to whole numbers.

    ``exp(-(u^2 + v^2 / 4) / (2 width^2)) (exp(i frequency u) - c)``, with u along the orientation
    and c such that a constant image gives 0 before the rounding; float64
    ``[2 orientations, 1, k, k]`` with ``k = 2 round(3 width) + 1``.
    """
    side = 2 * int(3 * width + 0.5) + 1
    place = torch.arange(side, dtype=torch.float64) - side // 2
    down, right = torch.meshgrid(place, place, indexing="ij")
    found = []
    for number in range(orientations):
        angle = math.pi * number / orientations
        u = right * math.cos(angle) + down * math.sin(angle)
        v = down * math.cos(angle) - right * math.sin(angle)
        envelope = torch.exp(-(u**2 + v**2 / 4) / (2 * width**2))
        wave = envelope * torch.cos(frequency * u)
        wave -= envelope * (wave.sum() / envelope.sum())
        for part in (wave, envelope * torch.sin(frequency * u)):
            found.append(part * (_FILTER / part.norm()))
    return torch.stack(found)[:, None].round_()


def to_radius(features: Tensor, radius: int) -> Tensor:
    """Scale integer vectors to an L2 norm of at most ``radius``, nearly equal to it.

    Entries are rounded to the nearest integer where the norm allows it and towards 0 elsewhere, so
    that ``sum p_j^2 <= radius^2`` holds in integers. Zero vectors stay zero.

    Args:
        features: int64 ``[n, D]``, squares summing to less than 2^63.
        radius: R >= 1.

    Raises:
        InvalidInput: a radius below 1.
        PrivacyError: a norm above the radius, which cannot happen: the last line of defence.
    """
    integer(1, radius=radius)
    norms = features.square().sum(1, keepdim=True).double().sqrt_().clamp_min_(1.0)
    # Rounding adds 1/12 to each square on average; down by 2^-40 for the rounding of the quotient.
    room = math.sqrt(max(radius**2 - features.shape[1] / 12, radius**2 / 4))
    shares = features.double() / norms
    nearest = (shares * (room * (1 - 2.0**-40))).round_().to(torch.int64)
    fits = nearest.square().sum(1, keepdim=True) <= radius**2
    lower = (shares * (radius * (1 - 2.0**-40))).trunc_().to(torch.int64)
    found = torch.where(fits, nearest, lower)
    outside = (found > radius) | (found < -radius)  # whose squares may not fit 64 bits
    if bool(outside.any()) or bool((found.square().sum(1) > radius**2).any()):
        raise PrivacyError(
            "features",
            expected=f"integer vectors of norm at most {radius}",
            got="a longer one",
            remedy="Report this: nothing was released.",
        )
    return found


def _counts(x: Tensor) -> Tensor:
    """Return rows in whole units of 2^-12, ``[n, columns]``."""
    return (x.flatten(1).double() * _UNIT).round_().to(torch.int64)


def _less_mean(counts: Tensor) -> Tensor:
    return counts - torch.div(counts.sum(1, keepdim=True), counts.shape[1], rounding_mode="floor")


def _with_constant(counts: Tensor) -> Tensor:
    return F.pad(2 * counts - _UNIT, (0, 1), value=_UNIT)
