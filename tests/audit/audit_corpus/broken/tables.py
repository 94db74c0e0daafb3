"""Noise that is used twice, or that the adversary has: tables and generators that start again."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Generator, Tensor

from dpkern.audit.claims import GaussianDP
from dpkern.audit.subject import Pair

from ..kit import Case, Release, add_record, clip, fixed, normal, unit

SIGMA = 1.1
D = 8
TABLE = 512
SHIFT = 3


def steps(records: Tensor, k: int) -> Tensor:
    """Sum over the records of every step's clipped gradient, ``[k D]``."""
    return clip(records.reshape(len(records), k, D)).sum(0).reshape(-1)


@cache
def public_windows() -> Tensor:
    """Every window of the published table, ``[TABLE, D]``."""
    table = normal(1, TABLE, Generator().manual_seed(1), SIGMA)[0]
    return torch.cat([table, table[:D]]).unfold(0, D, 1)[:TABLE]


def public_table(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """A window of a table that everybody has, from a secret offset."""
    offset = torch.randint(TABLE, (runs,), generator=generator)
    return clip(records).sum(0) + public_windows()[offset]


def nearest_window(y: Tensor) -> Tensor:
    """Squared distance to the nearest window: 0 without the record, to the outputs' grid."""
    return torch.cdist(y.to(torch.float64), public_windows()).amin(-1).square()


def shared_table(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """A fresh secret table for each training; the second step starts 3 further on."""
    table = normal(runs, D + SHIFT, generator, SIGMA)
    return steps(records, 2) + torch.cat([table[:, :D], table[:, SHIFT:]], dim=-1)


def random_windows(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """A fresh secret table of 4 windows' length, and two random windows of it."""
    table = normal(runs, 4 * D, generator, SIGMA)
    start = torch.randint(4 * D, (runs, 2, 1), generator=generator)
    window = (start + torch.arange(D)) % (4 * D)
    noise = table.unsqueeze(1).expand(-1, 2, -1).gather(2, window)
    return steps(records, 2) + noise.reshape(runs, 2 * D)


def no_overlap(y: Tensor) -> Tensor:
    """0 where the two steps are equal over at least four lanes under some shift, else 1."""
    first, second = y[:, :D], y[:, D:]
    found = torch.zeros(len(y), dtype=torch.bool)
    for lag in range(D - 3):
        for a, b in ((first, second), (second, first)):
            found |= ((a[:, lag:] - b[:, : D - lag]).abs() < 1e-5).all(-1)
    return (~found).to(torch.float64)


def resumed(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Four steps, stopped after two; the resumed run seeds its generator as the first did."""
    noise = normal(runs, 2 * D, generator, SIGMA)
    return steps(records, 4) + noise.repeat(1, 2)


FIRST_STEP = torch.cat([torch.ones(D), torch.zeros(D)]).double()[None] / math.sqrt(D)

CASES = (
    Case(
        subject=Release(
            name="public table",
            claimed=GaussianDP(1 / SIGMA),
            mechanism=public_table,
            neighbours=fixed(
                Pair(
                    name="coordinate",
                    without=torch.zeros(0, D, dtype=torch.float64),
                    present=unit(D)[None],
                    score=nearest_window,
                )
            ),
            sd=SIGMA,
        ),
        truth=math.inf,
        layers=("canary",),
        source="a table of noise samples in memory",
    ),
    Case(
        subject=Release(
            name="secret table over two steps",
            claimed=GaussianDP(math.sqrt(2) / SIGMA),
            mechanism=shared_table,
            neighbours=add_record(D, (1.0, 1.0)),
            sd=SIGMA,
        ),
        truth=math.inf,
        layers=("covariance", "canary"),
        source="overlapping windows of a secret table",
    ),
    Case(
        subject=Release(
            name="random windows of a secret table",
            claimed=GaussianDP(math.sqrt(2) / SIGMA),
            mechanism=random_windows,
            neighbours=fixed(
                Pair(
                    name="first step only",
                    without=torch.zeros(0, 2 * D, dtype=torch.float64),
                    present=torch.cat([torch.ones(D) / math.sqrt(D), torch.zeros(D)])[
                        None
                    ].double(),
                    score=no_overlap,
                )
            ),
        ),
        truth=math.inf,
        layers=("canary",),
        source="random windows of a secret table",
    ),
    Case(
        subject=Release(
            name="reused seed on resume",
            claimed=GaussianDP(2 / SIGMA),
            mechanism=resumed,
            neighbours=add_record(D, (1.0,) * 4),
            sd=SIGMA,
        ),
        truth=math.inf,
        layers=("covariance", "canary"),
        source="a checkpoint without its generator",
    ),
)
