"""One Gaussian release of integer sums over all records, as the accounting asks for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import RELEASED_BITS


@dataclass(frozen=True)
class GaussianSums:
    """A Gaussian release of integer sums, certified for released bits.

    Attributes:
        noise_multiplier: noise scale over the largest norm of one record's contribution.
        dimension: number of released sums.
        neighbouring: the relation under which it is accounted.
    """

    noise_multiplier: float
    dimension: int
    neighbouring: str = "add_remove"

    certified_for: ClassVar[str] = RELEASED_BITS
    unsampled: ClassVar[EventSpec] = events.no_op()
    remarks: ClassVar[tuple[str, ...]] = ()
    mode: ClassVar[str] = "corrected"

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the Gaussian event."""
        del dimension
        return events.gaussian(self.noise_multiplier)

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the same event: there is no other claim."""
        return self.event_spec(dimension)

    def claim(
        self, *, steps: int, sample_rate: float, delta: float, dataset_size: int | None
    ) -> float | None:
        """Return None: the claim is that of the event."""
        return None

    def with_noise_multiplier(self, noise_multiplier: float) -> GaussianSums:
        """Return the same release with other noise."""
        return replace(self, noise_multiplier=noise_multiplier)
