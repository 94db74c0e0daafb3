"""Verdicts on SPOF's formulas: polynomials, sensitivities, multipliers of the environment.

Source: SPOF, (4)-(12), (24)-(33), (46)-(58), figures 4 to 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..result import ComparisonRow
from ..verdict import Verdict, exact, of_epsilon, undecided


def _ours(row: ComparisonRow) -> float:
    return float(row.ours or 0.0)


def _largest(rows: Sequence[ComparisonRow], *texts: str) -> float:
    """Return the largest number of the rows whose setting and quantity have all texts."""
    return max(
        _ours(row)
        for row in rows
        if all(text in f"{row.setting}; {row.quantity}" for text in texts)
    )


def of_losses(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge the printed polynomial and its rewriting."""
    rewriting = next(row for row in rows if "(31)" in row.setting)
    far = _largest(rows, "printed polynomial at x 0, z 10")
    return [
        exact(
            "(9)-(12) is Taylor's polynomial of the cross-entropy",
            False,
            unit="loss at x 0, z 10, where the cross-entropy is 10",
            ours=far,
            reason="S1: the sign of the second derivative and Taylor's 1/2 are lost",
        ),
        exact(
            "training minimises the printed loss",
            False,
            reason="S2: it has no lower bound for x < 1/2",
        ),
        exact(
            "the error of the polynomial has a bound by proposition 1",
            False,
            reason="S3: it asks for a bound on all derivatives, which grow without limit; "
            "min(d^3 / (36 sqrt 3), d^4 / 192) holds instead",
        ),
        exact(
            "(31) is the stabilised loss",
            abs(_ours(rewriting)) < 1e-6,
            unit="difference on a random record",
            published=0.0,
            ours=_ours(rewriting),
            reason="S5: a wrong factor and a lost term",
        ),
    ]


def of_curves(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge every number that figure 6 prints, and the definition behind it."""
    verdicts = []
    for row in rows:
        if not isinstance(row.published, float):
            continue
        digits = len(f"{row.published:g}".partition(".")[2])
        verdicts.append(
            exact(
                f"{row.setting}: {row.quantity} {row.published:g}",
                abs(_ours(row) - row.published) <= 0.5001 * 10.0**-digits,
                unit=row.quantity,
                published=row.published,
                ours=_ours(row),
                reason=row.note,
            )
        )
    at = next(row for row in rows if row.setting == "(57), minimum")
    verdicts.append(
        exact(
            "the sensitivity (57) is smallest at a = 0.9057",
            False,
            unit="a",
            published=0.9057,
            ours=_ours(at),
            reason="S11: the definition is smallest at a = 0; (58) makes a ratio of a sum",
        )
    )
    return verdicts


def of_audit(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge the printed epsilon of step 5, and the attack on what is trained from it."""
    verdicts = [
        of_epsilon(row.setting, row.epsilon_claimed or 0.0, _ours(row), row.note)
        for row in rows
        if row.setting.startswith("step 5")
    ]
    steep = [row for row in rows if row.quantity == "log ratio"][-1]
    verdicts.append(
        of_epsilon(
            "step 5 spends epsilon 1 with c_j from the record itself",
            1.0,
            steep.epsilon_certified or 0.0,
            f"S6: the ratio of densities has no bound, its log is {_ours(steep):.3g} at 10^5",
        )
    )
    attack = rows[-1]
    allowed = float(attack.published or 0.0)
    verdicts.append(
        exact(
            "a record among two is guessed from a published gradient at most 73 times in 100",
            _ours(attack) <= allowed,
            unit=f"share of {attack.data} guessed right",
            published=allowed,
            ours=_ours(attack),
            half=attack.spread or 0.0,
            reason="S7: the gradient's direction is the code, without noise",
        )
    )
    return verdicts


def of_density(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge the density of the largest multiplier."""
    printed, correct = (
        _largest(rows, f"{form} density", "deviation") for form in ("printed", "correct")
    )
    varies = _largest(rows, "correct, h", "decades")
    return [
        exact(
            "(50)-(53) is the density of a multiplier",
            printed < 3,
            unit="% from simulated draws, the farthest bin",
            published=0.0,
            ours=printed,
            reason=f"S9: the inverse of another map for h > 0; correct is {correct:.2g} % off",
        ),
        exact(
            "the density of b_max hardly varies with h",
            varies < 0.3,
            unit="decades between h and 0, the farthest",
            ours=varies,
            reason="S9: the support ends at l / h, where the density rises without limit",
        ),
    ]


def of_bmax(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge that the largest multiplier is at most 1 half of the time."""
    best = _largest(rows, "sigma", "log10 of F_bmax(1)")
    return [
        exact(
            "Pr[b_max < 1] >= 1/2",
            best >= math.log10(0.5),
            unit="log10 of the probability, the largest over sigma",
            published=math.log10(0.5),
            ours=best,
            reason="S10: below 2^-100 for every sigma; only one copy and one code unit reach 1/2",
        )
    ]


def of_multipliers(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge that a multiplier is below 1 half of the time."""
    own = [row for row in rows if row.setting.startswith("b_j < 1")]
    most = max(own, key=_ours)
    best = _ours(most)
    return [
        exact(
            "Pr[b_j < 1] >= 1/2",
            best >= 0.5,
            unit="probability, the largest over sigma and encoders, simulated",
            published=0.5,
            ours=best,
            half=most.spread or 0.0,
            reason="S10: every projection of the noise must be negative, at most 2^-7",
        )
    ]


def of_diagram() -> list[Verdict]:
    """Return what the architecture claims."""
    return [
        undecided(
            "m users train one decoder, each with a record of its own",
            "a diagram; in the authors' released code both encoders see the same record",
        )
    ]


__all__ = [
    "of_audit",
    "of_bmax",
    "of_curves",
    "of_density",
    "of_diagram",
    "of_losses",
    "of_multipliers",
]
