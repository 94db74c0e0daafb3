"""The right laws in floating point: the last bits of an output tell what was added to."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from dpkern.audit.claims import GaussianDP, PureDP
from dpkern.audit.subject import Pair

from ..kit import Case, Release, fixed, laplace, rows

SIGMA = 1.1


def float32_gaussian(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """``torch.normal`` in float32 on the sum."""
    noise = torch.randn(runs, 1, generator=generator) * SIGMA
    return records.sum(0).to(torch.float32) + noise


def four_gaussians(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """The sum of four draws over two, as libraries do against one attack."""
    noise = sum(torch.randn(runs, 1, generator=generator) * SIGMA for _ in range(4)) / 2
    return records.sum(0).to(torch.float32) + noise


def float64_laplace(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """The textbook: a logarithm of a uniform number, unrounded."""
    return records.sum(0) + laplace(runs, 1, generator)


PAIR = Pair(name="one record", without=rows([0.0]), present=rows([1.0]))

CASES = tuple(
    Case(
        subject=Release(
            name=name, claimed=claim, mechanism=mechanism, neighbours=fixed(PAIR), grid=None
        ),
        truth=math.inf,
        layers=("bits",),
        source=source,
        runs=50_000,
    )
    for name, mechanism, claim, source in (
        ("float32 Gaussian", float32_gaussian, GaussianDP(1 / SIGMA), "torch.normal"),
        ("sum of four Gaussians", four_gaussians, GaussianDP(1 / SIGMA), "Holohan, Braghin 2021"),
        ("float64 Laplace", float64_laplace, PureDP(1.0), "Mironov 2012"),
    )
)
