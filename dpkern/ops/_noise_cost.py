"""Count the keystream words that noise takes, in whole tiles."""

from __future__ import annotations

from ._lattice import TILE


def noise_words(count: int) -> int:
    """Return keystream words of ``count`` lattice draws: 48 bits each."""
    return -(-3 * count // 2)


def rounding_words(count: int) -> int:
    """Return keystream words of ``count`` stochastic roundings: 16 bits each."""
    return -(-count // 2)


def tiles(position: int, count: int) -> int:
    """Return how many whole tiles ``count`` coordinates from ``position`` on touch."""
    return (position + count - 1) // TILE - position // TILE + 1 if count else 0


__all__ = ["TILE", "noise_words", "rounding_words", "tiles"]
