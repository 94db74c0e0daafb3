"""The parts of the corpus: releases as plain functions of records, and neighbours for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from dpkern.audit import sensitivity
from dpkern.audit.claims import Claim, NoClaim
from dpkern.audit.findings import Check
from dpkern.audit.likelihood import LaplaceRatio
from dpkern.audit.subject import Pair, Subject

NOTHING = NoClaim()

GRID = 2.0**-20
"""Releases are rounded to multiples of this, so that nothing but their law is looked at."""

Mechanism = Callable[[Tensor, int, Generator], Tensor]
"""``(records [B, d], runs, generator)`` -> ``[runs, d']`` float64."""

Neighbours = Callable[["Tensor | None"], Sequence[Pair]]
"""A function from the direction with least noise to the pairs to try."""

Asked = Callable[[bool], Sequence[Check]]
"""Checks of a subject's own; told whether slow ones are to be left out."""


@dataclass(frozen=True, kw_only=True)
class Release(Subject):
    """A release written as one function.

    Attributes:
        mechanism: the release.
        neighbours: its worst inputs.
        sd: of the noise that is claimed, on every released coordinate.
        grid: what the outputs are rounded to; None leaves the floats as they come.
        asked: checks of its own.
    """

    name: str
    claimed: Claim
    mechanism: Mechanism
    neighbours: Neighbours
    certified: Claim = NOTHING
    sd: float | None = None
    grid: float | None = GRID
    asked: Asked | None = None

    def release(self, data: Tensor, runs: int, seed: int) -> Tensor:
        y = self.mechanism(data, runs, Generator().manual_seed(seed))
        return y if self.grid is None else torch.round(y / self.grid) * self.grid

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        return self.neighbours(weakest)

    def noise_sd(self) -> float | None:
        return self.sd

    def checks(self, *, quick: bool) -> Sequence[Check]:
        return () if self.asked is None else self.asked(quick)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the corpus.

    Attributes:
        subject: what is audited.
        truth: what the pairs can show at most, in the claim's unit: mu of a Gaussian claim, epsilon
            of a pure one.
        layers: each of these must speak against a broken subject; none may against a sound one.
        fails: names of checks of its own that must fail.
        source: whose claim it is, or where the mistake is known from.
        runs: of each side of each pair.
        sharp: the share of ``truth`` that the audit of a sound subject must show.
    """

    subject: Subject
    truth: float
    layers: tuple[str, ...] = ()
    fails: tuple[str, ...] = ()
    source: str
    runs: int = 10_000
    sharp: float = 0.8

    @property
    def id(self) -> str:
        return self.subject.name.replace(" ", "-")


def bounded(
    summed: sensitivity.Summed, *, slack: float = 1e-12, dtype: torch.dtype = torch.float64
) -> Asked:
    """The sensitivity checks of a sum with bound 1; ``slack`` is what sums may round."""
    given = sensitivity.Summation(
        summed=summed, bound=1.0, widths=(1, 3, 16, 1000), dtype=dtype, slack=slack
    )
    return partial(_bounded, given)


def _bounded(given: sensitivity.Summation, quick: bool) -> Sequence[Check]:
    return sensitivity.checks(given, quick=quick)


def normal(runs: int, d: int, generator: Generator, sd: float = 1.0) -> Tensor:
    """Independent N(0, sd^2), ``[runs, d]``."""
    return torch.randn(runs, d, generator=generator, dtype=torch.float64) * sd


def laplace(runs: int, d: int, generator: Generator, scale: float = 1.0) -> Tensor:
    """Independent Laplace noise of this scale, ``[runs, d]``."""
    u = torch.rand(runs, d, generator=generator, dtype=torch.float64) - 0.5
    return -scale * u.sign() * torch.log1p(-2 * u.abs())


def clip(records: Tensor, bound: float = 1.0) -> Tensor:
    """``g min(1, bound / ||g||_2)`` of every row; what is not finite counts as 0."""
    finite = records.nan_to_num(0.0, 0.0, 0.0)
    norm = torch.linalg.vector_norm(finite, dim=-1, keepdim=True)
    return finite * (bound / norm.clamp_min(bound))


def unit(d: int, at: int = 0) -> Tensor:
    """The coordinate vector."""
    e = torch.zeros(d, dtype=torch.float64)
    e[at] = 1
    return e


def add_record(
    d: int, bounds: Sequence[float] = (1.0,), *, others: int = 0
) -> Callable[[Tensor | None], Sequence[Pair]]:
    """Neighbours with and without one record at the clip boundary.

    Args:
        d: coordinates of each block (a layer, or a step).
        bounds: clip norm of each block; the canary reaches all of them.
        others: records of zeros that are there in both worlds.
    """
    return partial(_add_record, d, tuple(bounds), others)


def _add_record(
    d: int, bounds: tuple[float, ...], others: int, weakest: Tensor | None
) -> Sequence[Pair]:
    size = d * len(bounds)
    random = torch.randn(size, generator=Generator().manual_seed(7), dtype=torch.float64)
    directions = {
        "coordinate": unit(d).repeat(len(bounds)),
        "uniform": torch.ones(size, dtype=torch.float64),
        "random": random,
    }
    if weakest is not None:
        directions["weakest"] = weakest.to(torch.float64)
    empty = torch.zeros(others, size, dtype=torch.float64)
    reach = torch.tensor(bounds, dtype=torch.float64).unsqueeze(-1)
    pairs = []
    for name, direction in directions.items():
        blocks = direction.reshape(len(bounds), d)
        norms = torch.linalg.vector_norm(blocks, dim=-1, keepdim=True).clamp_min(1e-9)
        canary = (blocks / norms * reach).reshape(1, size)
        pairs.append(Pair(name=name, without=empty, present=torch.cat([empty, canary])))
    return pairs


def fixed(*pairs: Pair) -> Neighbours:
    """The same pairs whatever the noise."""
    return partial(_fixed, pairs)


def _fixed(pairs: tuple[Pair, ...], weakest: Tensor | None) -> Sequence[Pair]:
    del weakest
    return pairs


def rows(*records: Sequence[float]) -> Tensor:
    """Records ``[B, d]``."""
    return torch.tensor(records, dtype=torch.float64)


def laplace_pair(name: str, m0: Tensor, m1: Tensor, scale: float) -> Pair:
    """Noiseless releases ``m0`` and ``m1``, with Laplace noise of one scale on each coordinate."""
    score = LaplaceRatio(m0, m1, scale)
    return Pair(name=name, without=m0[None], present=m1[None], score=score, layer="likelihood")
