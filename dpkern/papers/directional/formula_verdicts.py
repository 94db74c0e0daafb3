"""Verdicts on formulas of the paper on directional noise.

Source: directional noise for DP-SGD, (7)-(16), figures 1 and 2, theorem 2, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..result import ComparisonRow
from ..verdict import FAILS, HOLDS, UNDECIDED, Verdict, exact, of_epsilon, of_order
from . import information
from .utility_subspace import Demonstration

SIGNS = {("t1", "b3"): (-1, 1), ("t6", "b3"): (1, 1)}
"""Printed signs of the derivatives."""


def of_demonstrations(made: Sequence[Demonstration]) -> list[Verdict]:
    """Judge the accuracy and the signs of figure 1 over the seeds."""
    accuracy = [100 * one.accuracy for one in made]
    verdicts = [
        of_order(
            "the network reaches more than 98 %",
            accuracy,
            [98.0] * len(made),
            unit="points above 98, mean of the trained networks",
        )
    ]
    for number, (names, signs) in enumerate(SIGNS.items()):
        right = sum(_as_printed(one.surfaces[number].slopes, signs) for one in made)
        few = len(made) < 5
        words = " and ".join("falls" if sign < 0 else "rises" for sign in signs)
        verdicts.append(
            Verdict(
                claim=f"the cost {words} along {' and '.join(names)}",
                verdict=UNDECIDED if few or 0 < right < len(made) else HOLDS if right else FAILS,
                unit=f"of {len(made)} trained networks",
                ours=float(right),
                low=float(right),
                high=float(right),
                reason="every network has the printed signs"
                if right == len(made)
                else "signs depend on the trained network",
            )
        )
    return verdicts


def _as_printed(slopes: Sequence[tuple[float, float]], signs: tuple[int, int]) -> bool:
    pairs = zip(slopes, signs, strict=True)
    return all(sign * low > 0 and sign * high > 0 for (low, high), sign in pairs)


def of_information() -> list[Verdict]:
    """Judge theorem 2."""
    printed, sharp = information.printed_bound(1.0), information.sharp_bound(1.0)
    return [
        exact(
            "a release of pure epsilon 1 tells at most 0.859 nats",
            sharp <= printed,
            unit="nats, attained by randomized response",
            published=printed,
            ours=sharp,
            reason="by slack: epsilon tanh(epsilon / 2) is enough",
        ),
        exact(
            "the bound speaks of the noise that is added",
            False,
            reason="D6: theorem 2 needs pure epsilon; Gaussian noise is (epsilon, delta)-private",
        ),
    ]


def of_rule(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge the sampling rule at the printed settings, and where there are few steps."""
    verdicts = []
    for few in (False, True):
        own = [row for row in rows if row.setting.startswith("few steps") == few]
        finite = [row for row in own if math.isfinite(row.epsilon_certified or 0.0)]
        worst = max(
            finite, key=lambda row: (row.epsilon_certified or 0) / (row.epsilon_claimed or 1)
        )
        where = "with few steps" if few else "at the printed settings"
        verdicts.append(
            of_epsilon(
                f"(epsilon / q, delta / q) over all steps is (epsilon, delta) {where}; worst: "
                f"{worst.setting.split(':')[-2].strip()}",
                worst.epsilon_claimed or 0.0,
                worst.epsilon_certified or 0.0,
                "D4: no theorem says so",
            )
        )
    return verdicts


def of_kappa(rows: Sequence[ComparisonRow], factor: float) -> list[Verdict]:
    """Judge that (13) is the optimum under the budget."""
    row = rows[1]
    return [
        exact(
            "the noise (13) is the best under the privacy constraint",
            factor <= 1,
            unit="times the budgeted ratio of sensitivity to noise, w normal, d 1000",
            published=1.0,
            ours=factor,
            reason="D1: the worst difference is alpha sqrt(|w| / ||w||_1); with it the optimum is "
            "isotropic for every w",
        ),
        of_epsilon(
            "one release with (13) spends epsilon 2 (w normal, d 1000)",
            row.epsilon_claimed or 0.0,
            row.epsilon_certified or 0.0,
            "D1: its gain in accuracy is privacy that is not paid for",
        ),
    ]


__all__ = ["of_demonstrations", "of_information", "of_kappa", "of_rule"]
