"""A parameter's gradients over its uses, as parts that touch no entry twice.

A use that reads some rows of a parameter (a slice, a table that is read in pieces) has gradients of
these rows alone. Norms are the norms of sums: uses of the same rows are merged, uses whose rows
overlap are written out and added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..ops import clip
from .merge import merge
from .per_sample_gradients import ExplicitGradients
from .uses import CapturedGradients, ParameterSource


def sum_dtype_of(slot: ParameterSource) -> torch.dtype:
    """Return the dtype of the parameter's clipped sum."""
    return clip.sum_dtype(slot.parameter.dtype)


def zeros(slots: Sequence[ParameterSource]) -> list[Tensor]:
    """Return an empty sum for each parameter."""
    return [torch.zeros(s.shape, dtype=sum_dtype_of(s), device=s.parameter.device) for s in slots]


def place(sums: dict[int, Tensor], slot: ParameterSource, arrival: CapturedGradients) -> Tensor:
    """Return the view of ``sums`` that these gradients are added to."""
    out = sums[slot.index]
    out = out if arrival.rows is None else out[slice(*arrival.rows)]
    return out.view(arrival.record.shape)


def parts_of(slot: ParameterSource) -> list[CapturedGradients]:
    """Return a parameter's gradients, merged so that no two parts touch the same entries."""
    by_rows: dict[tuple[int, int] | None, list[CapturedGradients]] = {}
    for arrival in slot.arrivals:
        by_rows.setdefault(arrival.rows, []).append(arrival)
    if len(by_rows) > 1 and not _disjoint(list(by_rows)):
        return [CapturedGradients(written_out(slot))]
    return [
        same[0] if len(same) == 1 else CapturedGradients(merge([a.record for a in same]), rows)
        for rows, same in by_rows.items()
    ]


def _disjoint(ranges: Sequence[tuple[int, int] | None]) -> bool:
    if None in ranges:
        return False
    ordered = sorted(r for r in ranges if r is not None)
    return all(a[1] <= b[0] for a, b in pairwise(ordered))


def written_out(slot: ParameterSource) -> ExplicitGradients:
    """Return all gradients of a parameter, materialized and added up over its uses."""
    if len(slot.arrivals) == 1 and slot.arrivals[0].rows is None:
        alone = slot.arrivals[0].record.per_sample()
        return ExplicitGradients(alone.reshape(alone.shape[0], *slot.shape))
    total = None
    for arrival in slot.arrivals:
        part = arrival.record.per_sample()
        if total is None:
            total = part.new_zeros((part.shape[0], *slot.shape))
        place = total if arrival.rows is None else total[:, slice(*arrival.rows)]
        place += part.reshape(place.shape)
    assert total is not None
    return ExplicitGradients(total)
