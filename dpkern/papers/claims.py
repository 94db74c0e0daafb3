"""Tabulate claimed and certified epsilon of every mechanism of the papers.

``epsilon_claimed`` is computed by the paper's own rule, ``epsilon_certified`` from the event of
what is released: Gaussian events G(z) of noise multiplier z by privacy loss distributions, under
the relation of the row. The derivations are in ``docs/mechanisms.md``.

Sources: Abadi et al. 2016 (DP-SGD); GReDP; Spectral-DP; directional noise for DP-SGD; AdaClip; the
lecture notes on private projected SGD; the stabilised perturbed loss (SPOF); AdLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..privacy import accounting
from ..privacy.accounting import events
from ..privacy.accounting.events import EventSpec
from ..privacy.accounting.history import NOTHING, RELEASED_BITS
from ..privacy.theory import gaussian, markov, pnsgd
from .claims_local import local, row
from .result import ComparisonRow, Panel, Result, by_row
from .runner import ItemRequest
from .verdict import of_epsilon

RATE, STEPS, DELTA = 0.01, 10_000, 1e-5
ROWS = 60_000
SIGMA = 1.1
LAYERS = 8
UNPROVED = ("A2", "A3")
"""Defects without a known pair of neighbours that spends more than is claimed."""
GREDP_SIGMAS = {1: 3.813, 2: 2.127, 4: 1.288, 8: 0.8825}
"""DP-SGD's multipliers for epsilon 1, 2, 4, 8 at this rate, number of steps and delta."""


@dataclass(frozen=True, kw_only=True)
class ReleaseEvent:
    """The event of one release, as accounting reads it."""

    spec: EventSpec
    neighbouring: str = "add_remove"
    dimension: int | None = 1

    @property
    def unsampled(self) -> EventSpec:
        return events.no_op()

    @property
    def remarks(self) -> tuple[str, ...]:
        return ()

    @property
    def certified_for(self) -> str:
        return NOTHING if self.spec == events.non_private() else RELEASED_BITS

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        del dimension
        return self.spec


def certified(
    spec: EventSpec, *, neighbouring: str = "add_remove", **run: Any
) -> tuple[float, str]:
    """Return ``(epsilon, relation)`` of ``STEPS`` releases at rate ``RATE``, or of another run."""
    usual = {"sample_rate": RATE, "steps": STEPS, "delta": DELTA}
    return _certified(json.dumps(spec), neighbouring, tuple((usual | run).items()))


@lru_cache(maxsize=256)
def _certified(spec: str, neighbouring: str, run: tuple[tuple[str, Any], ...]) -> tuple[float, str]:
    """Certify an event; the result is cached, because several rows ask for the same one."""
    released = ReleaseEvent(spec=json.loads(spec), neighbouring=neighbouring)
    found = accounting.certify(released, **dict(run))
    return found.epsilon, found.relation


def table(request: ItemRequest) -> Result:
    """Build the whole table; ``quick`` changes nothing."""
    del request
    rows = [*_dp_sgd(), *_laplace(), *_spectral(), *_gredp(), *_directional(), *_notes(), *local()]
    verdicts = [
        of_epsilon(
            one.setting,
            one.epsilon_claimed,
            one.epsilon_certified or 0.0,
            one.note,
            attained=not one.note.startswith(UNPROVED),
        )
        for one in rows
        if one.epsilon_claimed is not None
    ]
    return Result(
        paper="claims",
        item="",
        title="claimed and certified epsilon",
        rows=rows,
        panels=[_panel(rows)],
        notes=(
            "claimed: by the source's own rule; certified: proved for what is released",
            "published: what the source states for this setting, where it states a number",
            "inf: non-private, nothing can be certified",
        ),
        settings={"sample_rate": RATE, "steps": STEPS, "delta": DELTA, "rows": ROWS},
        verdicts=verdicts,
    )


def _panel(rows: Sequence[ComparisonRow]) -> Panel:
    """Draw both numbers of every row; what is certified for nothing is infinite."""
    both = {
        "claimed": [row.epsilon_claimed for row in rows],
        "certified": [row.epsilon_certified for row in rows],
    }
    return by_row("epsilon", [row.setting for row in rows], both)


def _dp_sgd() -> list[ComparisonRow]:
    event = events.gaussian(SIGMA)
    claim, _ = certified(event)
    shared = events.gaussian(SIGMA / math.sqrt(LAYERS))
    return [
        row(f"DP-SGD flat, Poisson, sigma {SIGMA}", claim, certified(event)),
        row(f"DP-SGD, {LAYERS} layers clipped to C / sqrt({LAYERS}) each", claim, certified(event)),
        row(
            f"DP-SGD, {LAYERS} layers clipped to C each, noise sigma C",
            claim,
            certified(shared),
            "a record moves every layer at once: the multiplier is sigma / sqrt(layers)",
        ),
        row(
            "DP-SGD, shuffled batches with the Poisson number",
            claim,
            certified(event, sampling="shuffled"),
            "one unsampled release per epoch, 100 epochs",
        ),
        row(
            "DP-SGD, batches of fixed size with the Poisson number",
            claim,
            certified(event, sampling="fixed", dataset_size=ROWS),
            "dp-accounting's documented call for this event gives 11.8: its RDP accountant reads "
            "the multiplier as noise / sensitivity, which is 2 C under replacement",
        ),
        row(
            "DP-SGD, noise on every sample's gradient, Poisson",
            claim,
            certified(events.non_private()),
            "G4: the variance of the sum tells the number of samples in the batch",
        ),
    ]


def _laplace() -> list[ComparisonRow]:
    multiplier, dimension = 10.0, 61_706
    claim, _ = certified(events.laplace(multiplier))
    mixed = certified(events.laplace(multiplier / math.sqrt(dimension)))
    return [
        row("Laplace DP-SGD, L1 clip, b / C = 10", claim, certified(events.laplace(multiplier))),
        row(
            f"Laplace DP-SGD, L2 clip of {dimension} coordinates, b / C = 10",
            claim,
            mixed,
            "an L2 norm of C allows an L1 norm of sqrt(d) C",
        ),
    ]


def _spectral() -> list[ComparisonRow]:
    claim, _ = certified(events.gaussian(SIGMA))
    half = events.gaussian(SIGMA / math.sqrt(2))
    return [
        row(
            f"Spectral-DP, circular noise, flat, sigma {SIGMA}",
            claim,
            certified(half),
            "G2: half of the noise's variance falls on the imaginary part, which carries nothing; "
            "a fixed mask after the noise is post-processing",
        ),
        row(
            "Spectral-DP, full noise on the orthonormal coordinates",
            claim,
            certified(events.gaussian(SIGMA)),
        ),
    ]


def _gredp() -> list[ComparisonRow]:
    rows = []
    for target, sigma in GREDP_SIGMAS.items():
        claim, _ = certified(events.gaussian(sigma))
        single = events.gaussian(sigma / math.sqrt(2))
        layered = events.gaussian(sigma / math.sqrt(2 * LAYERS))
        rows += [
            row(
                f"GReDP, circular noise, flat, sigma {sigma}",
                claim,
                certified(single),
                "G2: this is DP-SGD at sigma / sqrt(2)",
                published=float(target),
            ),
            row(
                f"GReDP, circular noise, {LAYERS} layers clipped to c each, sigma {sigma}",
                claim,
                certified(layered),
                "G2, G3: sigma / sqrt(2 layers)",
                published=float(target),
            ),
        ]
    claim, _ = certified(events.gaussian(GREDP_SIGMAS[2]))
    rows.append(
        row(
            "GReDP, real noise, whole vectors released (circulant layers)",
            claim,
            certified(events.non_private()),
            "G1: the odd half of the gradient has no noise",
        )
    )
    return rows


def kappa(w: np.ndarray[Any, Any]) -> float:
    """Return the worst ratio of sensitivity to noise, over the claimed one, under the noise (13).

    It is ``||w|| / (min |w|^(1/3) sqrt(sum |w|^(4/3)))`` for the printed per-coordinate noise.
    """
    size = np.abs(w) / np.abs(w).max()
    root = size.min() ** (1 / 3) * math.sqrt((size ** (4 / 3)).sum())
    return float(np.linalg.norm(size) / root)


def _directional() -> list[ComparisonRow]:
    target = 2.0
    multiplier = 1 / math.sqrt(markov.tau(target, DELTA, 1).tau)
    rows = []
    for d in (10, 1000, 100_000):
        factor = kappa(np.random.default_rng(0).standard_normal(d))
        epsilon = gaussian.exact_epsilon(multiplier / factor, DELTA)
        rows.append(
            row(
                f"Directional noise, one release, w normal in {d} dimensions (seed 0)",
                target,
                (epsilon, "add_remove"),
                f"D1: kappa {factor:.4g}; it depends on w, so nothing is certified beforehand",
            )
        )
    claim, _ = certified(events.gaussian(SIGMA))
    rows.append(
        row(
            f"AdaClip, sigma {SIGMA}",
            claim,
            certified(events.gaussian(SIGMA)),
            "clipped in coordinates scaled by earlier noisy releases",
        )
    )
    return rows


def _notes() -> list[ComparisonRow]:
    n = 1000
    rows = []
    for target in (1.0, 4.0):
        sigma = pnsgd.pnsgd_sigma(n, 1.0, target, DELTA)
        found = certified(
            events.gaussian(sigma / n),
            neighbouring="replace_one",
            sampling="fixed",
            dataset_size=n,
            sample_rate=1 / n,
            steps=n * n,
        )
        rows.append(
            row(
                f"Private projected SGD, n {n}, n^2 steps, sigma / (n L) {sigma / n:.5g}",
                target,
                found,
                "N1: the notes' bounds are loose; sensitivity 2 n L, uniform subsets of one",
            )
        )
    return rows
