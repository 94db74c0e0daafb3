"""Check that the numbers by which losses divide do not depend on the batch.

The clipping takes each record's own term. It undoes a mean over the records, as ``loss_reduction``
says, and any other constant scales every term. A constant that changes with the number of records,
as in ``loss.sum() / expected_batch_size`` with ``loss_reduction="mean"``, would let one record
scale the terms of all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...errors import UnsupportedModule
from .naming import CallSite, call_site
from .states import RecordSum

_Key = tuple[CallSite, int, int]
"""Call in the user's code, number of the loss in the call, number of the term."""


class Divisors:
    """What earlier losses divided by, each by the call it came from."""

    def __init__(self) -> None:
        self._shares: dict[_Key, int] = {}
        self._scales: dict[_Key, tuple[float, tuple[int, ...]]] = {}

    def check(
        self, state: RecordSum, number: int, declared: str, report: Callable[[str], None] | None
    ) -> None:
        """Compare a loss with earlier ones of the same call.

        Args:
            state: the loss.
            number: its place among the losses of one backward pass.
            declared: ``loss_reduction``.
            report: told what is wrong, since earlier steps cannot be taken back.

        Raises:
            UnsupportedModule: another divisor than before.
        """
        site = call_site()
        error = self._other_share(state, site, number) or self._other_scale(
            state, site, number, declared
        )
        if error is None:
            return
        if report is not None:
            report(str(error))
        raise error

    def _other_share(
        self, state: RecordSum, site: CallSite, number: int
    ) -> UnsupportedModule | None:
        for position, share in enumerate(sorted(state.shares)):
            before = self._shares.setdefault((site, number, position), share)
            if before != share:
                return UnsupportedModule(
                    "loss",
                    expected="a mean that divides each sample's terms by the same number in every "
                    "batch",
                    got=f"one over {share} entries of each sample, after {before} in an earlier "
                    "batch",
                    remedy="Pad all batches to one length, or divide each sample by its own number "
                    "of entries: dpkern.losses.per_sample_mean(terms, mask).mean().",
                )
        return None

    def _other_scale(
        self, state: RecordSum, site: CallSite, number: int, declared: str
    ) -> UnsupportedModule | None:
        batch = state.batch
        counts = (batch.in_pass, batch.size)
        for position, (reduction, scale) in enumerate(sorted(state.terms)):
            # What is left of the scale once the clipping has undone the declared mean.
            if reduction != declared:
                scale *= batch.in_pass if declared == "mean" else 1 / batch.in_pass
            key = site, number, position
            before, records = self._scales.setdefault(key, (scale, counts))
            if not _follows_size(before, records, scale, counts):
                continue
            other = "sum" if declared == "mean" else "mean"
            return UnsupportedModule(
                "loss",
                expected=f"a {declared} over the samples times a constant",
                got=f"a factor of {scale:.4g} for {counts[0]} samples, after {before:.4g} for "
                f"{records[0]}",
                remedy=f"Let the loss be a {declared} over the samples of each batch, or pass "
                f"loss_reduction={other!r} to make_private.",
            )
        return None


def _follows_size(
    before: float, records: tuple[int, ...], scale: float, counts: tuple[int, ...]
) -> bool:
    """Whether a scale changed as a number of records did, or as its inverse."""
    if math.isclose(before, scale, rel_tol=1e-6) or not before or not math.isfinite(scale):
        return False
    return any(
        math.isclose(scale / before, ratio, rel_tol=1e-6)
        for old, new in zip(records, counts, strict=True)
        if old and new
        for ratio in (new / old, old / new)
    )
