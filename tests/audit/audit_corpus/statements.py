"""Statements about a run and its batches, as a subject's checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from dpkern.audit import plan, sampler
from dpkern.audit.findings import Check
from dpkern.privacy.accounting import events

from .kit import Asked, Release, add_record
from .sound.gaussian import CLAIM, D, dpsgd

RECORDS, BATCH, STEPS = 1000, 50, 200
"""Records, batch size and steps of the drawn batches."""


def statement(multiplier: float, epsilon: float, *, steps: int = 1, **other: Any) -> plan.Statement:
    """Gaussian noise, at delta 1e-5 unless said otherwise."""
    given: dict[str, Any] = {"delta": 1e-5} | other
    return plan.Statement(event=events.gaussian(multiplier), epsilon=epsilon, steps=steps, **given)


def stated(given: plan.Statement) -> Asked:
    """The plan checks of a statement."""
    return partial(_stated, given)


def _stated(given: plan.Statement, quick: bool) -> Sequence[Check]:
    del quick
    return plan.checks(given)


def declared_poisson(batches: Iterable[Tensor]) -> Sequence[Check]:
    """The checks of batches that are said to be Poisson samples of ``RECORDS`` records."""
    rows = [batch.tolist() for batch in batches]
    return sampler.checks(rows, law="poisson", records=RECORDS, sample_rate=BATCH / RECORDS)


def dpsgd_with(name: str, asked: Asked) -> Release:
    """A sound release with something said of it."""
    return Release(
        name=name,
        claimed=CLAIM,
        certified=CLAIM,
        mechanism=dpsgd,
        neighbours=add_record(D),
        asked=asked,
    )
