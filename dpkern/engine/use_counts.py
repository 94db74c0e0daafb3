"""Notice that the records may decide on uses of parameters, or on their positions, in exact steps.

Kernels, routes and error bounds of a parameter's integers follow how many uses it had, and on how
many positions. Where a model lets the records decide that, a record's integers are not its own
alone: the certificate then holds on a condition. It is stated once they have differed between
batches, and from the first step on where batches are padded to their longest record, or a test of
the model (``engine.validate``) has seen its code read what tensors hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .clip_norms import NormedGradients
from .per_sample_gradients import ConvolutionGradients, LinearGradients, PerSampleGradients
from .tables import EmbeddingGradients, TiedGradients

if TYPE_CHECKING:
    from .uses import ParameterSource

CONDITION = (
    "how often a parameter is used, and on how many positions, does not depend on what the records "
    "hold"
)
"""The condition of certificates of such steps."""


class UseCounts:
    """The uses of each parameter and their positions, as first seen."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, ...]] = {}
        self.follow_records = False
        """Whether the records may decide on them: another number has come, or could come."""

    def note(self, slots: Sequence[ParameterSource]) -> None:
        """Compare the gradients that have arrived; a parameter without any has no integers."""
        for slot in slots:
            found = tuple(positions_of(arrival.record) for arrival in slot.arrivals)
            if found:
                known = self._known.setdefault(slot.index, found)
                self.follow_records = self.follow_records or known != found


def positions_of(record: PerSampleGradients) -> tuple[Any, ...]:
    """Return a record's kind, and the sizes by which kernels, routes and errors are chosen."""
    if isinstance(record, NormedGradients):
        return positions_of(record.record)
    sizes: tuple[int, ...] = ()
    if isinstance(record, LinearGradients):
        sizes = (int(record.a.shape[1]),)
    elif isinstance(record, ConvolutionGradients):
        sizes = tuple(record.x.shape[2:])
    elif isinstance(record, EmbeddingGradients):
        sizes = (int(record.ids.shape[1]),)
    elif isinstance(record, TiedGradients):
        sizes = (*positions_of(record.table)[1:], *positions_of(record.head)[1:])
    return type(record), *sizes


__all__ = ["CONDITION", "UseCounts", "positions_of"]
