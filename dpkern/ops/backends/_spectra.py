"""Run torch's transforms for the spectral kernels of every device, a few samples at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ..ghost._bounds import of_sums
from ..spectral._spectra import Grid, half, transformed


def chunks(
    operand: torch.Tensor, grid: Grid, which: str, most: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield half spectra ``[b, channels, bins]`` of a few samples at a time.

    Args:
        operand: inputs or output gradients of the layer.
        grid: where they are placed.
        which: ``"x"`` or ``"g"``.
        most: bytes of a chunk's spectra.
    """
    size = grid.size if which == "x" else grid.folded
    place = grid.place_input if which == "x" else grid.place_gradient
    kind = of_sums(operand.dtype)
    channels, points = operand.shape[1], math.prod(half(size))
    samples = max(1, most // max(1, channels * points * 2 * kind.itemsize))
    samples = max(1, min(samples, len(operand)))
    maps = operand.new_zeros(samples, channels, *size, dtype=kind)
    for begin in range(0, len(operand), samples):
        part = operand[begin : begin + samples]
        spectra = transformed(place(part, maps[: len(part)]))
        yield slice(begin, begin + len(part)), spectra.view(len(part), channels, points)


def room(x: torch.Tensor, groups: int, grid: Grid) -> list[torch.Tensor]:
    """Allocate the powers of both operands, float64 ``[B, groups, bins]``."""
    return [
        x.new_empty(len(x), groups, math.prod(half(size)), dtype=torch.float64)
        for size in (grid.size, grid.folded)
    ]


def constant(g: torch.Tensor, groups: int) -> torch.Tensor:
    """Return powers ``[B, groups, 1]`` of maps that are zero but at the origin."""
    return g.double().square().view(len(g), groups, -1).sum(2, keepdim=True)
