"""What noise costs: words in whole tiles, bytes, operations."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import Cost
from ..rng import Stream
from ._lattice import TILE

_INTEGERS = (torch.int32, torch.int64)


def noise_words(count: int) -> int:
    """Keystream words of ``count`` lattice draws: 48 bits each."""
    return -(-3 * count // 2)


def rounding_words(count: int) -> int:
    """Keystream words of ``count`` stochastic roundings: 16 bits each."""
    return -(-count // 2)


def tiles(position: int, count: int) -> int:
    """Tiles that ``count`` coordinates from ``position`` on touch; each is made as a whole."""
    return (position + count - 1) // TILE - position // TILE + 1 if count else 0


def keystream(stream: Stream, *, blocks: int, **_: Any) -> Cost:
    """``noise.keystream``."""
    return Cost(bytes_read=0, bytes_written=64 * blocks, flops=0, random_words=16 * blocks)


def lattice_draws(stream: Stream, *, position: int, count: int, **_: Any) -> Cost:
    """``noise.lattice_draws``."""
    words = noise_words(TILE) * tiles(position, count)
    return Cost(bytes_read=0, bytes_written=4 * count, flops=0, random_words=words)


def rounding_bits(stream: Stream, *, position: int, count: int, **_: Any) -> Cost:
    """``noise.rounding_bits``."""
    words = rounding_words(TILE) * tiles(position, count)
    return Cost(bytes_read=0, bytes_written=2 * count, flops=0, random_words=words)


RELEASE_FLOPS = 7
"""Of a float: to multiples of u, fraction, whole cells, the rest, and their sum."""


def add_noise(
    x: torch.Tensor,
    *,
    position: int = 0,
    scale: float | torch.Tensor | None = None,
    **_: Any,
) -> Cost:
    """``noise.add_noise``."""
    n, size = x.numel(), x.numel() * x.element_size()
    made = tiles(position, n)
    words = noise_words(TILE) * made
    if x.dtype in _INTEGERS:
        return Cost(bytes_read=size, bytes_written=size, flops=0, random_words=words)
    words += rounding_words(TILE) * made
    each = isinstance(scale, torch.Tensor)
    scales = scale.numel() * scale.element_size() if isinstance(scale, torch.Tensor) else 0
    flops = (RELEASE_FLOPS + 1 + (2 if each else 0)) * n
    return Cost(bytes_read=size + scales, bytes_written=size, flops=flops, random_words=words)


__all__ = ["RELEASE_FLOPS", "TILE", "noise_words", "rounding_words", "tiles"]
