"""Check that the numbers by which losses divide do not depend on the batch.

The clipping takes each record's own term. It undoes a mean over the records, as ``loss_reduction``
says, and any other constant scales every term. A constant that changes with the number of records,
as in ``loss.sum() / expected_batch_size`` with ``loss_reduction="mean"``, would let one record
scale the terms of all others.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from ...base.errors import LossWarning, UnsupportedModule
from ..user_code import CallSite, call_site, lines_up
from .refusals import varying_scale, varying_share
from .states import RecordSum

_Key = tuple[CallSite, int, int]
"""Call in the user's code, number of the loss in the call, number of the term."""


class Divisors:
    """Divisors and scales of earlier losses, by the call that each came from."""

    def __init__(self) -> None:
        self.before: dict[tuple[CallSite, int], tuple[Any, ...]] = {}
        """The values compared last, by call and number of the loss."""
        self._shares: dict[_Key, int] = {}
        self._scales: dict[_Key, _ScaleBySize] = {}

    def check(self, state: RecordSum, number: int, declared: str) -> UnsupportedModule | None:
        """Compare a loss with earlier ones of the same call; return the error, if there is one.

        Args:
            state: the loss.
            number: its place among the losses of one backward pass.
            declared: ``loss_reduction``.
        """
        site, batch = call_site(ours=3), state.batch  # check, backward, and who called that
        given = state.shares, state.reduction, state.scales, batch.in_pass, batch.size
        if self.before.get((site, number)) == given:
            return None
        self.before[site, number] = given
        for position, share in enumerate(sorted(state.shares)):
            known = self._shares.setdefault((site, number, position), share)
            if known != share:
                return varying_share(share, known)
        counts = batch.in_pass, batch.size
        for position, (reduction, scale) in enumerate(sorted(state.terms)):
            # The scale that remains after the clipping has undone the declared mean.
            if reduction != declared:
                scale *= batch.in_pass if declared == "mean" else 1 / batch.in_pass
            scales = self._scales.setdefault((site, number, position), _ScaleBySize(scale, counts))
            other = scales.other_size(scale, counts)
            if other is not None:
                return varying_scale(declared, *other, scale, counts)
            if batch.in_pass < batch.size and _same(scale, batch.in_pass / batch.size):
                warnings.warn(
                    _share_of_piece(declared, *counts), LossWarning, stacklevel=lines_up()
                )
        return None


def _share_of_piece(declared: str, rows: int, size: int) -> str:
    return (
        f"the loss of {rows} of the {size} samples of a batch is their {declared} times "
        f"{rows / size:.4g}, their share of the batch: they train with as much less than in the "
        f"whole batch. Leave the factor out: call backward() on the {declared} over each piece. "
        "The step divides by the size of the batch."
    )


class NumbersBySize:
    """Numbers that the module takes beside samples, by their place among its arguments.

    One that is a multiple of the number of records, of its root or square, or of their inverse, in
    batches of several sizes, lets a record that joins change what the others do.
    """

    def __init__(self) -> None:
        self._factors: dict[Any, dict[float, float]] = {}
        """The multiple that each number has been in all batches, by place and power of the size."""
        self._sizes: dict[Any, tuple[int, int]] = {}
        """The last size at each place, and how often it has changed."""

    def follows(self, place: Any, value: float, size: int) -> bool:
        """Whether the number at a place has followed the sizes of batches up to this one."""
        now = {power: value / size**power for power in _POWERS} if size and value else {}
        known = self._factors.setdefault(place, now)
        kept = {power: f for power, f in known.items() if power in now and _same(f, now[power])}
        self._factors[place] = kept
        last, changes = self._sizes.get(place, (size, 0))
        self._sizes[place] = size, changes + (size != last)
        return bool(kept) and changes + (size != last) >= _CHANGES


class ScalesOfRows:
    """Numbers that multiply or divide samples in front of the module, and rows behind it."""

    def __init__(self) -> None:
        self._seen: dict[float, int] = {}
        """The size of the batch that each number has met."""
        self._constant: set[float] = set()
        """Numbers that have met batches of several sizes."""
        self._last: dict[str, float] = {}
        """The number that each operation has met last."""
        self._sizes: set[int] = set()
        self._by_call = NumbersBySize()

    def follows(self, name: str, value: float, size: int) -> bool:
        """Whether numbers of this call of an operation have followed the sizes of batches."""
        if value in self._constant:
            return False
        before, last = self._seen.get(value), self._last.get(name)
        self._last[name] = value
        if before is not None and before != size:
            self._constant.add(value)
            return False
        if before is not None and (value == last or len(self._sizes) < 2):
            return False
        self._sizes.add(size)
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[value] = size
        return self._by_call.follows((name, call_site()), value, size)


_MOST_SEEN = 1024

_POWERS = (1, -1, 0.5, -0.5, 2, -2)

_CHANGES = 2
"""Changes of the size after which a number counts as following it: one may be a schedule's."""

_Counts = tuple[int, int]
"""Numbers of records: in the pass, and in the batch."""


class _ScaleBySize:
    """The scale of one term in batches of several sizes.

    A scale that follows the size comes back with the size. Schedules and random weights give one
    size several scales.

    Args:
        scale: the first one.
        counts: numbers of records that it was seen with.
    """

    def __init__(self, scale: float, counts: _Counts) -> None:
        self._first = self._last = scale, counts
        self._seen: dict[_Counts, float] | None = {counts: scale}
        """The scale of every size; None once a size has had several."""
        self._returns = 0
        """Number of times a size came back with its scale, after another size with another one."""

    def other_size(self, scale: float, counts: _Counts) -> tuple[float, _Counts] | None:
        """Return an earlier scale and its size if they show that the scale follows the size."""
        if _follows_size(*self._first, scale, counts):
            return self._first
        if self._seen is None:
            return None
        last, self._last = self._last, (scale, counts)
        is_return = counts in self._seen and counts != last[1] and not _same(scale, last[0])
        if not _same(self._seen.setdefault(counts, scale), scale):
            self._seen = None
            return None
        self._returns += is_return
        return last if self._returns >= _RETURNS else None


_RETURNS = 10
"""Returns of sizes with their scales after which the scale counts as following the size: of a
random weight with two values 2^-10 would look like one."""


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


def _follows_size(
    before: float, records: Sequence[int], scale: float, counts: Sequence[int]
) -> bool:
    """Whether a scale changed as a number of records did, its root or square, or their inverse."""
    if _same(before, scale) or not before or not math.isfinite(scale):
        return False
    return any(
        _same(scale / before, (new / old) ** power)
        for old, new in zip(records, counts, strict=True)
        if old and new
        for power in _POWERS
    )
