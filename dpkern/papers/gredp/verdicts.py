"""Verdicts on what GReDP prints: its accuracies, their order, its noise, its epsilon.

Source: GReDP, tables I, VII and VIII, figures 3 to 5, theorems 1 to 3, corollary 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...privacy.accounting import shown_bound
from ..intervals import interval
from ..verdict import Verdict, of_epsilon, of_number, of_order
from .cells import TrainedCell
from .published import EARLY, EARLY_AT, PASSES, SAME, VARIED_AT

UNIT = "% held out, mean of the runs"
DIFFERENCE = "points held out, mean over the seeds"


def accuracies(found: Sequence[TrainedCell]) -> list[Verdict]:
    """Judge every printed accuracy by the interval of our runs on the same data."""
    return [
        of_number(
            f"{one.cell.what}: accuracy {one.cell.printed:g} %",
            one.cell.printed,
            interval(one.runs.last),
            len(one.runs.last),
            unit=UNIT,
            rounding=0.005,
            hindrance=one.accuracy_hindrance,
            reason="epochs, initial weights and preprocessing are not printed (G8)",
        )
        for one in found
        if one.cell.printed is not None
    ]


def orders(found: Sequence[TrainedCell]) -> list[Verdict]:
    """Judge the printed order of methods, and that GReDP is more than DP-SGD with less noise."""
    by_cell = {(one.cell.name, one.cell.method, one.cell.epsilon): one for one in found}
    verdicts = []
    for (name, method, epsilon), one in by_cell.items():
        if method != "GReDP":
            continue
        for other in ("Spectral-DP", "DP-SGD", SAME):
            rival = by_cell.get((name, other, epsilon))
            if rival is None:
                continue
            printed = None
            if one.cell.printed is not None and rival.cell.printed is not None:
                printed = one.cell.printed - rival.cell.printed
            verdicts.append(
                of_order(
                    f"{name}: GReDP is more accurate than {other}, equal claimed epsilon "
                    f"{shown_bound(epsilon)}",
                    one.runs.last,
                    rival.runs.last,
                    unit=DIFFERENCE,
                    published=printed,
                    hindrance=one.hindrance or rival.hindrance,
                    reason="" if other == SAME else _noise(one, rival),
                )
            )
    return verdicts


def _noise(one: TrainedCell, rival: TrainedCell) -> str:
    return (
        f"certified are {shown_bound(one.runs.certified)} and {shown_bound(rival.runs.certified)}: "
        "published GReDP adds half the variance to layers that are clipped one by one (G2, G3)"
    )


def claims(found: Sequence[TrainedCell]) -> list[Verdict]:
    """Judge the claimed epsilon of every method, once for each model."""
    first: dict[tuple[str, str], TrainedCell] = {}
    for one in found:
        if one.cell.method not in ("plain", SAME):
            first.setdefault((one.cell.name, one.cell.method), one)
    return [
        of_epsilon(
            f"{name}, {method}: the run spends epsilon {shown_bound(one.cell.epsilon)}",
            one.cell.epsilon,
            one.runs.certified,
            ""
            if method == "DP-SGD"
            else "G2, G3: the multiplier is sigma / sqrt(2) and every layer has the whole bound",
        )
        for (name, method), one in first.items()
    ]


def of_table(found: Sequence[TrainedCell]) -> list[Verdict]:
    """Return the verdicts on a table of accuracies."""
    return [*claims(found), *orders(found), *accuracies(found)]


def of_clipping(found: Sequence[TrainedCell]) -> list[Verdict]:
    """Return the verdicts on a table over the clipping norm."""
    return [*claims(found), *accuracies(found)]


def of_dynamics(found: Sequence[TrainedCell]) -> list[Verdict]:
    """Return the verdicts on figure 3."""
    return [*of_table(found), *dynamics(found)]


def dynamics(found: Sequence[TrainedCell]) -> list[Verdict]:
    """Judge what the text reads off figure 3: accuracies early in a run, epochs to an accuracy."""
    last = {(one.cell.name, one.cell.method): one for one in found if one.cell.epsilon == VARIED_AT}
    verdicts = []
    for method, printed in EARLY.items():
        one = last.get(("LeNet-5", method))
        if one is not None:
            spent = one.spent()
            epoch = min(range(len(spent)), key=lambda place: abs(spent[place] - EARLY_AT))
            early = [run[epoch] for run in one.runs.accuracy]
            verdicts.append(
                of_number(
                    f"LeNet-5, {method}: {printed:g} % where epsilon {shown_bound(EARLY_AT)} "
                    f"is spent of {shown_bound(VARIED_AT)}",
                    printed,
                    interval(early),
                    len(early),
                    unit=f"{UNIT}, after epoch {epoch + 1}, epsilon {shown_bound(spent[epoch])}",
                    rounding=0.005,
                    hindrance=one.accuracy_hindrance,
                )
            )
    for (method, accuracy), epochs in PASSES.items():
        one = last.get(("Model-3", method))
        if one is not None:
            needed = [_passes(run, accuracy) for run in one.runs.accuracy]
            never = "" if all(map(math.isfinite, needed)) else f"a run stays below {accuracy:g} %"
            verdicts.append(
                of_number(
                    f"Model-3, {method}: passes {accuracy:g} % in epoch {epochs}",
                    float(epochs),
                    interval([each for each in needed if math.isfinite(each)]),
                    len(needed),
                    unit="epochs, mean of the runs",
                    rounding=0.5,
                    hindrance=one.accuracy_hindrance or never,
                )
            )
    return verdicts


def _passes(run: Sequence[float], accuracy: float) -> float:
    """Return the first epoch after which a run is above an accuracy; infinite for none."""
    return next((epoch for epoch, each in enumerate(run, start=1) if each > accuracy), math.inf)


def falls(what: str, found: Sequence[TrainedCell], printed: float | None) -> Verdict:
    """Judge that accuracy falls from the first to the last cell of a model's curve."""
    first, last = found[0], found[-1]
    return of_order(
        f"{first.cell.name}: accuracy falls with {what}",
        first.runs.last,
        last.runs.last,
        unit=DIFFERENCE,
        published=printed,
        hindrance=first.hindrance or last.hindrance,
    )


def of_figures(
    found: Sequence[TrainedCell], what: str, printed: Mapping[str, float]
) -> list[Verdict]:
    """Return the verdicts on a figure over batch size or learning rate.

    Args:
        found: cells of every model, in the order of what the figure varies.
        what: what that is.
        printed: points that the source prints between the first and the last one, by model.
    """
    curves = {
        name: [one for one in found if one.cell.name == name]
        for name in dict.fromkeys(one.cell.name for one in found)
    }
    fallen = [falls(what, own, printed.get(name)) for name, own in curves.items()]
    return [*fallen, *claims(found), *accuracies(found)]


__all__ = [
    "accuracies",
    "claims",
    "dynamics",
    "falls",
    "of_clipping",
    "of_dynamics",
    "of_figures",
    "of_table",
    "orders",
]
