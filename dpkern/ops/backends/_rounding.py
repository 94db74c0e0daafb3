"""The bits of stochastic rounding from a backend's keystream: the same words in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...base.rng import Stream
from .._lattice import LANES, TILE


def from_keystream(keystream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make ``noise.rounding_bits`` by this ``noise.keystream``.

    Position j of a tile reads lane j mod 16, which is the tile's block of that number, and there
    half j div 16, low halves first: those of a little-endian word in memory.
    """

    def rounding_bits(
        stream: Stream,
        *,
        position: int,
        count: int,
        out: torch.Tensor | None = None,
        **place: Any,
    ) -> torch.Tensor:
        first, end = position // TILE, -(-(position + count) // TILE)
        given = {"first_block": LANES * first, "blocks": LANES * (end - first), **place}
        halves = keystream(stream, **given).view(torch.int16).view(-1, LANES, TILE // LANES)
        start = position - first * TILE
        made = halves.transpose(1, 2).reshape(-1)[start : start + count]
        return made if out is None else out.copy_(made)

    return rounding_bits
