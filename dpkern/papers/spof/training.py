"""Items of SPOF that train: accuracy over the constant, over epsilon, and the comparison.

Published modes run as printed, divergence included; corrected modes stand beside them. What the
paper leaves open (epsilon grid, learning rate, epochs, order, initial weights, what accuracy is)
are defaults of ours (defect S13). On generated records the numbers say something about the methods,
nothing about the paper's data.

Source: SPOF, section VII, figures 2 and 3, tables of gains and training times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...cost import autoencoder, processors
from ...privacy.accounting import shown_bound
from ..intervals import interval
from ..result import ComparisonRow, Line, Panel, Result
from ..runner import SEEDED, ItemRequest
from ..seeded import Control, with_controls
from . import training_verdicts as verdicts
from .items import CODE, FEATURES, PAPER, SOURCE_EPOCHS, SOURCE_ROWS
from .setting import (
    BASELINE,
    CORRECTED,
    FUNCTIONAL,
    LEARNING_RATE,
    METHODS,
    NON_PRIVATE,
    OURS,
    QUANTITIES,
    Cell,
    Found,
    SpofExperiment,
    condition,
    curve,
    experiment,
    gains,
    train,
)

CONSTANTS = tuple(0.25 * step for step in range(11))
PLATEAU = 0.1
"""Points of accuracy: the sweep is flat from where nothing beyond changes it by as much."""
RATES = (0.0001, 0.001, 0.01, LEARNING_RATE)
TIME_SAVED, OPERATIONS_SAVED = 57.2, 74.0

OPEN = (
    "S13: epsilon grid, learning rate, epochs, order, initial weights and the definition of "
    "accuracy are not published; accuracy here is 100 (1 - mean |x - xhat|) on held-out records",
    "rows show half a 95 % interval over the runs (Student); a run whose logits leave "
    "[-1000, 1000] is stopped, and counts with the weights it had (S2)",
    "corrected DP-SGD splits epsilon over the epochs; corrected SPOF and FM release each record "
    "once",
    *SEEDED,
)


def notes(where: SpofExperiment) -> tuple[str, ...]:
    """Return the notes of every item here, with what is to be known of the records."""
    found = [*OPEN, *where.records.notes]
    if where.records.unproved:
        found.append(f"nothing is certified: {where.records.unproved}")
    return tuple(found)


def fig2(request: ItemRequest) -> Result:
    """Reproduce accuracy over the stabilisation constant, and where it becomes flat."""
    where = experiment(request)
    epsilons = request.epsilons((1.0,) if request.quick else (0.1, 1.0, 10.0))
    names = (OURS, OURS + CORRECTED)
    cells = [
        Cell(name=name, epsilon=epsilon, sigma=sigma, constant=c)
        for sigma in where.sigmas
        for epsilon in epsilons
        for name in names
        for c in CONSTANTS
    ]
    flat = [Cell(name=BASELINE, epsilon=e, sigma=s) for s in where.sigmas for e in epsilons]
    found = train(request, where, [*cells, *flat, Cell(name=NON_PRIVATE)])
    rows, panels = [], []
    begins: list[tuple[Cell, float | str]] = []
    for sigma in where.sigmas:
        lines = []
        for epsilon in epsilons:
            for name in names:
                mine = [
                    found[c]
                    for c in cells
                    if (c.sigma, c.epsilon, c.name) == (sigma, epsilon, name)
                ]
                lines.append(curve(f"{name}, epsilon {shown_bound(epsilon)}", CONSTANTS, mine))
                accuracy = lines[-1].y
                rows.append(_plateau(where, mine[-1], accuracy))
                cell = Cell(name=name, epsilon=epsilon, sigma=sigma)
                begins.append((cell, rows[-1].ours or ""))
                rows += [one.row("fig2", where) for one in mine]
            level = found[Cell(name=BASELINE, epsilon=epsilon, sigma=sigma)]
            rows.append(level.row("fig2", where, setting=f"{level.cell.label}: takes no constant"))
            y = [level.mean.mean] * len(CONSTANTS)
            label = f"{BASELINE}, epsilon {shown_bound(epsilon)}"
            lines.append(Line(label=label, x=CONSTANTS, y=y, level=True))
        panels.append(Panel(title=condition(sigma), x_label="c", y_label="accuracy %", lines=lines))
    rows.sort(key=lambda row: row.quantity != "plateau begins at c")
    title = "accuracy over the stabilisation constant"
    result = _trained("fig2", title, rows, panels, where, found)
    return result.judged(verdicts.of_plateau(where, found, begins))


def _plateau(where: SpofExperiment, last: Found, accuracy: Sequence[float]) -> ComparisonRow:
    """Find the first constant from which on accuracy stays within ``PLATEAU``."""
    begins = next(
        c
        for i, c in enumerate(CONSTANTS)
        if all(abs(later - accuracy[i]) < PLATEAU for later in accuracy[i + 1 :])
    )
    reached = begins < CONSTANTS[-1]
    cell = Cell(name=last.cell.name, epsilon=last.cell.epsilon, sigma=last.cell.sigma)
    return ComparisonRow(
        item="fig2",
        setting=cell.label,
        quantity="plateau begins at c",
        published=where.beside("near 2.5"),
        ours=begins if reached else f"none before {CONSTANTS[-1]:g}",
        data=where.data,
        seeds=where.runs,
        note=f"flat: no later constant changes accuracy by {PLATEAU:g} points",
    )


def grid(where: SpofExperiment) -> list[Cell]:
    """Return the cells of figure 3 and the comparison."""
    return [
        Cell(name=name, epsilon=epsilon, sigma=sigma)
        for sigma in where.sigmas
        for name in METHODS
        for epsilon in ((1.0,) if name == NON_PRIVATE else where.epsilons)
    ]


def fig3(request: ItemRequest) -> Result:
    """Reproduce accuracy over epsilon: non-private, SPOF, DP-SGD, FM, with and without noise."""
    where = experiment(request)
    cells = grid(where)
    found = train(request, where, cells)
    panels = []
    for sigma in where.sigmas:
        for what, names in (
            ("as published", (OURS, BASELINE, FUNCTIONAL)),
            ("corrected", tuple(name + CORRECTED for name in (OURS, BASELINE, FUNCTIONAL))),
        ):
            best = found[Cell(name=NON_PRIVATE, sigma=sigma)].mean.mean
            y = [best] * len(where.epsilons)
            lines = [Line(label=NON_PRIVATE, x=where.epsilons, y=y, level=True)]
            for name in names:
                mine = [found[Cell(name=name, epsilon=e, sigma=sigma)] for e in where.epsilons]
                lines.append(curve(name, where.epsilons, mine))
            panels.append(
                Panel(
                    title=f"{condition(sigma)}, {what}",
                    x_label="epsilon",
                    y_label="accuracy %",
                    lines=lines,
                    log_x=True,
                )
            )
    rows = [found[cell].row("fig3", where, quantity) for quantity in QUANTITIES for cell in cells]
    rows += _untrained("fig3", where)
    said = [_duration(where, found)]
    result = _trained("fig3", "accuracy over epsilon", rows, panels, where, found, said)
    return result.judged([*verdicts.of_claims(where, found), *verdicts.of_orders(where, found)])


def _untrained(item: str, where: SpofExperiment) -> list[ComparisonRow]:
    """Return the rows of constants in the place of a network."""
    return [
        ComparisonRow(
            item=item,
            setting=f"a constant instead of a network: {what}",
            quantity="accuracy %",
            ours=accuracy,
            data=where.data,
        )
        for what, accuracy in _constants(where).items()
    ]


def _constants(where: SpofExperiment) -> dict[str, float]:
    """Return what constants reach that see no record, or only the training records' medians."""
    data = where.records
    medians = data.train.flatten(0, 1).median(0).values
    constants = {"1/2": torch.tensor(0.5), "each feature's median": medians}
    return {
        what: 100 * (1 - float((data.test - constant).abs().double().mean()))
        for what, constant in constants.items()
    }


def comparison(request: ItemRequest) -> Result:
    """Compare the published gains in accuracy and time with ours, with intervals."""
    where = experiment(request)
    found = train(request, where, grid(where))
    rows: list[ComparisonRow] = []
    for sigma in where.sigmas:
        rows += _gain(where, found, sigma)
    for suffix in ("", CORRECTED):
        rows += [_time(where, found, sigma, suffix) for sigma in where.sigmas]
    rows.append(_operations())
    rows += _qualitative(where, found)
    rows += _untrained("comparison", where)
    panels = [_gain_panel(where, found, sigma) for sigma in where.sigmas]
    said = [_why(where, found, sigma) for sigma in where.sigmas]
    said.append(_duration(where, found))
    title = "published gains beside ours"
    result = _trained("comparison", title, rows, panels, where, found, said)
    return result.judged([*verdicts.of_gains(where, found), *verdicts.of_orders(where, found)])


def _duration(where: SpofExperiment, found: Mapping[Cell, Found]) -> str:
    """Return how long the settings took, and what the paper's size would take at this speed."""
    seconds = sum(one.took for one in found.values())
    times = SOURCE_ROWS * SOURCE_EPOCHS / (where.rows * where.epochs)
    return (
        f"training took {seconds:.3g} s for {len(found)} settings of {where.runs} runs; at this "
        f"speed {SOURCE_ROWS} records of each user and {SOURCE_EPOCHS} epochs take "
        f"{seconds * times / 3600:.3g} hours"
    )


def _gain(where: SpofExperiment, found: Mapping[Cell, Found], sigma: float) -> list[ComparisonRow]:
    """Return rows of the mean gain over DP-SGD: relative, as the source's, and in points."""
    rows = []
    kinds = (
        (OURS, BASELINE, "as published", _printed_gain(where, sigma)),
        (OURS + CORRECTED, BASELINE + CORRECTED, "corrected, equal certified epsilon", None),
        (FUNCTIONAL + CORRECTED, BASELINE + CORRECTED, "FM, corrected, over DP-SGD", None),
    )
    for first, second, what, printed in kinds:
        points = interval(gains(found, first, second, sigma, where.epsilons))
        relative = verdicts.relative_gain(found, first, second, sigma)
        own = [found[Cell(name=first, epsilon=e, sigma=sigma)] for e in where.epsilons]
        for quantity, (mean, half), number in (
            ("mean gain, % of DP-SGD's mean", relative, printed),
            ("mean gain, points of accuracy", points, None),
        ):
            rows.append(
                ComparisonRow(
                    item="comparison",
                    setting=f"{'' if 'FM' in what else 'SPOF over DP-SGD, '}{what}, "
                    f"{condition(sigma)}",
                    quantity=quantity,
                    published=None if number is None else where.beside(number),
                    ours=mean,
                    spread=half if math.isfinite(half) else None,
                    data=where.data,
                    seeds=len(where.epsilons) * where.runs,
                    stopped=sum(one.diverged for one in own),
                    collapsed=sum(one.collapsed for one in own),
                    note=f"mean over epsilon {', '.join(shown_bound(e) for e in where.epsilons)}",
                )
            )
    return rows


def _why(where: SpofExperiment, found: Mapping[Cell, Found], sigma: float) -> str:
    """Return what explains the gain, from the runs' own numbers."""
    stopped = {
        name: 100
        * statistics.fmean(
            found[Cell(name=name, epsilon=e, sigma=sigma)].diverged
            / len(found[Cell(name=name, epsilon=e, sigma=sigma)].accuracy)
            for e in where.epsilons
        )
        for name in (OURS, BASELINE)
    }
    if stopped[OURS] > stopped[BASELINE]:
        return (
            f"{condition(sigma)}: step 5's noise at c {where.constant:g} has a scale of hundreds "
            f"over epsilon (Dhat grows with c_j^2, S5) on a loss without lower bound (S2), so "
            f"{stopped[OURS]:.0f} % of SPOF's runs were stopped, against {stopped[BASELINE]:.0f} % "
            f"of DP-SGD's, whose noise has scale {FEATURES} over epsilon without noise of the "
            "environment"
        )
    return (
        f"{condition(sigma)}: what the source leaves open (S13) may move either accuracy by more "
        "than the gain"
    )


def _time(
    where: SpofExperiment, found: Mapping[Cell, Found], sigma: float, suffix: str
) -> ComparisonRow:
    """Return training time per epoch, all runs of a setting together, medians over epsilon.

    Both methods' steps are operations on tensors: only one of them has a kernel for all of a step.
    """
    ours, theirs = (
        statistics.median(
            found[Cell(name=name + suffix, epsilon=e, sigma=sigma)].seconds for e in where.epsilons
        )
        for name in (OURS, BASELINE)
    )
    return ComparisonRow(
        item="comparison",
        setting=f"SPOF against DP-SGD{suffix}, {condition(sigma)}, vectorised trainer: "
        f"{ours:.3g} s and {theirs:.3g} s an epoch",
        quantity="training time saved, %",
        published=None if suffix else where.beside(TIME_SAVED),
        ours=100 * (1 - ours / theirs) if theirs else math.nan,
        data=where.data,
        seeds=where.runs,
        note="57.2 % was measured against DP-SGD of a library, sample by sample; here both are "
        "operations on tensors over all runs at once, on this machine",
    )


def _operations() -> ComparisonRow:
    """Return the cost model's row: section 3's own count."""
    machine = processors.load("k7")
    ours, theirs = (
        machine.price(autoencoder.op_count(system, FEATURES, CODE).counts)
        for system in ("spof", "dpsgd-da")
    )
    return ComparisonRow(
        item="comparison",
        setting=f"perturbation of a record, counted as printed: {ours} and {theirs}",
        quantity="operations saved, %",
        published=OPERATIONS_SAVED,
        ours=100 * (1 - ours / theirs),
        note="S14: dpkern cost compare shows what the count leaves out; it presumes a table of "
        "samples that protects nothing, and with noise that is drawn SPOF costs more",
    )


def _qualitative(where: SpofExperiment, found: Mapping[Cell, Found]) -> list[ComparisonRow]:
    """Return what the paper says in words, as differences in points."""

    def mean(name: str, sigma: float) -> float:
        return statistics.fmean(
            found[Cell(name=name, epsilon=e, sigma=sigma)].mean.mean for e in where.epsilons
        )

    def over_epsilon(name: str) -> float:
        values = [found[Cell(name=name, epsilon=e)].mean.mean for e in where.epsilons]
        return max(values) - min(values)

    noisy = where.sensor_noise
    said = (
        ("FM minus SPOF, noiseless", "below 0", mean(FUNCTIONAL, 0.0) - mean(OURS, 0.0)),
        ("FM minus DP-SGD, noiseless", "below 0", mean(FUNCTIONAL, 0.0) - mean(BASELINE, 0.0)),
        ("FM with noise minus without", "above 0", mean(FUNCTIONAL, noisy) - mean(FUNCTIONAL, 0.0)),
        ("DP-SGD with noise minus without", "below 0", mean(BASELINE, noisy) - mean(BASELINE, 0.0)),
        ("SPOF, largest minus smallest over epsilon", "nearly 0", over_epsilon(OURS)),
    )
    return [
        ComparisonRow(
            item="comparison",
            setting=setting,
            quantity="points of accuracy",
            published=where.beside(claim),
            ours=ours,
            data=where.data,
            seeds=where.runs,
        )
        for setting, claim, ours in said
    ]


def _printed_gain(where: SpofExperiment, sigma: float) -> float:
    return dict(zip(where.sigmas, verdicts.GAINS, strict=True))[sigma]


def _gain_panel(where: SpofExperiment, found: Mapping[Cell, Found], sigma: float) -> Panel:
    lines = []
    for label, suffix in (("as published", ""), ("corrected", CORRECTED)):
        mine = [
            interval(gains(found, OURS + suffix, BASELINE + suffix, sigma, (e,)))
            for e in where.epsilons
        ]
        y, half = [one.mean for one in mine], [one.half for one in mine]
        lines.append(Line(label=label, x=where.epsilons, y=y, half=half))
    return Panel(
        title=f"SPOF over DP-SGD, {condition(sigma)}; published in %: "
        f"{_printed_gain(where, sigma):g}",
        x_label="epsilon",
        y_label="gain, points of accuracy",
        lines=lines,
        log_x=True,
    )


def rates(request: ItemRequest) -> Result:
    """Compare under other learning rates: epsilon 1, noiseless."""
    where = experiment(request)
    names = (NON_PRIVATE, OURS, BASELINE, OURS + CORRECTED, BASELINE + CORRECTED)
    epsilon = request.one_epsilon(1.0)
    cells = [Cell(name=name, epsilon=epsilon, rate=rate) for name in names for rate in RATES]
    found = train(request, where, cells)
    lines = [
        curve(name, RATES, [found[Cell(name=name, epsilon=epsilon, rate=rate)] for rate in RATES])
        for name in names
    ]
    panel = Panel(
        title=f"epsilon {shown_bound(epsilon)}",
        x_label="learning rate",
        y_label="accuracy %",
        lines=lines,
        log_x=True,
    )
    rows = [found[cell].row("rates", where) for cell in cells]
    result = _trained("rates", "accuracy over the learning rate", rows, [panel], where, found)
    return result.judged(verdicts.of_rates())


def _trained(
    item: str,
    title: str,
    rows: Sequence[ComparisonRow],
    panels: Sequence[Panel],
    where: SpofExperiment,
    found: Mapping[Cell, Found],
    said: Sequence[str] = (),
) -> Result:
    size = where.rows, where.epochs
    short: list[str] = []
    if size != (SOURCE_ROWS, SOURCE_EPOCHS):
        short.append(
            f"{size[0]} records of each user, epochs: {size[1]}; the source has {SOURCE_ROWS} "
            f"records and no number of epochs: --rows {SOURCE_ROWS} --epochs {SOURCE_EPOCHS}"
        )
    settings: dict[str, Any] = where.settings()
    told = (*said, *short, *notes(where))
    result = PAPER.result(item, title, rows, panels, told, **settings)
    best = max(
        one.mean.mean for cell, one in found.items() if (cell.name, cell.sigma) == (NON_PRIVATE, 0)
    )
    return with_controls(result, [Control(ours=best, constant=max(_constants(where).values()))])
