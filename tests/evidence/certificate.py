"""The exact noise certificates of both laws, and numerical cross-checks of what they imply."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy.special import ndtri

from dpkern.audit.certificate import committed
from dpkern.base.laws import ESCAPE, GAUSSIAN, LAPLACE, SCALE_UNITS
from dpkern.base.masses import FINE, laplace_masses

from .statistics import CELL, ExactLaw


def gaussian_shift_ratio(trials: int, seed: int = 0) -> float:
    """Largest ``(Phi^-1 P_t(A) - Phi^-1 P_s(A)) / ((t - s) / 64)`` over random lattice s < t.

    A runs over all likelihood-ratio tests of mass >= 1e-12 on the smaller side; at most 1 if the
    certificate is right. Uses the law itself (not the idealised one) and none of its code.
    """
    exact = ExactLaw.of(GAUSSIAN.name)
    rng = np.random.default_rng(seed)
    worst = 0.0
    for _ in range(trials):
        v, shift = int(rng.integers(CELL)), int(2.0 ** rng.uniform(4, 21))
        pmf, first = exact.released(v)
        other, other_first = exact.released(v + shift)
        gap = other_first - first
        length = max(len(pmf), gap + len(other))
        p = np.zeros(length)
        p[: len(pmf)] = pmf
        q = np.zeros(length)
        q[gap : gap + len(other)] = other
        score = np.full(length, -np.inf)
        np.log(q, out=score, where=q > 0)
        order = np.argsort(-(score - np.log(np.where(p > 0, p, 1e-300))), kind="stable")
        for way, sign in ((order, 1), (order[::-1], -1)):
            a, b = np.cumsum(p[way]), np.cumsum(q[way])
            keep = (a > 1e-12) & (a <= 0.5) & (b > 1e-12) & (b <= 0.5)
            mu = sign * (ndtri(b[keep]) - ndtri(a[keep])) * SCALE_UNITS / shift
            worst = max(worst, float(mu.max(initial=0.0)))
    return worst


def laplace_loss_ratio(shift: int) -> float:
    """Largest ``|log P_s(j) - log P_t(j)| / ((t - s) / 64)`` over all 2^14 phases, t - s = shift u.

    Over the magnitudes of the table and of its first three restarts; later ones repeat these.
    """
    masses = laplace_masses(LAPLACE.counts)
    half = np.array([mass / masses[0] for mass in masses[: 4 * ESCAPE]])
    p = np.concatenate([half[::-1], half])
    cells, rest = divmod(shift, CELL)
    worst = 0.0
    for phase in range(CELL):
        ahead, carried = divmod(phase + rest, CELL)
        before = ((CELL - phase) * p[1:] + phase * p[:-1]) / CELL
        after = ((CELL - carried) * p[1:] + carried * p[:-1]) / CELL
        move = cells + ahead
        loss = np.abs(np.log(before[move:] / after[: len(after) - move]))
        worst = max(worst, float(loss.max()))
    return worst * SCALE_UNITS / shift


def run() -> dict[str, Any]:
    """Prove both committed laws: ``passed``, and per law every figure of its certificate."""
    started = time.perf_counter()
    certificates = committed(exact=True)
    proved = round(time.perf_counter() - started, 1)
    shifts = {"1 u": 1, "1 cell": CELL, "1.5 cells": 3 * CELL // 2, "1 scale": SCALE_UNITS}
    losses = {name: laplace_loss_ratio(shift) for name, shift in shifts.items()}
    finite = gaussian_shift_ratio(1000)
    return {
        "passed": all(c.passed for c in certificates)
        and certificates[0].method == "interval"
        and certificates[0].intervals == FINE
        and finite <= 1
        and max(losses.values()) <= 1 + 1e-9,
        "figures": {c.law: {**asdict(c), "passed": c.passed} for c in certificates}
        | {"gaussian_finite_shift_ratio": finite, "laplace_loss_ratio": losses},
        "seconds": {"certificates": proved, "all": round(time.perf_counter() - started, 1)},
    }


if __name__ == "__main__":
    import json

    print(json.dumps(run(), indent=2))
