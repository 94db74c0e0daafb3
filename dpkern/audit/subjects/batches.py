"""Compare batches of dpkern's own samplers with the law that a mechanism is accounted with."""

from __future__ import annotations

from ...engine.sampling import FixedSizeSampler, PoissonSampler
from .. import sampler
from ..findings import Check

RECORDS, BATCH, STEPS = 512, 64, 400
"""Small sizes, with enough draws to expose a shuffled or a fixed sampler."""
CONFIDENCE = 1 - 1e-9
"""Confidence of these checks, which take nothing from that of the audit's statements."""


def checks(*, fixed: bool) -> tuple[Check, ...]:
    """Check fresh draws of the fixed-size sampler if ``fixed``, else of Poisson sampling."""
    rate = BATCH / RECORDS
    drawn = (
        FixedSizeSampler(dataset_size=RECORDS, batch_size=BATCH, steps=STEPS)
        if fixed
        else PoissonSampler(dataset_size=RECORDS, sample_rate=rate, steps=STEPS)
    )
    return sampler.checks(
        (batch.tolist() for batch in drawn),
        law=drawn.sampling,
        records=RECORDS,
        sample_rate=rate,
        confidence=CONFIDENCE,
    )
