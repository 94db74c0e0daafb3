"""Closed forms of the maps to release coordinates and back; each map counts its own work."""

from __future__ import annotations

import math

import torch

from ..base.counts import WALK, Counts, Item
from ..privacy.mechanisms.plan import Block
from . import _glue as glue
from ._glue import WIDE
from ._step_work import Lines
from .phases import MAP, NOISE

Items = list[Item]


def exact(line: str, counts: Counts) -> Items:
    """Return one exact line for torch's work between ops, ``phase: line``; none if it is empty."""
    return [Item(name=line, counts=counts, evidence=WALK)] if counts else []


def centred(block: Block, rows: int, dtype: torch.dtype) -> Items:
    """Count ``g - centre`` for each of ``rows`` samples."""
    if block.release is None or block.release.centre is None:
        return []
    n = math.prod(block.shape)
    less = glue.each(rows * n, SUB=1, extra=n)
    return exact(f"{MAP}: less the centre", glue.converted(n, WIDE, dtype) + less)


def signal(block: Block, rows: int, dtype: torch.dtype) -> Items:
    """Count ``forward`` of ``rows`` gradients or sums, and the conversion back to their dtype."""
    lines = Lines(MAP)
    if block.release is not None and not block.release.is_identity:
        block.release.count_forward(lines, block.shape, rows, dtype)
    return lines.items


def noised(block: Block, dtype: torch.dtype) -> Items:
    """Count ``noised`` of a sum of this dtype, without drawing its noise; the result is float64."""
    lines = Lines(NOISE)
    assert block.release is not None
    block.release.count_noised(lines, block.shape, dtype)
    return lines.items


__all__ = ["Items", "centred", "exact", "noised", "signal"]
