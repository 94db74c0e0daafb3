"""Verdicts on what the paper on directional noise prints of its trainings.

Source: directional noise for DP-SGD, tables 1 and 2, figures 3 to 6 and their text.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol

from ...privacy.accounting import shown_bound
from ..intervals import interval
from ..result import ComparisonRow
from ..seeded import SeededRuns
from ..verdict import Verdict, of_epsilon, of_number, of_order, undecided
from .cases import ADACLIP, CASES, GAUSSIAN, ISOTROPIC, OURS, PLAIN

DIFFERENCE = "points held out, mean over the seeds"
ORDER = {
    "MNIST": (OURS, ISOTROPIC, GAUSSIAN, ADACLIP),
    "SVHN": (ISOTROPIC, OURS, GAUSSIAN),
    "CIFAR-10": (ISOTROPIC, OURS, GAUSSIAN),
}
WHY = {
    OURS: "D1: noise shaped by w spends kappa^2 times its budget in its worst direction, and w "
    "itself is released from sums of samples",
    ISOTROPIC: "D4: the rule (epsilon / q, delta / q) is no theorem",
    GAUSSIAN: "",
    ADACLIP: "",
}


class Trained(Protocol):
    """One training of a figure."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def x(self) -> float: ...
    @property
    def runs(self) -> SeededRuns: ...
    @property
    def hindrance(self) -> str: ...
    @property
    def source_hindrance(self) -> str: ...
    @property
    def accuracy_hindrance(self) -> str: ...
    @property
    def row(self) -> ComparisonRow: ...


def claims(found: Sequence[Trained]) -> list[Verdict]:
    """Judge the claimed epsilon of every generator at the least epsilon of each data set."""
    first: dict[tuple[str, str], Trained] = {}
    for one in found:
        pruned = ", pruned" if one.runs.cell.mechanism.name == "pruned" else ""
        if one.kind != PLAIN:
            first.setdefault((one.name, one.kind + pruned), one)
    return [
        of_epsilon(
            f"{name}, {kind}: the run spends epsilon {shown_bound(one.epsilon)}",
            one.epsilon,
            one.runs.certified,
            "D5: the mask of pruning follows the samples"
            if kind.endswith(", pruned")
            else WHY.get(kind, WHY[OURS] if kind.startswith("Ours") else ""),
        )
        for (name, kind), one in first.items()
    ]


def unperturbed(found: Sequence[Trained]) -> list[Verdict]:
    """Judge the printed accuracy without noise."""
    return [
        of_number(
            f"{one.name}: training without noise reaches {CASES[one.name].plain:g} %",
            CASES[one.name].plain,
            interval(one.runs.last),
            len(one.runs.last),
            unit="% held out after the last epoch, mean of the runs",
            rounding=0.005,
            at_least=True,
            hindrance=one.hindrance,
        )
        for one in found
        if one.kind == PLAIN
    ]


def orders(found: Sequence[Trained]) -> list[Verdict]:
    """Judge the printed order of generators, over the mean of all epsilons."""
    verdicts = []
    for name in dict.fromkeys(one.name for one in found):
        for better, worse in zip(ORDER[name], ORDER[name][1:], strict=False):
            own, rival = (
                [one for one in found if (one.name, one.kind) == (name, kind)]
                for kind in (better, worse)
            )
            if not own or not rival:
                continue
            hindrance = next((one.hindrance for one in (*own, *rival) if one.hindrance), "")
            verdicts.append(
                of_order(
                    f"{name}: {better} is more accurate than {worse}, equal claimed epsilon",
                    _means(own),
                    _means(rival),
                    unit=f"{DIFFERENCE} and epsilon",
                    hindrance=hindrance,
                )
            )
    return verdicts


def _means(found: Sequence[Trained]) -> list[float]:
    """Return each seed's mean over the trainings."""
    return [statistics.fmean(each) for each in zip(*(one.runs.last for one in found), strict=True)]


def numbers(found: Sequence[Trained]) -> list[Verdict]:
    """Judge the accuracies that the text prints for single settings."""
    by_place = {(one.name, one.kind, one.epsilon): one for one in found}
    verdicts = []
    ours, usual = (by_place.get(("MNIST", kind, 0.2)) for kind in (OURS, GAUSSIAN))
    if ours and usual:
        verdicts.append(
            of_order(
                "MNIST, epsilon .2: Ours is more accurate than Gaussian noise (by up to 9 points)",
                ours.runs.last,
                usual.runs.last,
                unit=DIFFERENCE,
                published=9.0,
                hindrance=ours.hindrance or usual.hindrance,
            )
        )
    one = by_place.get(("SVHN", ISOTROPIC, 5.0))
    if one:
        verdicts.append(
            of_number(
                "SVHN, epsilon 5: Ours (w=1) reaches 92.47 %",
                92.47,
                interval(one.runs.last),
                len(one.runs.last),
                unit="% held out",
                rounding=0.005,
                at_least=True,
                hindrance=one.accuracy_hindrance,
            )
        )
    one = by_place.get(("SVHN", GAUSSIAN, 5.0))
    if one:
        verdicts.append(
            of_order(
                "SVHN, epsilon 5: Gaussian noise stays below 40 %",
                [40.0] * len(one.runs.last),
                one.runs.last,
                unit="points below 40, mean over the seeds",
                hindrance=one.accuracy_hindrance,
            )
        )
    gains = [
        (by_place.get(("CIFAR-10", kind, epsilon)))
        for epsilon in (15.0, 1.0)
        for kind in (ISOTROPIC, GAUSSIAN)
    ]
    if all(gains):
        wide, narrow = (
            [a - b for a, b in zip(ours.runs.last, usual.runs.last, strict=True)]
            for ours, usual in (gains[:2], gains[2:])
            if ours and usual
        )
        verdicts.append(
            of_order(
                "CIFAR-10: the gain over Gaussian noise is larger at epsilon 15 than at 1",
                wide,
                narrow,
                unit=DIFFERENCE,
                hindrance=next((each.hindrance for each in gains if each), ""),
            )
        )
    return verdicts


def drops(found: Sequence[Trained]) -> list[Verdict]:
    """Judge that accuracy on SVHN falls around epoch 25 of 30."""
    verdicts = []
    own = [one for one in found if one.name == "SVHN" and one.kind == ISOTROPIC]
    for one in own[-1:]:
        runs = [run for run in one.runs.accuracy if len(run) >= 25]
        if runs:
            verdicts.append(
                of_order(
                    "SVHN, Ours (w=1): accuracy drops around epoch 25",
                    [max(run[:23]) for run in runs],
                    [min(run[23:27]) for run in runs],
                    unit="points, best before epoch 24 minus least of 24 to 27, mean of the runs",
                    hindrance=one.hindrance,
                )
            )
    return verdicts


def of_epochs(found: Sequence[Trained]) -> list[Verdict]:
    """Return the verdicts on figure 3."""
    return [*claims(found), *unperturbed(found), *orders(found), *drops(found)]


def of_epsilons(found: Sequence[Trained]) -> list[Verdict]:
    """Return the verdicts on figure 4."""
    return [*claims(found), *orders(found), *numbers(found)]


def of_lots_and_pruning(found: Sequence[Trained]) -> list[Verdict]:
    """Return the verdicts on figure 5, whose last panel is about pruning."""
    by_lot = [one for one in found if ", lot " in one.row.setting]
    by_ratio = [one for one in found if ", pruned " in one.row.setting]
    return [*claims(found), *of_lots(by_lot), *of_small_lots(by_lot), *of_pruning(by_ratio)]


def of_bounds(found: Sequence[Trained]) -> list[Verdict]:
    """Return the verdicts on figure 6."""
    return [*claims(found), *of_clips(found)]


def of_times(times: Mapping[str, float], printed: Mapping[str, float]) -> list[Verdict]:
    """Return verdicts on times of a step, which other hardware and software measure anew."""
    usual = times[GAUSSIAN]
    return [
        undecided(
            f"a step with {kind} takes {seconds / printed[GAUSSIAN]:.2f} times one with Gaussian "
            "noise",
            "printed for TensorFlow on one GPU; the ratio is that of two implementations",
            unit="of the time with Gaussian noise, median of the steps",
            ours=times[kind] / usual,
        )
        for kind, seconds in printed.items()
        if kind != GAUSSIAN
    ]


def of_lots(found: Sequence[Trained]) -> list[Verdict]:
    """Judge that larger lots help, where the text says so."""
    verdicts = []
    for name, kind in dict.fromkeys((one.name, one.kind) for one in found):
        own = [one for one in found if (one.name, one.kind) == (name, kind)]
        verdicts.append(
            of_order(
                f"{name}, {kind}: the largest lot is more accurate than the smallest",
                own[-1].runs.last,
                own[0].runs.last,
                unit=DIFFERENCE,
                hindrance=own[0].hindrance or own[-1].hindrance,
            )
        )
    return verdicts


def of_small_lots(found: Sequence[Trained]) -> list[Verdict]:
    """Judge the accuracy that the text gives for SVHN with lots of 512."""
    return [
        of_number(
            f"SVHN, {one.kind}, lot 512: about 20 %",
            20.0,
            interval(one.runs.last),
            len(one.runs.last),
            unit="% held out, mean over the seeds",
            rounding=2.5,
            hindrance=one.accuracy_hindrance,
        )
        for one in found
        if (one.name, one.x) == ("SVHN", 512.0) and one.kind in (OURS, GAUSSIAN)
    ]


def of_pruning(found: Sequence[Trained]) -> list[Verdict]:
    """Judge that most coordinates may be left out, but for Ours, which then does not converge."""
    verdicts = []
    for kind in dict.fromkeys(one.kind for one in found):
        last = [one for one in found if one.kind == kind][-1]
        learned = last.runs.last
        bar = [2 * 100 / last.runs.cell.setting.data.classes] * len(learned)
        fails = kind == OURS
        verb, side = ("does not converge", "below") if fails else ("converges", "above")
        verdicts.append(
            of_order(
                f"{last.name}, {kind}: training {verb} with {last.x:.0%} of the coordinates "
                "left out",
                *((bar, learned) if fails else (learned, bar)),
                unit=f"points {side} twice chance",
                # A run that collapsed is one that does not converge.
                hindrance=last.source_hindrance if fails else last.hindrance,
            )
        )
    return verdicts


def of_clips(found: Sequence[Trained]) -> list[Verdict]:
    """Judge that accuracy falls where the clip bound grows."""
    verdicts = []
    for name, kind in dict.fromkeys((one.name, one.kind) for one in found):
        if name == "SVHN" and kind != GAUSSIAN:
            continue  # said to be flat there
        own = [one for one in found if (one.name, one.kind) == (name, kind)]
        before = [one for one in own if one.x <= 0.1] or own[:1]
        verdicts.append(
            of_order(
                f"{name}, {kind}: accuracy falls beyond alpha {before[-1].x:g}",
                before[-1].runs.last,
                own[-1].runs.last,
                unit=DIFFERENCE,
                hindrance=own[0].hindrance or own[-1].hindrance,
            )
        )
    return verdicts


__all__ = [
    "claims",
    "drops",
    "numbers",
    "of_bounds",
    "of_clips",
    "of_epochs",
    "of_epsilons",
    "of_lots",
    "of_lots_and_pruning",
    "of_pruning",
    "of_small_lots",
    "of_times",
    "orders",
    "unperturbed",
]
