"""Every output is on the lattice, and its low-order bits tell nothing: the precision attack.

Floating-point noise has a different precision near different sums: ``fl(1 + z)`` is a multiple of
2^-24 wherever ``fl(0 + z)`` has finer digits (Mironov 2012; Haney et al. 2022). The attacker here
looks only at the lowest set bit of the output, within windows around 0. He picks his event on half
of the outputs and is measured on the other half.

His *advantage* is what no certificate allows: ``P(E | D) - Phi(Phi^-1(P(E | D')) + 1 / sigma)``,
the part of the event's probability above that of the Gaussian mechanism itself, as a lower bound
with confidence 1 - 1e-6; 0 if it is negative. He must win against naive noise, and have advantage 0
against ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from dpkern.base.laws import SCALE_CELLS, SCALE_UNITS
from dpkern.base.rng import Key, Purpose
from dpkern.ops import clip, noise

from .bits import moderate, random_bits

Floats = npt.NDArray[np.floating[Any]]
SIGMA = 1.1
CONFIDENCE = 1e-6
CHUNK = 1 << 20
LEAST = 200_000
"""Fewer releases would leave cells within 2 sigma unseen by chance."""
FINEST, COARSEST = -60, 2
WINDOWS = (-8, -6, -4, -2, -1, 0, 1, 20)
SCALES = (1.1, 1.0, 3e-9, 4.7e-30, 2.0**20, 7.3e12, 1e30)


def off_lattice(released: Floats, scale: float) -> int:
    """Count the values that are not ``fl(y g)`` for an integer y, with ``g = scale / 64``."""
    kind = released.dtype.type
    cell = kind(scale / SCALE_CELLS)
    with np.errstate(over="ignore", invalid="ignore"):
        middle = np.nan_to_num(
            (released.astype(np.float64) / float(cell)).astype(kind), posinf=np.inf, neginf=-np.inf
        )
        middle = np.clip(middle, np.finfo(kind).min, np.finfo(kind).max)
        found = np.zeros(len(released), dtype=bool)
        whole = np.rint(middle)
        for y in (whole, np.nextafter(middle, kind(0)), np.nextafter(middle, middle * 2)):
            found |= (np.rint(y) == y) & (y * cell == released)
    return int((~found).sum())


def lattice_figures(n: int, seed: int, backend: str | None = None) -> dict[str, Any]:
    """``add_noise`` on ``n`` floats of every sort; integers are counts of g by their type."""
    generator = torch.Generator().manual_seed(seed)
    key = Key.from_unsafe_seed(seed)
    checked = missed = overflowed = nans = 0
    step = 0
    for kind in noise.FLOATS:
        largest = torch.finfo(kind).max
        edges = [0.0, -0.0, 5e-324, -1e-45, 1e-40, -largest, largest, 1.0, -0.1]
        edges += [float("nan"), float("inf"), float("-inf")]
        given = torch.tensor(edges, dtype=torch.float64).to(kind)
        share = max(len(edges), n // (2 * len(SCALES)))
        for scale in SCALES:
            step += 1
            x = torch.cat(
                [
                    given,
                    random_bits(share // 2, kind, generator),
                    moderate(share - share // 2 - len(edges), kind, generator) * scale,
                ]
            )
            noise.add_noise(
                x,
                stream=key.stream(Purpose.NOISE, step),
                rounding=key.stream(Purpose.ROUNDING, step),
                scale=scale,
                backend=backend,
            )
            out = x.numpy()
            checked += len(out)
            nans += int(np.isnan(out).sum())
            overflowed += int(np.isinf(out).sum())
            missed += off_lattice(out, scale)
    return {"values": checked, "off_lattice": missed, "nan": nans, "fl(y g) overflows": overflowed}


@dataclass(frozen=True)
class Counts:
    """Counts of each (window, lowest set bit)."""

    table: npt.NDArray[np.int64]

    @classmethod
    def of(cls, outputs: Floats) -> Counts:
        fraction, exponent = np.frexp(outputs.astype(np.float64))
        mantissa = np.abs(fraction * 2.0**53).astype(np.int64)
        lowest = np.where(mantissa == 0, 1, mantissa & -mantissa)
        bit = exponent - 53 + np.log2(lowest.astype(np.float64)).astype(np.int64)
        bit = np.where(mantissa == 0, COARSEST, np.clip(bit, FINEST, COARSEST))
        window = np.searchsorted(2.0 ** np.array(WINDOWS), np.abs(outputs))
        flat = np.clip(window, 0, len(WINDOWS) - 1) * (COARSEST - FINEST + 1) + bit - FINEST
        size = len(WINDOWS) * (COARSEST - FINEST + 1)
        return cls(np.bincount(flat, minlength=size).reshape(len(WINDOWS), -1))

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.table + other.table)

    def events(self) -> npt.NDArray[np.int64]:
        """``[window, bit]``: outputs inside the window whose lowest set bit is finer than that."""
        return self.table.cumsum(0).cumsum(1)

    @property
    def total(self) -> int:
        return int(self.table.sum())


def bound(count: int, n: int, *, upper: bool) -> float:
    """Clopper-Pearson bound of a probability, with confidence 1 - 1e-6."""
    if upper:
        return float(stats.beta.isf(CONFIDENCE, count + 1, n - count)) if count < n else 1.0
    return float(stats.beta.ppf(CONFIDENCE, count, n - count + 1)) if count else 0.0


def excess(p: Floats | float, q: Floats | float, mu: float) -> Any:
    """``p - Phi(Phi^-1(q) + mu)``: what a mu-GDP mechanism forbids."""
    return p - stats.norm.cdf(stats.norm.ppf(q) + mu)


@dataclass(frozen=True)
class Attack:
    """The attacker's result."""

    advantage: float
    event: str
    with_record: float
    without_record: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "advantage": self.advantage,
            "event": self.event,
            "P(event | with the record)": self.with_record,
            "P(event | without)": self.without_record,
        }


def attack(chosen_on: list[Counts], measured_on: list[Counts], mu: float) -> Attack:
    """Pick the event on the first half, measure it on the second; index 0 is without the record."""
    best: tuple[float, int, int, int] = (-np.inf, 0, 0, 0)
    for first in (0, 1):
        p = chosen_on[first].events() / chosen_on[first].total
        q = (chosen_on[1 - first].events() + 1) / (chosen_on[1 - first].total + 1)
        gain = excess(p, np.minimum(q, 1.0), mu)
        window, bit = np.unravel_index(int(np.argmax(gain)), gain.shape)
        best = max(best, (float(gain[window, bit]), first, int(window), int(bit)))
    _, first, window, bit = best
    hits = [int(c.events()[window, bit]) for c in measured_on]
    totals = [c.total for c in measured_on]
    low = bound(hits[first], totals[first], upper=False)
    high = bound(hits[1 - first], totals[1 - first], upper=True)
    rates = [h / t for h, t in zip(hits, totals, strict=True)]
    return Attack(
        advantage=max(0.0, float(excess(low, high, mu))),
        event=f"|y| <= 2^{WINDOWS[window]} and y is no multiple of 2^{bit + FINEST + 1}",
        with_record=rates[1],
        without_record=rates[0],
    )


Mechanism = Callable[[bool, int, int], torch.Tensor]
"""``(record present, count, turn)`` -> that many independent releases of the sum 1 or 0."""


def naive(present: bool, count: int, turn: int) -> torch.Tensor:
    """float32 normal noise added to the sum."""
    generator = torch.Generator().manual_seed(2 * turn + present)
    return float(present) + torch.randn(count, generator=generator) * SIGMA


def four_gaussians(present: bool, count: int, turn: int) -> torch.Tensor:
    """The sum of four normals over two (Holohan and Braghin 2021), as in other libraries."""
    generator = torch.Generator().manual_seed(2 * turn + present)
    parts = [torch.randn(count, generator=generator) * SIGMA for _ in range(4)]
    return float(present) + sum(parts) / 2


def _ours(present: bool, turn: int) -> dict[str, Any]:
    key = Key.from_unsafe_seed(2 * turn + present)
    return {"stream": key.stream(Purpose.NOISE, 0), "rounding": key.stream(Purpose.ROUNDING, 0)}


def float_tier(present: bool, count: int, turn: int) -> torch.Tensor:
    """``add_noise`` on a float sum."""
    return noise.add_noise(
        torch.full((count,), float(present)), scale=SIGMA, **_ours(present, turn)
    )


def exact_tier(present: bool, count: int, turn: int) -> torch.Tensor:
    """A record clipped to 1 in integers, ``add_noise``, and the cells as floats."""
    unit = SIGMA / SCALE_UNITS
    record = torch.full((int(present), 1), 7.0)
    total = clip.clip_sum(record, 1.0, arithmetic="exact", unit=unit).sums[0]
    y = noise.add_noise(total.expand(count).clone(), stream=_ours(present, turn)["stream"])
    return y.to(torch.float32) * (SIGMA / SCALE_CELLS)


MECHANISMS: dict[str, Mechanism] = {
    "float32 randn": naive,
    "sum of four randn": four_gaussians,
    "dpkern float": float_tier,
    "dpkern exact": exact_tier,
}
BROKEN = ("float32 randn", "sum of four randn")


def against(mechanism: Mechanism, n: int) -> dict[str, Any]:
    """The attack on ``n`` releases per world; for lattice outputs also their supports."""
    counts = [[Counts(np.zeros((len(WINDOWS), COARSEST - FINEST + 1), np.int64))] * 2 for _ in "ab"]
    low = [np.zeros(16, np.int64), np.zeros(16, np.int64)]
    reach = 2 * SCALE_CELLS
    seen = np.zeros((2, 20 * reach), dtype=bool)
    cell = np.float32(SIGMA / SCALE_CELLS)
    off = 0
    turns = -(-n // CHUNK)
    for turn in range(2 * turns):
        for world in (0, 1):
            out = mechanism(bool(world), -(-n // (2 * turns)), turn).numpy()
            counts[turn % 2][world] = counts[turn % 2][world] + Counts.of(out)
            off += off_lattice(out, SIGMA)
            y = np.rint(out.astype(np.float64) / float(cell)).astype(np.int64)
            low[world] += np.bincount(y % 16, minlength=16)
            seen[world, y + 10 * reach] = True
    result = attack(counts[0], counts[1], 1 / SIGMA)
    middle = seen[:, 10 * reach - reach : 10 * reach + reach]
    return {
        **result.to_dict(),
        "releases": sum(c.total for half in counts for c in half),
        "off_lattice": off,
        "cells within 2 sigma seen in one world only": int((middle[0] != middle[1]).sum()),
        "p of y mod 16": float(stats.chi2_contingency(np.array(low)).pvalue),
    }


def run(n: int = 10**7, seed: int = 0) -> dict[str, Any]:
    """All inputs on the lattice; advantage 0 against both tiers, and a win against naive noise."""
    started = time.perf_counter()
    n = max(n, LEAST)
    lattice = lattice_figures(n, seed)
    attacks = {name: against(mechanism, n) for name, mechanism in MECHANISMS.items()}
    ours = [attacks[name] for name in MECHANISMS if name not in BROKEN]
    return {
        "passed": lattice["off_lattice"] == lattice["nan"] == 0
        and all(attacks[name]["advantage"] > 0.05 for name in BROKEN)
        and all(figure["advantage"] == figure["off_lattice"] == 0 for figure in ours)
        and all(figure["cells within 2 sigma seen in one world only"] == 0 for figure in ours)
        and all(figure["p of y mod 16"] > CONFIDENCE for figure in ours),
        "figures": {"lattice": lattice, "attacks": attacks},
        "seconds": round(time.perf_counter() - started, 1),
    }


def headline(figures: dict[str, Any]) -> str:
    """One line for the table."""
    won = [f"{name} {figure['advantage']:.3g}" for name, figure in figures["attacks"].items()]
    return f"{figures['lattice']['off_lattice']} off the lattice; advantage: {', '.join(won)}"


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(run(int(float(sys.argv[1])) if len(sys.argv) > 1 else 10**7), indent=2))
