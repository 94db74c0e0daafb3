"""Verdicts on the lecture notes: the noise of private projected SGD, its bound, local channels.

Source: lecture notes on private projected SGD, subsampling and local differential privacy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...privacy.accounting import shown_bound
from ..result import ComparisonRow
from ..verdict import Verdict, exact, of_epsilon, of_order, undecided


def _ours(rows: Sequence[ComparisonRow], *texts: str) -> float:
    """Return the number of the one row whose setting has all texts."""
    (row,) = (row for row in rows if all(text in row.setting for text in texts))
    return float(row.ours or 0.0)


def of_chain(rows: Sequence[ComparisonRow], epsilon: float) -> list[Verdict]:
    """Judge the five steps for n = 1000."""
    total = _ours(rows, "n 1000,", "step 4")
    query = _ours(rows, "n 1000,", "step 1: one query")
    limit = _ours(rows, "n 1000,", "step 1 holds")
    return [
        exact(
            f"the five steps close: sigma gives epsilon {shown_bound(epsilon)} by the notes' own "
            "rules (n 1000)",
            abs(total / epsilon - 1) < 1e-9,
            unit="epsilon",
            published=epsilon,
            ours=total,
        ),
        exact(
            "the simplified amplification is used where it holds",
            query <= limit,
            unit="epsilon of a query before sampling",
            published=limit,
            ours=query,
        ),
    ]


def of_rules(rows: Sequence[ComparisonRow], epsilon: float) -> list[Verdict]:
    """Judge the notes' noise by their own theorems and by a certificate."""
    said = shown_bound(epsilon)
    one = f"n 1000, sigma for epsilon {said},"
    full = _ours(rows, one, "full_advanced")
    notes = next(row for row in rows if one in row.setting and row.setting.endswith("rule notes"))
    accountant = _ours(rows, "sampled Gaussian")
    return [
        of_epsilon(
            f"n^2 steps with the notes' noise spend epsilon {said} (n 1000)",
            notes.epsilon_claimed or 0.0,
            notes.epsilon_certified or 0.0,
        ),
        exact(
            f"advanced composition as the notes use it gives epsilon {said}",
            full <= epsilon,
            unit="epsilon by the theorem with both terms",
            published=epsilon,
            ours=full,
            reason="N1: the second term of advanced composition is left out",
        ),
        exact(
            "a moments accountant gives 1.26 at q .01, z 4, 10^4 steps",
            abs(accountant - 1.26) <= 0.005,
            unit="epsilon, integer orders",
            published=1.26,
            ours=accountant,
        ),
    ]


def of_bound(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge that the utility bound falls with n."""
    first, last = float(rows[0].ours or 0.0), float(rows[-1].ours or 0.0)
    return [
        exact(
            "the bound on the excess of the summed loss does not grow with n but for logarithms",
            last <= first * 4,
            unit="times the bound of the smallest n",
            ours=last / first,
            reason="the loss is a sum, so that a constant bound is an excess of 1 / n for the mean",
        )
    ]


def of_excess(found: Mapping[str, tuple[Sequence[float], float]]) -> list[Verdict]:
    """Judge the utility bound by measured excesses: by loss, the runs and the bound."""
    return [
        of_order(
            f"{loss}: the excess stays below the bound",
            [limit] * len(values),
            values,
            unit="bound minus excess, mean of the runs",
            reason="by a factor of " + f"{limit * len(values) / max(sum(values), 1e-300):.3g}",
        )
        for loss, (values, limit) in found.items()
    ]


def of_plot(strong: float, tight: float, certified: float) -> list[Verdict]:
    """Judge the remark that a moments accountant saves a factor of sqrt(log(n / delta))."""
    return [
        exact(
            "the moments accountant needs less noise than strong composition",
            tight < strong,
            unit="of strong composition's epsilon, n 10^5",
            ours=tight / strong,
            reason=f"certified is {shown_bound(certified)}",
        )
    ]


def of_factor(printed: float, found: float) -> Verdict:
    """Judge the factor that the remark prints."""
    return exact(
        "the factor is sqrt(log(n / delta)) (n 10^5)",
        abs(found / printed - 1) < 0.05,
        unit="the notes' noise over the moments accountant's",
        published=printed,
        ours=found,
        reason="more is saved: N1 and the simplified amplification waste noise as well"
        if found > printed
        else "",
    )


def of_channels(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge probabilities, epsilon and contraction of the channels by their largest error."""
    verdicts = []
    for quantity in dict.fromkeys(row.quantity for row in rows):
        own = [row for row in rows if row.quantity == quantity and row.published is not None]
        if not own:
            continue
        errors = [abs(float(row.ours or 0.0) - float(row.published or 0.0)) for row in own]
        verdicts.append(
            exact(
                f"{quantity}, as printed",
                max(errors) < 1e-12,
                unit="largest error over the channels",
                published=0.0,
                ours=max(errors),
                reason="64-bit thresholds, rounded towards more lying",
            )
        )
    return verdicts


def of_estimator(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge bias and variance of the frequency estimator."""
    bias = max(float(row.ours or 0.0) for row in rows if "bias" in row.quantity)
    ratios = [float(row.ours or 0.0) for row in rows if "variance" in row.quantity]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return [
        exact(
            "the estimator is unbiased",
            bias < 4,
            unit="standard errors, the largest of all categories",
            published=0.0,
            ours=bias,
        ),
        exact(
            "its variance is the theory's",
            abs(worst - 1) < 0.2,
            unit="of the theory's, the farthest",
            published=1.0,
            ours=worst,
        ),
    ]


def of_survey(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge that the error of the share falls as one over the root of the people."""
    own = [row for row in rows if row.setting.startswith("epsilon 1,")]
    ratio = float(own[0].ours or 0.0) / float(own[-1].ours or 1.0)
    people = 1000**0.5
    return [
        exact(
            "the error of the share falls as 1 / sqrt(people)",
            0.5 < ratio / people < 2,
            unit="error with 100 people over that with 100000, epsilon 1, 20 surveys each",
            published=people,
            ours=ratio,
        )
    ]


def of_labels() -> list[Verdict]:
    """Return what the notes leave open about trained models."""
    return [
        undecided(
            "models can be trained on randomized labels",
            "the notes print no accuracy; ours stand in the rows",
        )
    ]


__all__ = [
    "of_bound",
    "of_chain",
    "of_channels",
    "of_estimator",
    "of_excess",
    "of_factor",
    "of_labels",
    "of_plot",
    "of_rules",
    "of_survey",
]
