"""Closed forms of the maps to release coordinates and back, by kind of release."""

from __future__ import annotations

import math

import torch

from ..mechanisms.plan import Block
from ..mechanisms.pruning import Kept, Largest
from ..mechanisms.release import Crop, Diagonal, Open, Release
from . import _glue as glue
from ._glue import WIDE
from .phases import BACK, MAP, NOISE
from .primitives import WALK, Counts, Item

Items = list[Item]


def exact(line: str, counts: Counts) -> Items:
    """One exact line of what torch does between ops, ``phase: line``."""
    return [Item(name=line, counts=counts, evidence=WALK)] if counts else []


def modelled(line: str, counts: Counts) -> Items:
    """One modelled line."""
    return [Item(name=line, counts=counts, kind="modelled")] if counts else []


def centred(block: Block, rows: int, dtype: torch.dtype) -> Items:
    """``g - centre`` for each of ``rows`` samples."""
    if block.release is None or block.release.centre is None:
        return []
    n = math.prod(block.shape)
    less = glue.each(rows * n, SUB=1, extra=n)
    return exact(f"{MAP}: less the centre", glue.converted(n, WIDE, dtype) + less)


def signal(block: Block, rows: int, dtype: torch.dtype) -> Items:
    """``forward`` of ``rows`` gradients or sums, in the sums' dtype again."""
    release = block.release
    if release is None or release.plain:
        return []
    n = rows * math.prod(block.shape)
    if isinstance(release, Kept):
        kept = rows * len(release.places)
        # Selected first, then widened.
        gathered = glue.gathered(kept, len(release.places))
        there_and_back = glue.converted(kept, dtype, WIDE) + glue.converted(kept, WIDE, dtype)
        return exact(f"{MAP}: kept places", gathered + there_and_back)
    widened = glue.converted(n, dtype, WIDE)
    narrowed = glue.converted(rows * math.prod(block.signal_shape), WIDE, dtype)
    formats = exact(f"{MAP}: formats", widened + narrowed)
    return formats + _forward(release, block, rows)


def _forward(release: Release, block: Block, rows: int) -> Items:
    n = rows * math.prod(block.shape)
    if isinstance(release, Diagonal):
        per_entry = n // rows if rows else 0
        scaled = release.scale is not None
        each = glue.each(n, DIV=1, extra=per_entry) if scaled else Counts()
        return exact(f"{MAP}: scales", each)
    if isinstance(release, Open) or (isinstance(release, Crop) and release.signal is None):
        return exact(f"{MAP}: gain", glue.each(n, MUL=1))
    assert isinstance(release, Crop)
    taps = release.site.taps
    pairs = n // taps
    constant = glue.each(taps * release.rank)  # copied from the mechanism's own
    gained = exact(f"{MAP}: gain and constants", constant + glue.each(pairs * release.rank, MUL=1))
    return modelled(f"{MAP}: matrix", glue.multiplied(pairs, taps, release.rank)) + gained


def back(block: Block, dtype: torch.dtype) -> Items:
    """``back`` of noisy coordinates of this dtype: the parameter's shape, float64."""
    release = block.release
    n, m = math.prod(block.shape), block.size
    if isinstance(release, Kept):
        placed = glue.scattered(m, m)
        return exact(
            f"{BACK}: kept places", glue.filled(n) + glue.converted(m, dtype, WIDE) + placed
        )
    if isinstance(release, Diagonal):
        scaled = glue.each(n, reads=2, MUL=1) if release.scale is not None else Counts()
        return exact(f"{BACK}: scales", glue.converted(n, dtype, WIDE) + scaled)
    assert isinstance(release, Crop)
    widened = exact(f"{BACK}: formats", glue.converted(m, dtype, WIDE))
    if release.post is None:
        return widened + exact(f"{BACK}: copy", glue.each(n))
    pairs = m // release.rank
    widened += exact(f"{BACK}: constants", glue.each(release.rank * release.site.taps))
    return widened + modelled(
        f"{BACK}: matrix", glue.multiplied(pairs, release.rank, release.site.taps)
    )


def spread(release: Open, block: Block, dtype: torch.dtype) -> Items:
    """Noise coordinates of their own, mapped to the parameter's shape and added to the signal."""
    n, m = math.prod(block.shape), block.size
    columns = release.noise.shape[1]
    pairs = n // release.site.taps
    added = glue.filled(m) + glue.converted(n, dtype, WIDE) + glue.each(n, reads=2, ADD=1)
    constant = exact(f"{BACK}: constants", glue.each(columns * release.site.taps))
    product = modelled(f"{BACK}: matrix", glue.multiplied(pairs, columns, release.site.taps))
    return exact(f"{NOISE}: beside the signal", added) + constant + product


def pruned(release: Largest, block: Block, dtype: torch.dtype) -> Items:
    """The largest coordinates of a sum chosen before their noise, and the rest remembered."""
    n, k = math.prod(block.shape), release.count
    magnitudes, chosen = glue.largest(n, k)
    counts = glue.converted(n, dtype, WIDE) + magnitudes + glue.filled(n)
    if release.error is not None:
        rest = glue.each(n) + glue.scattered(k, 0)
        counts = counts + rest + glue.each(n, DIV=1) + glue.each(n)
    taken = glue.gathered(k)
    put = glue.converted(k, dtype, WIDE) + glue.scattered(k, k)
    line = f"{MAP}: largest places"
    return exact(line, counts + taken + put) + modelled(line, chosen)


__all__ = ["Items", "back", "centred", "exact", "modelled", "pruned", "signal", "spread"]
