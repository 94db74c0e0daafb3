"""Sound releases with false statements about them, which no output can show.

Each releases what ``sound.gaussian.dpsgd`` does. The numbers of epsilon are those that the sources,
or an accountant asked in the wrong way, print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Generator

from dpkern.audit.findings import Check
from dpkern.privacy.theory.gaussian import exact_epsilon

from ..kit import Asked, Case
from ..sound.gaussian import MU
from ..statements import BATCH, RECORDS, STEPS, declared_poisson, dpsgd_with, stated, statement


def shuffled_batches(quick: bool) -> Sequence[Check]:
    """A loader with ``shuffle=True``, declared as Poisson sampling."""
    del quick
    epochs = STEPS * BATCH // RECORDS
    generator = Generator().manual_seed(5)
    return declared_poisson(
        batch
        for _ in range(epochs)
        for batch in torch.randperm(RECORDS, generator=generator).split(BATCH)
    )


def fixed_batches(quick: bool) -> Sequence[Check]:
    """Fresh subsets of a fixed size, declared as Poisson sampling."""
    del quick
    generator = Generator().manual_seed(6)
    return declared_poisson(
        torch.randperm(RECORDS, generator=generator)[:BATCH] for _ in range(STEPS)
    )


def row(name: str, asked: Asked, fails: str, source: str) -> Case:
    """A sound release whose statement fails one check."""
    return Case(
        subject=dpsgd_with(name, asked),
        truth=MU,
        layers=("plan",),
        fails=(fails,),
        source=source,
        runs=1000,
    )


SHUFFLED = statement(
    1.1, 0.5499, steps=100, sample_rate=0.01, sampling="shuffled", accounted_as="poisson"
)
NOTES = 5 * math.sqrt(2 * math.log(1e5))
"""mu sqrt(2 log(1 / delta)) at mu = 5."""
LIMIT = exact_epsilon(1 / (0.01 * math.sqrt(100 * math.expm1(0.6**-2))), 1e-6)
"""Epsilon at mu = q sqrt(T (e^(1 / sigma^2) - 1)), the limit for many steps (Bu et al. 2020)."""
CLASSIC = math.sqrt(2 * math.log(1.25e5)) / 0.5
"""Noise of the classical calibration for epsilon 0.5."""

CASES = (
    row("shuffled as Poisson", stated(SHUFFLED), "amplification", "many trainers"),
    row("shuffled batches", shuffled_batches, "sampler: coverage", "DataLoader(shuffle=True)"),
    row("fixed batches", fixed_batches, "sampler: batch sizes", "subsets of a fixed size"),
    row(
        "replace-one trap",
        stated(statement(1.0, 4.728, relation="replace_one")),
        "replaced record",
        "RdpAccountant(REPLACE_ONE) of dp-accounting 0.6.0",
    ),
    row(
        "central limit accountant",
        stated(statement(0.6, LIMIT, steps=100, sample_rate=0.01, delta=1e-6)),
        "epsilon",
        "GDP accountants by the central limit theorem",
    ),
    row(
        "PN-SGD's epsilon at mu 5",
        stated(statement(0.2, NOTES)),
        "epsilon",
        "PN-SGD notes: epsilon = mu sqrt(2 log(1 / delta))",
    ),
    row(
        "GReDP theorem 3",
        stated(statement(CLASSIC / math.sqrt(2), 0.5)),
        "epsilon",
        "GReDP, theorem 3: the scalar theorem for complex noise",
    ),
    row(
        "amplification by q epsilon",
        stated(statement(0.104, 1.0, sample_rate=0.01)),
        "epsilon",
        "directional noise: (epsilon / q, delta / q) over all releases",
    ),
    row(
        "layers stated flat",
        stated(statement(1.1, 5.0, bounds=(1.0,) * 8, scales=(1.1,) * 8)),
        "clip groups",
        "GReDP: clip c for each of eight layers",
    ),
)
