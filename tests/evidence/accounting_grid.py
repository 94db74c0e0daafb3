"""Certified epsilons against lower bounds that share no code with them: none may be below.

Lower bounds: closed hockey-stick divergences (unsampled Gaussian; one sampled step of Gaussian or
Laplace noise under each relation), Opacus' PRV lower bound (Poisson, add/remove), and privacy loss
distributions rounded optimistically (compositions for which nobody has a closed form).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution
from opacus.accountants.prv import PRVAccountant
from scipy.optimize import brentq
from scipy.stats import laplace, norm

from dpkern.privacy import accounting
from dpkern.privacy.accounting import events
from dpkern.privacy.accounting.events import EventSpec

DATASET_SIZE = 100_000


@dataclass(frozen=True)
class Release:
    """A release of a given multiplier, without a mechanism around it."""

    noise_multiplier: float
    family: str = "gaussian"
    neighbouring: str = "add_remove"
    certified_for: str = "released bits"
    dimension: int | None = 1_000_000
    unsampled: EventSpec = field(default_factory=events.no_op)
    remarks: tuple[str, ...] = ()

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        name = "GaussianDpEvent" if self.family == "gaussian" else "LaplaceDpEvent"
        return {"event": name, "noise_multiplier": self.noise_multiplier}


@dataclass(frozen=True)
class Point:
    """One question, and how its lower bound is found."""

    reference: str
    family: str
    relation: str
    sampling: str
    noise_multiplier: float
    sample_rate: float
    steps: int
    delta: float

    def __str__(self) -> str:
        return (
            f"{self.reference}-{self.relation}-{self.family}{self.noise_multiplier:g}"
            f"-q{self.sample_rate:g}-T{self.steps}-{self.delta}"
        )

    def certified(self) -> accounting.Certificate:
        own = "add_remove" if self.sampling in ("fixed", "shuffled") else self.relation
        return accounting.certify(
            Release(self.noise_multiplier, self.family, neighbouring=own),
            sample_rate=self.sample_rate,
            steps=self.steps,
            delta=self.delta,
            sampling=self.sampling,
            dataset_size=DATASET_SIZE,
        )

    def lower_bound(self) -> float:
        if self.reference == "prv":
            return prv_lower_bound(self)
        if self.reference == "optimistic":
            return optimistic_lower_bound(self)
        radius = 2.0 if self.relation == "replace_one" else 1.0
        if self.reference == "closed":
            mu = radius * math.sqrt(self.steps) / self.noise_multiplier
            return epsilon_of(lambda eps: gaussian_delta(eps, mu), self.delta)
        return epsilon_of(lambda eps: one_step_delta(self, eps), self.delta)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Balle-Wang: Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2)."""
    return float(
        norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2))
    )


def one_step_delta(point: Point, epsilon: float) -> float:
    """Hockey-stick divergence of one Poisson-sampled step, worst direction, one coordinate.

    A mixture of a law at 0 and at 1 against the law at 0 (or the mixture with -1): the likelihood
    ratio is monotone, so the best event is a half-line, found as the root of the ratio.
    """
    law = norm if point.family == "gaussian" else laplace
    scale, q = point.noise_multiplier, point.sample_rate

    def tail(x: float, at: float) -> float:
        return float(law.sf(x, loc=at, scale=scale))

    def mixture(at: float) -> Callable[[float], float]:
        return lambda x: (1 - q) * tail(x, 0.0) + q * tail(x, at)

    def log_density(x: float, at: float) -> float:
        parts = [law.logpdf(x, scale=scale), law.logpdf(x, loc=at, scale=scale)]
        return float(np.logaddexp(parts[0] + math.log1p(-q), parts[1] + math.log(q)))

    other = -1.0 if point.relation == "replace_one" else 0.0

    def log_ratio(x: float) -> float:
        return log_density(x, 1.0) - log_density(x, other)

    present, absent = mixture(1.0), mixture(other)
    far = 60 * scale + 2
    deltas = [0.0]
    if log_ratio(far) > epsilon:
        threshold = brentq(lambda x: log_ratio(x) - epsilon, -far, far, xtol=1e-14)
        deltas.append(present(threshold) - math.exp(epsilon) * absent(threshold))
    if log_ratio(-far) < -epsilon:
        threshold = brentq(lambda x: log_ratio(x) + epsilon, -far, far, xtol=1e-14)
        deltas.append(1 - absent(threshold) - math.exp(epsilon) * (1 - present(threshold)))
    return max(deltas)


def epsilon_of(delta_of: Callable[[float], float], delta: float) -> float:
    """The epsilon at which a decreasing curve reaches delta, 0 if it starts below."""
    if delta_of(0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_of(high) > delta:
        high *= 2
    return float(brentq(lambda eps: delta_of(eps) - delta, 0.0, high, xtol=1e-12))


def prv_lower_bound(point: Point) -> float:
    """Opacus' PRV accountant, lower end of its interval: at most 0.01 or 0.2 % below epsilon."""
    accountant = PRVAccountant()
    accountant.history = [(point.noise_multiplier, point.sample_rate, point.steps)]
    error = max(0.01, 0.002 * point.certified().epsilon)
    # Densities far outside the support overflow to 0 on purpose there, and the RDP bound that only
    # sizes the grid need not be tight.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Optimal order is the", UserWarning)
        composed = accountant._get_dprv(eps_error=error, delta_error=point.delta / 1000)
        low, _, _ = composed.compute_epsilon(point.delta, point.delta / 1000, error)
    return float(low)


def optimistic_lower_bound(point: Point) -> float:
    """The privacy loss rounded down, with delta enlarged by what the convolution may lose.

    For a uniform subset this is the mechanism on records that are all at their bound against one.
    """
    far_end = point.sampling == "fixed" and point.relation == "replace_one"
    build = (
        privacy_loss_distribution.from_gaussian_mechanism
        if point.family == "gaussian"
        else privacy_loss_distribution.from_laplace_mechanism
    )
    options: dict[str, Any] = {"use_connect_dots": False, "pessimistic_estimate": False}
    if point.family == "gaussian":
        replaced = point.relation == "replace_one" and not far_end
        names = NeighboringRelation
        options["neighboring_relation"] = names.REPLACE_ONE if replaced else names.ADD_OR_REMOVE_ONE
    interval = 2e-3 / math.sqrt(point.steps)
    once = build(
        point.noise_multiplier / (2 if far_end else 1),
        sampling_prob=point.sample_rate,
        value_discretization_interval=interval,
        **options,
    )
    enlarged = point.delta + 1e-14 + 1e-15 * point.steps
    return float(once.self_compose(point.steps).get_epsilon_for_delta(enlarged))


def grid() -> list[Point]:
    """500 points over three relations, three samplings and two noise families."""
    return list(_points())


def _points() -> Iterator[Point]:
    for sigma, q, steps, delta in product(
        (0.6, 0.8, 1.1, 1.7, 3.0, 6.0), (0.001, 0.004, 0.01, 0.04), (1, 30, 600, 8000), (1e-5, 1e-7)
    ):
        yield Point("prv", "gaussian", "add_remove", "poisson", sigma, q, steps, delta)
    for sigma, steps, delta in product((0.5, 1.0, 2.0, 5.0), (1, 9, 100), (1e-3, 1e-5, 1e-9)):
        for relation, sampling in (
            ("add_remove", "poisson"),
            ("zero_out", "shuffled"),
            ("replace_one", "fixed"),
        ):
            yield Point("closed", "gaussian", relation, sampling, sigma, 1.0, steps, delta)
    for relation, scale, q, delta in product(
        ("add_remove", "zero_out", "replace_one"), (0.5, 1.0, 3.0), (0.001, 0.03, 0.4), (1e-4, 1e-6)
    ):
        yield Point("one step", "gaussian", relation, "poisson", scale, q, 1, delta)
    for relation, scale, q, delta in product(
        ("add_remove", "zero_out"), (0.5, 1.0, 3.0), (0.01, 0.1, 0.5), (1e-4, 1e-6)
    ):
        yield Point("one step", "laplace", relation, "poisson", scale, q, 1, delta)
    for sigma, q, steps in product((0.8, 1.5, 4.0), (0.002, 0.01, 0.1), (1, 40, 1000)):
        for sampling in ("poisson", "fixed"):
            yield Point("optimistic", "gaussian", "replace_one", sampling, sigma, q, steps, 1e-5)
    for scale, q, steps in product((1.0, 4.0, 20.0), (0.01, 0.1, 0.5, 1.0), (5, 100, 1000)):
        yield Point("optimistic", "laplace", "add_remove", "poisson", scale, q, steps, 1e-5)
    for q, steps in product((0.003, 0.02, 0.2), (1, 10, 100, 400)):
        yield Point("optimistic", "gaussian", "zero_out", "poisson", 1.3, q, steps, 1e-6)
    for sigma, q, steps in product((0.9, 2.5), (0.02, 0.2), (3, 300)):
        yield Point("prv", "gaussian", "add_remove", "poisson", sigma, q, steps, 1e-6)


def run() -> dict[str, Any]:
    """Every point: 0 certified values below their lower bound, and how far above they are."""
    start = time.perf_counter()
    below: list[str] = []
    gaps: dict[str, list[float]] = {}
    points = grid()
    for point in points:
        certified, lower = point.certified().epsilon, point.lower_bound()
        if certified < lower:
            below.append(f"{point}: {certified} < {lower}")
        name = f"{point.reference} {point.family} {point.sampling} {point.relation}"
        gaps.setdefault(name, []).append(certified - lower)
    return {
        "passed": not below and len(points) == 500,
        "points": len(points),
        "underestimates": len(below),
        "below": below,
        "median_gap": {name: float(np.median(gap)) for name, gap in gaps.items()},
        "largest_gap": {name: max(gap) for name, gap in gaps.items()},
        "seconds": time.perf_counter() - start,
    }
