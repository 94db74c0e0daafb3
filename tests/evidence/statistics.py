"""Do the draws follow the exact law? Streaming tests of X and of y against the integer law.

``examine(fill, "gaussian", n)`` reads ``n`` draws ``X`` from ``fill(first_position, count)`` and
tests, always against the exact law (not against a continuous Gaussian or Laplace):

* mean, variance, kurtosis (``z``: difference in its exact standard error),
* Kolmogorov-Smirnov on X at all multiples of 2^10 (a sub-supremum: its p-value is conservative),
* chi-square of ``y = floor((v + X) / 2^14)`` at eight phases ``v``,
* chi-square of the low 14 bits of X, which are exactly uniform,
* tail counts (exact binomial), and correlations between draws at several distances.

Each test is two-sided; a figure is rejected if its p-value is below ``LEVEL``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from dpkern.base.laws import FINE_BITS, GAUSSIAN, LAPLACE, LAWS, SCALE_UNITS, Law, gaussian_tail
from dpkern.base.masses import gaussian_masses, laplace_masses

Fill = Callable[[int, int], npt.NDArray[np.int32]]
"""``fill(first_position, count)``: the draws X at these positions, in units of u."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

LEVEL = 1e-6
CELL = 1 << FINE_BITS
BIN_BITS = 10
CHUNK = 1 << 20
PHASES = (0, 1, CELL // 2 - 1, CELL // 2, CELL - 1, -1, 12345, -54321)
LAGS = (1, 4, 16, 64, 512)
TAILS = {GAUSSIAN.name: (3, 4, 5), LAPLACE.name: (5, 10, 14)}
"""Distances from the mean, in certified scales, beyond which draws are counted."""


@dataclass(frozen=True, kw_only=True)
class ExactLaw:
    """The exact law of X (units u) in float64.

    Attributes:
        law: the committed numbers.
        magnitudes: signed pmf of K; entry 0 is K = ``-len / 2``.
        offsets: pmf of ``X - K 2^14`` = 0, 1, ...
        mean, sd: of X.
        moments: standardised central moments of order 4, 6, 8 of X.
    """

    law: Law
    magnitudes: Floats
    offsets: Floats
    mean: float
    sd: float
    moments: tuple[float, float, float]

    @classmethod
    @cache
    def of(cls, name: str) -> ExactLaw:
        """The law named ``gaussian`` or ``laplace``."""
        law = LAWS[name]
        if law.uses_second_uniform:
            masses = gaussian_masses(law.counts, gaussian_tail())
            # 64 U2 is uniform on 0, 64, ..: counting the U2 with 64 U2 <= t < 64 U2 + 2^14.
            t = np.arange(2 * CELL - 64)
            terms = np.minimum(t // 64, 255) - np.maximum(-((CELL - 1 - t) // 64), 0) + 1
            offsets = np.concatenate([np.zeros(32), terms / (256 * CELL)])
        else:
            masses = laplace_masses(law.counts)
            offsets = np.concatenate([np.zeros(CELL // 2), np.full(CELL, 1 / CELL)])
        half = [mass / (2 * sum(masses)) for mass in masses]
        magnitudes = np.array(half[::-1] + half)
        # X - mean is a sum of two independent variables, each symmetric about 0.
        big = (np.arange(len(magnitudes)) - len(half) + 0.5) * CELL
        small = np.arange(len(offsets)) - float(np.arange(len(offsets)) @ offsets)
        a = [float(magnitudes @ big**k) for k in range(0, 9, 2)]
        b = [float(offsets @ small**k) for k in range(0, 9, 2)]
        even = [
            sum(math.comb(2 * k, 2 * i) * a[i] * b[k - i] for i in range(k + 1)) for k in range(5)
        ]
        return cls(
            law=law,
            magnitudes=magnitudes,
            offsets=offsets,
            mean=-CELL / 2 + float(np.arange(len(offsets)) @ offsets),
            sd=math.sqrt(even[1]),
            moments=(even[2] / even[1] ** 2, even[3] / even[1] ** 3, even[4] / even[1] ** 4),
        )

    def bins(self) -> Floats:
        """P(X in bin) for bins of 2^10 u covering [-bound, bound)."""
        width = 1 << BIN_BITS
        padded = np.zeros(-(-len(self.offsets) // CELL) * CELL)
        padded[: len(self.offsets)] = self.offsets
        spread = padded.reshape(-1, width).sum(axis=1)
        comb = np.zeros(len(self.magnitudes) * (CELL // width))
        comb[:: CELL // width] = self.magnitudes
        found = np.convolve(comb, spread)
        first = self.law.bound // width - len(self.magnitudes) // 2 * (CELL // width)
        result = np.zeros(2 * self.law.bound // width)
        result[first : first + len(found)] = found[: len(result) - first]
        return result

    def released(self, v: int) -> tuple[Floats, int]:
        """``(pmf, first)`` of y = floor((v + X) / 2^14); entry 0 is y = ``first``."""
        carry = np.bincount(
            (v % CELL + np.arange(len(self.offsets))) >> FINE_BITS, weights=self.offsets
        )
        return np.convolve(self.magnitudes, carry), v // CELL - len(self.magnitudes) // 2


class Tally:
    """Sums and histograms over chunks of draws; memory does not grow with the number of draws."""

    def __init__(self, exact: ExactLaw) -> None:
        self.exact = exact
        self.n = 0
        self.outside = 0
        self.powers = np.zeros(5)
        self.bins: Integers = np.zeros(2 * exact.law.bound >> BIN_BITS, dtype=np.int64)
        self.low: Integers = np.zeros(CELL, dtype=np.int64)
        self.expected = {v: exact.released(v) for v in PHASES}
        self.y = {v: np.zeros(len(e[0]), dtype=np.int64) for v, e in self.expected.items()}
        self.lags = dict.fromkeys(LAGS, 0.0)
        self.pairs = dict.fromkeys(LAGS, 0)

    def add(self, draws: npt.NDArray[np.int32], v: int) -> None:
        """Count one chunk of draws, released at the sum ``v``."""
        x = draws.astype(np.int64)
        bound = self.exact.law.bound
        self.n += len(x)
        self.outside += int(np.count_nonzero((x < -bound) | (x >= bound)))
        z = (x - self.exact.mean) / self.exact.sd
        square = z * z
        self.powers += [len(z), z.sum(), square.sum(), (square * z).sum(), (square**2).sum()]
        for lag in LAGS:
            self.lags[lag] += float(z[:-lag] @ z[lag:])
            self.pairs[lag] += len(z) - lag
        coarse = (np.clip(x, -bound, bound - 1) + bound) >> BIN_BITS
        self.bins += np.bincount(coarse, minlength=len(self.bins))
        self.low += np.bincount(x & (CELL - 1), minlength=CELL)
        cells = len(self.y[v])
        y = ((v + x) >> FINE_BITS) - self.expected[v][1]
        self.y[v] += np.bincount(np.clip(y, 0, cells - 1), minlength=cells)


def _two_sided(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))


def _chi_square(observed: Integers, expected: Floats) -> tuple[float, int]:
    """Statistic and degrees of freedom; the tails of a unimodal law are pooled to 10 expected."""
    enough = np.flatnonzero(expected >= 10)
    first, last = int(enough[0]), int(enough[-1])
    want, have = expected[first : last + 1].copy(), observed[first : last + 1].astype(float)
    want[0] += expected[:first].sum()
    have[0] += observed[:first].sum()
    want[-1] += expected[last + 1 :].sum()
    have[-1] += observed[last + 1 :].sum()
    return float(((have - want) ** 2 / want).sum()), len(want) - 1


def _figure(value: float, expected: float, p: float) -> dict[str, Any]:
    return {"value": float(value), "expected": float(expected), "p": p, "rejected": not p >= LEVEL}


def figures(tally: Tally) -> dict[str, dict[str, Any]]:
    """Every test of a tally: value, expected value, p-value, whether rejected."""
    exact, n = tally.exact, tally.n
    fourth, sixth, eighth = exact.moments
    result: dict[str, dict[str, Any]] = {}

    def deviation(name: str, value: float, expected: float, error: float) -> None:
        result[name] = _figure(value, expected, _two_sided((value - expected) / error))

    m1, m2, m4 = tally.powers[1] / n, tally.powers[2] / n, tally.powers[4] / n
    sd_cells = exact.sd / CELL
    deviation(
        "mean [cells]", exact.mean / CELL + m1 * sd_cells, exact.mean / CELL, sd_cells / n**0.5
    )
    deviation("variance / law", m2, 1.0, math.sqrt((fourth - 1) / n))
    # Delta method about the known mean: m4 / m2^2 is m4 - 2 fourth (m2 - 1) to first order.
    spread = (eighth - fourth**2) - 4 * fourth * (sixth - fourth) + 4 * fourth**2 * (fourth - 1)
    deviation("kurtosis", m4 / m2**2, fourth, math.sqrt(spread / n))

    law_bins = exact.bins()
    gap = np.abs(np.cumsum(tally.bins) / n - np.cumsum(law_bins)).max()
    result["KS sqrt(n) D"] = _figure(
        float(gap * n**0.5), 0.0, float(stats.kstwobign.sf(gap * n**0.5))
    )

    total, freedom = 0.0, 0
    for v, seen in tally.y.items():
        if seen.sum():
            part, degrees = _chi_square(seen, tally.expected[v][0] * seen.sum())
            total, freedom = total + part, freedom + degrees
    result["chi-square y"] = _figure(total, freedom, _chi_square_p(total, freedom))
    part, degrees = _chi_square(tally.low, np.full(CELL, n / CELL))
    result["chi-square low bits"] = _figure(part, degrees, _chi_square_p(part, degrees))

    middle = exact.law.bound + CELL // 2
    for scales in TAILS[exact.law.name]:
        low = (middle - scales * SCALE_UNITS) >> BIN_BITS
        high = (middle + scales * SCALE_UNITS) >> BIN_BITS
        count = int(tally.bins[:low].sum() + tally.bins[high:].sum())
        chance = float(law_bins[:low].sum() + law_bins[high:].sum())
        p = min(
            1.0, 2 * min(stats.binom.cdf(count, n, chance), stats.binom.sf(count - 1, n, chance))
        )
        result[f"beyond {scales} scales"] = _figure(count, n * chance, float(p))

    for lag in LAGS:
        correlation = tally.lags[lag] / tally.pairs[lag]
        deviation(f"correlation at {lag}", correlation, 0.0, tally.pairs[lag] ** -0.5)
    result["outside the bound"] = _figure(tally.outside, 0, float(tally.outside == 0))
    return result


def _chi_square_p(statistic: float, freedom: int) -> float:
    below, above = stats.chi2.cdf(statistic, freedom), stats.chi2.sf(statistic, freedom)
    return float(min(1.0, 2 * min(below, above)))


def examine(fill: Fill, name: str, n: int, *, chunk: int = CHUNK) -> dict[str, Any]:
    """Test ``n`` draws of ``fill`` against the law ``name``.

    Returns:
        ``accepted``, ``rejected`` (names of rejected tests), ``n`` and ``tests``.
    """
    tally = Tally(ExactLaw.of(name))
    chunk = max(max(LAGS) + 1, min(chunk, -(-n // len(PHASES))))
    for turn, first in enumerate(range(0, n, chunk)):
        draws = fill(first, min(chunk, n - first))
        tally.add(draws, PHASES[turn % len(PHASES)])
    tests = figures(tally)
    rejected = [test for test, figure in tests.items() if figure["rejected"]]
    return {"accepted": not rejected, "rejected": rejected, "n": tally.n, "tests": tests}


def scaled(fill: Fill, numerator: int, denominator: int) -> Fill:
    """A negative control: the same draws, scaled."""

    def wrong(first: int, count: int) -> npt.NDArray[np.int32]:
        x = fill(first, count).astype(np.int64)
        return (x * numerator // denominator).astype(np.int32)

    return wrong


def examine_with_controls(fill: Fill, name: str, n: int, controls: int) -> dict[str, Any]:
    """``examine`` plus the scales 2/3 and 3/2, which both KS and variance must reject."""
    result = examine(fill, name, n)
    refused = {
        f"scale {a}/{b}": examine(scaled(fill, a, b), name, controls)["rejected"]
        for a, b in ((2, 3), (3, 2))
    }
    caught = all({"variance / law", "KS sqrt(n) D"} <= set(names) for names in refused.values())
    return {**result, "controls": refused, "passed": result["accepted"] and caught}


def generator(name: str, seed: int = 0) -> Fill:
    """dpkern's own generator with a fixed, public key, so that the figures can be repeated."""
    from dpkern.base.rng import Key, Purpose
    from dpkern.ops import noise

    purpose = {GAUSSIAN.name: Purpose.NOISE, LAPLACE.name: Purpose.LAPLACE}[name]
    stream = Key.from_unsafe_seed(seed).stream(purpose, 0)

    def fill(first: int, count: int) -> npt.NDArray[np.int32]:
        drawn: npt.NDArray[np.int32] = noise.lattice_draws(
            stream, position=first, count=count, distribution=name
        ).numpy()
        return drawn

    return fill


def released_mismatches(name: str, count: int, seed: int = 0) -> int:
    """Count the sums that ``add_noise`` releases as anything but floor((v + X) / 2^14)."""
    import torch

    from dpkern.base.rng import Key, Purpose
    from dpkern.ops import noise

    stream = Key.from_unsafe_seed(seed).stream(Purpose.NOISE, 1)
    x = noise.lattice_draws(stream, position=0, count=count, distribution=name).numpy()
    v = np.random.default_rng(seed).integers(-(2**40), 2**40, count)
    y = noise.add_noise(torch.from_numpy(v.copy()), stream=stream, distribution=name).numpy()
    return int(np.count_nonzero(y != (v + x) // CELL))


def run(n: int = 10**8, seed: int = 0) -> dict[str, Any]:
    """Both laws at ``n`` draws of dpkern's generator, controls at 10^6: ``passed``, ``figures``."""
    started = time.perf_counter()
    found = {
        name: {
            **examine_with_controls(generator(name, seed), name, n, min(n, 10**6)),
            "released_mismatches": released_mismatches(name, min(n, 10**6), seed),
        }
        for name in LAWS
    }
    return {
        "passed": all(
            result["passed"] and result["released_mismatches"] == 0 for result in found.values()
        ),
        "figures": found,
        "seconds": round(time.perf_counter() - started, 1),
    }


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(run(int(float(sys.argv[1])) if len(sys.argv) > 1 else 10**8), indent=2))
