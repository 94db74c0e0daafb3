"""Local releases that keep what they claim: Laplace noise and randomized response."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Generator, Tensor

from dpkern.audit.claims import Laplace, PureDP
from dpkern.audit.likelihood import ResponseRatio
from dpkern.audit.subject import Pair

from ..broken.local import coefficients
from ..kit import Case, Mechanism, Neighbours, Release, fixed, laplace, laplace_pair, rows

EPSILON = 1.0


def zeros(d: int) -> Tensor:
    return torch.zeros(d, dtype=torch.float64)


def ones(d: int) -> Tensor:
    return torch.ones(d, dtype=torch.float64)


def one_number(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """x in [0, 1] + Lap(1 / epsilon)."""
    return records[0] + laplace(runs, 1, generator, 1 / EPSILON)


def joint_scale(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """SPOF's printed coefficients, each with the whole sensitivity 3/2 over epsilon."""
    return coefficients(records) + laplace(runs, 2, generator, 1.5 / EPSILON)


def record_once(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """The certified form: the record itself once, n / epsilon on each feature."""
    n = records.shape[1]
    return records[0] + laplace(runs, n, generator, n / EPSILON)


def clipped_l1(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Laplace noise after a clip in the L1 norm."""
    norm = records.abs().sum(-1, keepdim=True).clamp_min(1)
    return (records / norm).sum(0) + laplace(runs, records.shape[1], generator, 1 / EPSILON)


def keeping(k: int) -> float:
    """``e^eps / (e^eps + k - 1)``."""
    return math.exp(EPSILON) / (math.exp(EPSILON) + k - 1)


def response(records: Tensor, runs: int, generator: Generator, *, k: int) -> Tensor:
    """The symbol with probability ``keeping(k)``, each of the others equally often else."""
    kept = torch.rand(runs, generator=generator, dtype=torch.float64) < keeping(k)
    other = torch.randint(1, k, (runs,), generator=generator)
    symbol = int(records[0, 0])
    return torch.where(kept, symbol, (symbol + other) % k)[:, None].double()


def symbols(k: int) -> Neighbours:
    """Symbol 0 or 1."""
    score = ResponseRatio(0, 1, keep=keeping(k), lie=(1 - keeping(k)) / (k - 1))
    zero, one = rows([0.0]), rows([1.0])
    return fixed(Pair(name="symbol", without=zero, present=one, score=score, layer="likelihood"))


def row(
    name: str,
    mechanism: Mechanism,
    neighbours: Neighbours,
    *,
    continuous: bool = True,
    sharp: float = 0.8,
) -> Case:
    """A row whose certificate is its claim."""
    claim = Laplace(EPSILON) if continuous else PureDP(EPSILON)
    subject = Release(
        name=name, claimed=claim, certified=claim, mechanism=mechanism, neighbours=neighbours
    )
    return Case(subject=subject, truth=EPSILON, source="control", sharp=sharp)


CASES = (
    row("Laplace", one_number, fixed(laplace_pair("ends", zeros(1), ones(1), 1 / EPSILON))),
    row(
        "SPOF joint scale",
        joint_scale,
        fixed(
            laplace_pair(
                "target", torch.tensor([0.5, -0.25]), torch.tensor([-0.5, 0.25]), 1.5 / EPSILON
            )
        ),
        continuous=False,
        sharp=0.6,
    ),
    row(
        "record released once",
        record_once,
        fixed(laplace_pair("all features", zeros(8), ones(8), 8 / EPSILON)),
        continuous=False,
        sharp=0.2,
    ),
    row(
        "Laplace noise after an L1 clip",
        clipped_l1,
        fixed(
            laplace_pair("coordinate", zeros(16), 100 * torch.eye(16)[0].double(), 1 / EPSILON),
            laplace_pair("uniform", zeros(16), ones(16) / 16, 1 / EPSILON),
        ),
    ),
    row("randomized response", partial(response, k=2), symbols(2), continuous=False),
    row("randomized response of ten", partial(response, k=10), symbols(10), continuous=False),
)
