"""Verdicts on GReDP's theorems.

Source: GReDP, theorems 1 to 3, corollary 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..result import ComparisonRow
from ..verdict import Verdict, exact, of_epsilon

TOLERANCE = 0.02
"""Relative error of a variance of 200,000 draws, six times its standard error."""


def of_variance(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge the variance of the real part by kind of noise, at the index where it is farthest."""
    verdicts = []
    own = [row for row in rows if row.quantity.startswith("variance") and row.published is not None]
    for kind in dict.fromkeys(row.setting.split(" (")[0] for row in own):
        same = [row for row in own if row.setting.startswith(f"{kind} (")]
        worst = max(same, key=lambda row: abs(_ours(row) - 0.5))
        index = worst.setting.rsplit(" ", 1)[-1]
        holds = abs(_ours(worst) - 0.5) <= 0.5 * TOLERANCE
        verdicts.append(
            exact(
                f"{kind} noise leaves variance (c sigma)^2 / 2 at every index",
                holds,
                unit=f"(c sigma)^2 at index {index}, simulated",
                published=0.5,
                ours=_ours(worst),
                half=worst.spread or 0.0,
                reason="" if holds else "G5: an index that is its own mirror has another variance",
            )
        )
    mirrored = next(row for row in rows if row.quantity == "correlation" and "real" in row.setting)
    verdicts.append(
        exact(
            "real noise leaves independent entries",
            abs(_ours(mirrored)) <= TOLERANCE,
            unit="correlation of mirrored entries",
            published=0.0,
            ours=_ours(mirrored),
            half=mirrored.spread or 0.0,
            reason="G1: mirrored entries share their noise; their difference is released exactly",
        )
    )
    return verdicts


def of_checks(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge theorem 3 and the claims of whole trainings."""
    verdicts = [
        of_epsilon(
            row.setting.split(":")[0],
            row.epsilon_claimed or 0.0,
            row.epsilon_certified or 0.0,
            "G2" if "theorem" in row.setting else "G2, G3",
            rounding=5e-4,
        )
        for row in rows
        if row.epsilon_claimed is not None and not row.setting.startswith("plain")
    ]
    printed = [_ours(row) for row in rows if row.setting.startswith("corollary 2")]
    verdicts.append(
        exact(
            "corollary 2 has one formula for sigma",
            abs(printed[0] - printed[1]) < 1e-9,
            unit="sigma of the text's formula; the appendix' is beside it",
            published=printed[1],
            ours=printed[0],
            reason="G7: the root stands in two places, 1.24 where the theorem has 1.25, and the "
            "conversion is read backwards",
        )
    )
    return verdicts


def _ours(row: ComparisonRow) -> float:
    return float(row.ours or 0.0)


__all__ = ["of_checks", "of_variance"]
