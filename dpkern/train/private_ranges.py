"""Scale the columns of a table by ranges that are estimated privately, once, before training.

What is released are noisy counts (``privacy.mechanisms.range_counts``), of the training rows alone.
A column's range goes from the lowest to the highest bin whose count cannot be noise: at least one
bin of a table without records passes ``FALSE_ALARM`` of the time. Bins next to these are taken in
as long as their counts exceed ``EXTENSION`` standard deviations; where no bin stands out, the one
with the largest count is the range. Numbers outside are cut off at it, and blanks are the middle.
All of that is post-processing of what was released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from ..base.laws import SCALE_CELLS, SCALE_UNITS
from ..base.rng import Key, Purpose
from ..ops import noise
from ..privacy.accounting import shown_bound
from ..privacy.accounting.history import LedgerEntry
from ..privacy.mechanisms.range_counts import (
    BINS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    ZERO,
    RangeCounts,
)
from .data import Dataset
from .encoding import ColumnRange

FALSE_ALARM = 0.01
EXTENSION = 2.0
SMALLEST = 2.0 ** (MIN_EXPONENT - 1)
_STREAM = 1
"""The stream of step 0: training steps have stream 0, from step 1 on."""


def bins(values: Tensor) -> Tensor:
    """Return the bin of each number, int64 of the same shape; -1 for NaN. Exact for float32."""
    mantissa, exponent = torch.frexp(values.abs().double().clamp(max=2.0**MAX_EXPONENT))
    exponent = exponent.long() - (mantissa == 0.5).long()  # (2^(k-1), 2^k] is bin k
    magnitude = exponent.clamp(MIN_EXPONENT, MAX_EXPONENT) - MIN_EXPONENT + 1
    magnitude = torch.where(values.abs().double() <= SMALLEST, 0, magnitude)
    places = ZERO + torch.where(values < 0, -magnitude, magnitude)
    return torch.where(values.isnan(), -1, places)


def contributions(counts: RangeCounts, values: Tensor) -> Tensor:
    """Return the sum of what records contribute, in lattice units: int64 ``[columns, BINS]``.

    Args:
        counts: the release.
        values: float ``[rows, columns]``.
    """
    places = bins(values)
    flat = places + BINS * torch.arange(counts.columns)
    found = torch.bincount(flat[places >= 0], minlength=counts.columns * BINS)
    return counts.unit * found.view(counts.columns, BINS)


def release(counts: RangeCounts, values: Tensor, key: Key) -> list[ColumnRange]:
    """Release noisy counts of these rows, once, and return the ranges that they show.

    Args:
        counts: the release.
        values: float ``[rows, columns]``, NaN where blank.
        key: used for no other release of step 0.
    """
    sums = contributions(counts, values)
    cells = noise.add_noise(sums, stream=key.stream(Purpose.NOISE, 0, stream=_STREAM))
    noisy = cells.double() * (SCALE_UNITS // SCALE_CELLS) / counts.unit
    return read(counts, noisy)


def read(counts: RangeCounts, noisy: Tensor) -> list[ColumnRange]:
    """Return the range of each column, from counts in records ``[columns, BINS]``."""
    surely = counts.sd * NormalDist().inv_cdf(1 - FALSE_ALARM / noisy.numel())
    return [_range(column, surely, EXTENSION * counts.sd) for column in noisy]


def _range(column: Tensor, surely: float, likely: float) -> ColumnRange:
    found = torch.nonzero(column > surely).flatten()
    first, last = (int(found[0]), int(found[-1])) if len(found) else 2 * (int(column.argmax()),)
    while first > 0 and column[first - 1] > likely:
        first -= 1
    while last < BINS - 1 and column[last + 1] > likely:
        last += 1
    low, high = _edges(first)[0], _edges(last)[1]
    return ColumnRange(low, high) if low < high else ColumnRange(-SMALLEST, SMALLEST)


def _edges(place: int) -> tuple[float, float]:
    """Return the numbers between which a bin lies; twice 0 for the bin of zero."""
    if place == ZERO:
        return 0.0, 0.0
    high = 2.0 ** (MIN_EXPONENT + abs(place - ZERO) - 1)
    return (high / 2, high) if place > ZERO else (-high, -high / 2)


@dataclass
class PrivateRanges:
    """The private ranges of a run: their release, what is paid for it, and what it showed.

    Attributes:
        counts: the release.
        epsilon: what it costs by itself, at the run's delta.
        columns: names of the columns.
        places: the features that they are.
        known: their ranges, once they are released.
    """

    counts: RangeCounts
    epsilon: float
    columns: tuple[str, ...]
    places: Sequence[int]
    known: list[ColumnRange] | None = None

    @property
    def entry(self) -> LedgerEntry:
        """The release as a run's history keeps it."""
        return LedgerEntry.of(
            self.counts.sums,
            sampling="poisson",
            sample_rate=1.0,
            dataset_size=None,
            count=1,
            dimension=None,
        )

    def release(self, rows: Tensor, key: Key) -> None:
        """Release the ranges of the training rows, once; see ``release``."""
        self.known = release(self.counts, rows[:, list(self.places)], key)

    def scaled(self, data: Dataset) -> Dataset:
        """Return the data with these columns brought from their ranges to [-1, 1]."""
        assert self.known is not None

        def ready(rows: Tensor) -> Tensor:
            changed = rows.clone()
            for place, (low, high) in zip(self.places, self.known or (), strict=True):
                values = rows[:, place].double().nan_to_num(nan=(low + high) / 2)
                changed[:, place] = 2 * (values.clamp(low, high) - low) / (high - low) - 1
            return changed

        return replace(data, x_train=ready(data.x_train), x_test=ready(data.x_test))

    def in_words(self) -> str:
        """Return what is paid, or was, as part of a sentence."""
        paid = f"for epsilon {shown_bound(self.epsilon)}, which is part of the run's"
        if self.known is None:
            return f"the private ranges are released first, {paid}"
        return f"the private ranges are known from an earlier session, {paid}"

    def facts(self) -> dict[str, Any]:
        """Return what a report says: what was paid, and the range of each column."""
        known = [] if self.known is None else map(list, self.known)
        return {
            "epsilon": self.epsilon,
            "noise_multiplier": self.counts.noise_multiplier,
            "sd_of_counts": self.counts.sd,
            "columns": dict(zip(self.columns, known, strict=False)),
        }
