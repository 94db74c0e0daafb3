"""True statements about sound releases: no plan check may fail."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator

from dpkern.audit.findings import Check

from ..kit import Asked, Case
from ..statements import BATCH, RECORDS, STEPS, declared_poisson, dpsgd_with, stated, statement
from .gaussian import MU


def poisson_batches(quick: bool) -> Sequence[Check]:
    """Every record by itself."""
    del quick
    generator = Generator().manual_seed(7)
    return declared_poisson(
        (torch.rand(RECORDS, generator=generator) < BATCH / RECORDS).nonzero()[:, 0]
        for _ in range(STEPS)
    )


def row(name: str, asked: Asked) -> Case:
    """A sound release with a true statement."""
    return Case(subject=dpsgd_with(name, asked), truth=MU, source="control", runs=1000, sharp=0.4)


REPLACED = statement(1.0, 10.0, relation="replace_one")
LAYERS = statement(1.0, 4.38, bounds=(1.0,) * 4, scales=(2.0,) * 4)

CASES = (
    row("Poisson batches", poisson_batches),
    row("replace-one stated for two contributions", stated(REPLACED)),
    row("layers stated together", stated(LAYERS)),
)
