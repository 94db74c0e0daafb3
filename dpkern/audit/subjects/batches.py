"""Batches of dpkern's own samplers against the law that a mechanism is accounted with."""

from __future__ import annotations

from ...engine.sampling import FixedSizeBatches, PoissonBatches
from .. import sampler
from ..findings import Check

RECORDS, BATCH, STEPS = 512, 64, 400
"""Small, and enough draws for a shuffled or a fixed sampler to show."""
CONFIDENCE = 1 - 1e-9
"""These checks are asked beside the audit's statements and take nothing from their confidence."""


def checks(*, fixed: bool) -> tuple[Check, ...]:
    """Fresh draws of the sampler that ``fixed`` sizes, or else Poisson sampling, calls for."""
    rate = BATCH / RECORDS
    drawn = (
        FixedSizeBatches(dataset_size=RECORDS, batch_size=BATCH, steps=STEPS)
        if fixed
        else PoissonBatches(dataset_size=RECORDS, sample_rate=rate, steps=STEPS)
    )
    return sampler.checks(
        (batch.tolist() for batch in drawn),
        law=drawn.sampling,
        records=RECORDS,
        sample_rate=rate,
        confidence=CONFIDENCE,
    )
