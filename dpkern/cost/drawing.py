"""Count the noise of a coordinate, from each source of noise.

    table     the published read, and one addition; the samples are ready-made and repeat
    inline    the draw from fresh keystream words, the bits of stochastic rounding, and the release
              on the lattice in the place of the addition
    ring      the same, made ahead: draws and bits are written once and read once more
    cdt       the draw's magnitude is looked up in a cumulative table instead

Kernels draw whole tiles of 512. A record of a few coordinates shares its tile with others, so that
it is given its share of a tile, each primitive rounded up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..base.counts import EXECUTED, Counts, Item, Itemised
from ..base.rng import Purpose
from ..ops._draws import CdtDraws, Draws, SampleReads
from ..ops.noise import TILE
from ..step.noise_tables import TableShape
from ..step.noise_tables._table import SCALE_BITS
from ..step.noise_tables.named import INLINE
from ._ops import shaped, stream
from .forms import noise as forms

PRINTED_SOURCE = "table"
"""The source that SPOF's Appendix G presumes."""


def source_draws(source: str, law: str, count: int, *, rounding: bool = True) -> Draws | None:
    """Return draws of a noise source that have only sizes; None for noise drawn in place.

    Args:
        source: a name in ``step.noise_tables.named.SOURCES``.
        law: law of the noise.
        count: draws of a step.
        rounding: whether sums are floats, whose rounding bits a ring holds too.
    """
    if source == INLINE:
        return None
    if source == "ring":
        bits = shaped((count,), torch.int16) if rounding else None
        return Draws(0, shaped((count,), torch.int32), bits)
    if source == "cdt":
        table = shaped((0,), torch.int32)
        return CdtDraws(0, table, stream=stream(Purpose.TABLES), distribution=law)
    entries = shaped((0,), torch.int16)
    return SampleReads(0, entries, shift=SCALE_BITS - TableShape().fraction_bits)


def made_ahead(law: str, position: int, count: int, *, rounding: bool = True) -> Itemised:
    """Count what a ring's producer does for ``count`` positions: draws and bits, and both written.

    Args:
        law: law of the noise.
        position: position of the first.
        count: how many.
        rounding: whether sums are floats.
    """
    given: dict[str, Any] = {"position": position, "count": count}
    draws = forms.lattice_draws(distribution=law, **given)
    return draws + forms.rounding_bits(**given) if rounding else draws


def coordinates(source: str, count: int, *, law: str = "laplace") -> Itemised:
    """Count the noise of ``count`` coordinates of a record, from a source that is not the table.

    Args:
        source: ``inline``, ``ring`` or ``cdt``.
        count: coordinates.
        law: law of the noise.
    """
    ahead = source_draws(source, law, TILE)
    tile = forms.drawn(ahead, 0, TILE, law, rounded=True)
    if source == "ring":
        tile = made_ahead(law, 0, TILE) + tile
    note = f"{count} of a tile of {TILE}; tails apart"
    draws = Item(name="noise draws", counts=_share(tile, count), note=note, evidence=EXECUTED)
    release = forms.released_finite(count) + Counts(MUL=count)
    return Itemised(
        (
            draws,
            Item(
                name="noise release",
                counts=release,
                note="rounded to the lattice, noised and times the cell, for one addition",
                evidence=EXECUTED,
            ),
        )
    )


def record_scale(records: int = 1) -> Item:
    """Count the lattice unit and cell of so many records that have a noise scale each."""
    scale = shaped((records,), torch.float32)
    line = forms.scaled("scaling of the noise", records, torch.float32, scale)
    return replace(line, note="unit and cell of the record's scale; left out by the source")


def _share(tile: Itemised, count: int) -> Counts:
    return Counts({p: -(-n * count // TILE) for p, n in tile.counts.items()})


__all__ = ["PRINTED_SOURCE", "coordinates", "made_ahead", "record_scale", "source_draws"]
