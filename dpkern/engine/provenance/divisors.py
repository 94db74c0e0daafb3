"""Check that the numbers by which losses divide do not depend on the batch.

The clipping takes each record's own term. It undoes a mean over the records, as ``loss_reduction``
says, and any other constant scales every term. A constant that changes with the number of records,
as in ``loss.sum() / expected_batch_size`` with ``loss_reduction="mean"``, would let one record
scale the terms of all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...base.errors import UnsupportedModule
from .naming import CallSite, call_site
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
        self._scales: dict[_Key, tuple[float, tuple[int, int]]] = {}

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
            key = site, number, position
            before, records = self._scales.setdefault(key, (scale, counts))
            if _follows_size(before, records, scale, counts):
                return varying_scale(declared, before, records, scale, counts)
        return None


def _follows_size(
    before: float, records: Sequence[int], scale: float, counts: Sequence[int]
) -> bool:
    """Whether a scale changed in proportion to a number of records, or to its inverse."""
    if math.isclose(before, scale, rel_tol=1e-6) or not before or not math.isfinite(scale):
        return False
    return any(
        math.isclose(scale / before, ratio, rel_tol=1e-6)
        for old, new in zip(records, counts, strict=True)
        if old and new
        for ratio in (new / old, old / new)
    )
