"""Generate images in place of the papers' data sets where these are missing; always labelled so.

``synthetic-mnist``    digits of seven strokes, moved, slanted and blurred      ``[1, 28, 28]``
``synthetic-cifar10``  ten kinds of coloured patches: gratings and blobs         ``[3, 32, 32]``
``synthetic-svhn``     the digits in two colours over a slope of brightness      ``[3, 32, 32]``
``digits28``           scikit-learn's digits, resampled from 8 x 8               ``[1, 28, 28]``

The first three are functions of a public seed and of nothing else. An accuracy on them says that
training works; it is not comparable with a published one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from ..base.validate import require
from .formats import CLASSES, Images

TRAIN_ROWS, TEST_ROWS = 4000, 1000
SEED = 20_240_917

# Strokes on a box 1 wide and 2 high, from (x, y) to (x, y), y downwards: the seven segments.
_SEGMENTS = {
    "a": ((0, 0), (1, 0)),
    "b": ((1, 0), (1, 1)),
    "c": ((1, 1), (1, 2)),
    "d": ((0, 2), (1, 2)),
    "e": ((0, 1), (0, 2)),
    "f": ((0, 0), (0, 1)),
    "g": ((0, 1), (1, 1)),
}
_DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


def digit_masks(labels: Tensor, side: int, draw: torch.Generator) -> Tensor:
    """Draw digits as brightness in [0, 1], ``[n, side, side]``, each with its own movement.

    A pixel at distance r from the nearest stroke has brightness ``1 / (1 + exp((r - w) / s))``.
    """
    n = len(labels)
    uniform = torch.rand(n, 6, generator=draw)
    height = 0.30 + 0.10 * uniform[:, 0]  # of a box, as a share of the image
    width = 0.22 + 0.10 * uniform[:, 1]
    slant = 0.5 * uniform[:, 2] - 0.25
    shift = 0.16 * uniform[:, 3:5] - 0.08
    thick = 0.035 + 0.03 * uniform[:, 5]
    axis = (torch.arange(side) + 0.5) / side - 0.5
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    nearest = torch.full((n, side, side), math.inf)
    for name, ends in _SEGMENTS.items():
        used = torch.tensor([name in strokes for strokes in _DIGITS])[labels]
        (x0, y0), (x1, y1) = (_placed(px, py, width, height, slant, shift) for px, py in ends)
        distance = _distance(x, y, x0, y0, x1, y1)
        nearest = torch.where(used[:, None, None], torch.minimum(nearest, distance), nearest)
    return torch.sigmoid((thick[:, None, None] - nearest) / 0.012)


def _placed(
    px: int, py: int, width: Tensor, height: Tensor, slant: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    y = height * (py - 1)
    x = width * (px - 0.5) * 1.6 - slant * y
    return x + shift[:, 0], y + shift[:, 1]


def _distance(x: Tensor, y: Tensor, x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
    """Return distances from the pixels ``[s, s]`` to n segments: ``[n, s, s]``."""
    x0, y0, x1, y1 = (end[:, None, None] for end in (x0, y0, x1, y1))
    dx, dy = x1 - x0, y1 - y0
    along = (((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy)).clamp(0, 1)
    return torch.hypot(x - x0 - along * dx, y - y0 - along * dy)


def _mnist(n: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(CLASSES, (n,), generator=draw)
    noise = 0.1 * torch.randn(n, 28, 28, generator=draw)
    return (digit_masks(labels, 28, draw) + noise)[:, None], labels


def _svhn(n: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(CLASSES, (n,), generator=draw)
    mask = digit_masks(labels, 32, draw)[:, None]
    back, front = torch.rand(2, n, 3, 1, 1, generator=draw)
    front = torch.where((front - back).abs().amax(1, keepdim=True) < 0.3, 1 - back, front)
    slope = 0.3 * torch.rand(n, 1, 1, 1, generator=draw) * torch.linspace(-1, 1, 32)
    noise = 0.05 * torch.randn(n, 3, 32, 32, generator=draw)
    return mask * front + (1 - mask) * back + slope + noise, labels


def _cifar(n: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw class k: gratings with k's direction and frequency (even), k // 2 + 1 blobs (odd)."""
    labels = torch.randint(CLASSES, (n,), generator=draw)
    half = (labels // 2).float()[:, None, None]
    phase, tilt = torch.rand(2, n, 1, 1, generator=draw)
    axis = torch.linspace(-1, 1, 32)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    angle = math.pi * half / 5 + 0.2 * tilt
    along = x * torch.cos(angle) + y * torch.sin(angle)
    grating = 0.5 + 0.5 * torch.sin(2 * math.pi * ((1.5 + 0.5 * half) * along + phase))
    centres = 1.4 * torch.rand(n, 5, 2, generator=draw) - 0.7
    blobs = torch.zeros(n, 32, 32)
    for number in range(5):
        cx, cy = centres[:, number, 0, None, None], centres[:, number, 1, None, None]
        spot = torch.exp(-((x - cx) ** 2 + (y - cy) ** 2) / 0.04)
        blobs = blobs + torch.where(half >= number, spot, 0.0)
    pattern = torch.where((labels % 2 == 0)[:, None, None], grating, blobs.clamp(max=1))
    colour = 0.2 + 0.6 * torch.rand(2, n, 3, 1, 1, generator=draw)
    mixed = pattern[:, None] * colour[0] + (1 - pattern[:, None]) * (1 - colour[0]) * colour[1]
    return mixed + 0.05 * torch.randn(n, 3, 32, 32, generator=draw), labels


def _images(name: str, make: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]) -> Images:
    draw = torch.Generator().manual_seed(SEED)
    x, labels = make(TRAIN_ROWS + TEST_ROWS, draw)
    pixels = (255 * x.clamp(0, 1)).round().to(torch.uint8).numpy()
    y = labels.numpy()
    return Images(
        name=name,
        x_train=pixels[:TRAIN_ROWS],
        y_train=y[:TRAIN_ROWS],
        x_test=pixels[TRAIN_ROWS:],
        y_test=y[TRAIN_ROWS:],
        warnings=(f"{name}: generated images, not comparable with published accuracies",),
    )


def _digits28() -> Images:
    """Resample from 8 x 8, bilinearly; the last 359 of a public permutation are held out."""
    bunch = require("sklearn.datasets").load_digits()
    small = torch.from_numpy(bunch.images).float()[:, None] * (255 / 16)
    large = functional.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    x = large.round().to(torch.uint8).numpy()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).numpy()
    held_out = round(0.2 * len(x))
    test, train = order[:held_out], order[held_out:]
    return Images(
        name="digits28",
        x_train=x[train],
        y_train=bunch.target[train],
        x_test=x[test],
        y_test=bunch.target[test],
        warnings=("digits28: 8 x 8 digits resampled to 28 x 28, not MNIST",),
    )


SYNTHETIC_DATASETS: dict[str, Callable[[], Images]] = {
    "digits28": cache(_digits28),
    "synthetic-mnist": cache(lambda: _images("synthetic-mnist", _mnist)),
    "synthetic-cifar10": cache(lambda: _images("synthetic-cifar10", _cifar)),
    "synthetic-svhn": cache(lambda: _images("synthetic-svhn", _svhn)),
}
"""Data sets that can be requested by name."""
