"""Items of AdLM that train: accuracy of AdLM, ILM and pSGD over epsilon and over epochs.

All runs of a setting are trained together; pSGD is DP-SGD through the engine, on the same network
without min-max normalisation, which mixes the samples of a batch.

Source: AdLM, figures 4 and 5, section on experiments.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ...engine.allocator import keep_freed_pages
from ...nn.normalise import BatchMinMax
from ...objective.adlm import AdlmSchedule, build, monte_carlo, relevance_of
from ...objective.adlm import setting as sizes
from ...ops import update
from ...privacy import accounting
from ...privacy.accounting import shown_bound
from ...privacy.mechanisms import DPSGD, ILM, AdLM
from ...train.data import Dataset
from .. import intervals, runner
from ..figure import withheld
from ..pieces import CachedRun, OnStep
from ..result import ComparisonRow, Line, Panel, Result
from ..runner import ItemRequest
from . import setup as adlm_world
from . import verdicts
from .methods import METHODS, READINGS
from .published import GAINS, MEANS, PLAIN, PRINTED, PSGD
from .setup import CIFAR10, DELTA, MNIST, AdlmExperiment, ExperimentSetup

NOTES = (
    "claimed epsilon is the same for all methods of a row's epsilon; certified is what is proved: "
    "one record's, local and pure for AdLM and ILM, of the whole run at delta 1e-5 for pSGD",
    "AdLM as printed takes relevances from a network trained without noise on the same records "
    "(A2), so nothing is certified; corrected, relevances are those of public records",
    "optimiser, rate, number of epochs, pooling and the split of epsilon are not printed; here "
    "thirds, Adam (as the authors' code has), fewer epochs than the source's 500 and 800 unless "
    "--epochs is given",
    "printed scales are divided by |L|: fewer records have smaller batches, hence more noise than "
    "at the source's size",
    "pSGD: no min-max normalisation, for it mixes the samples of a batch",
    "shorter lengths are earlier epochs of the same runs: noise that is released once does not "
    "depend on them, that of pSGD is calibrated to the whole run",
    "tests: paired t over the seeds, which share initial weights and batches",
    *runner.SEEDED,
)


def fig4(request: ItemRequest) -> Result:
    """Reproduce the accuracies on MNIST."""
    return _figure("fig4", MNIST, request)


def fig5(request: ItemRequest) -> Result:
    """Reproduce the accuracies on CIFAR-10."""
    return _figure("fig5", CIFAR10, request)


def _figure(item: str, experiment: AdlmExperiment, request: ItemRequest) -> Result:
    here = adlm_world.world(experiment, request)
    epsilons = request.epsilons(experiment.quick_epsilons if request.quick else experiment.epsilons)
    seeds = request.repeats(2 if request.quick else 5)
    names = [*METHODS, PSGD]
    cells = [(PLAIN, math.inf), *((name, e) for e in epsilons for name in names)]
    with adlm_world.one_thread():
        found = trained(request, [partial(piece, here, request, *cell) for cell in cells], seeds)
    numbers = dict(zip(cells, found, strict=True))
    rows = [row(item, here, *cell, numbers[cell]) for cell in cells]
    # The source has curves over epochs at these epsilons.
    curved = (math.inf, *curves(experiment, epsilons))
    for cell in cells:
        rows += earlier(item, here, *cell, numbers[cell]) if cell[1] in curved else []
    rows += _tests(item, here, numbers, epsilons, printed=request.epsilon is None)
    judged = verdicts.of_figure(
        verdicts.JudgedFigure(
            experiment=experiment,
            same_data=here.same_data,
            data=here.private.source,
            epochs=here.epochs,
            departure=request.departure(
                batch_size=experiment.batch, max_grad_norm=experiment.clip, delta=DELTA
            )
            or ("" if request.epsilon is None else "other epsilons than the source's"),
            numbers=numbers,
            epsilons=epsilons,
            averaged=averaged(experiment.name, epsilons),
        )
    )
    result = Result(
        paper="adlm",
        item=item,
        title=f"accuracy in the source's {experiment.name} setting",
        rows=rows,
        panels=_panels(here, numbers, epsilons),
        notes=NOTES,
        settings={
            "quick": request.quick,
            "records": len(here.private.x),
            "batch": here.batch,
            "lot": here.lot,
            "epochs": here.epochs,
            "learning_rate": here.lr,
            "architecture": str(here.architecture),
            "delta": here.delta,
            "seeds": seeds,
        },
        verdicts=judged,
    )
    return with_control(result, here, numbers[PLAIN, math.inf])


def trained(
    request: ItemRequest, makers: Sequence[Callable[[range], CachedRun]], seeds: int
) -> list[Mapping[str, Any]]:
    """Train what every maker makes for the seeds, and return the numbers of all seeds together.

    Quick runs train the seeds together, which is faster for small networks. Others train and keep
    each seed by itself.
    """
    step = seeds if request.quick else 1
    groups = [range(first, first + step) for first in range(0, seeds, step)]
    keep_freed_pages()
    # Every maker's first group comes first: an interrupted item then has one seed of everything.
    found = request.through([make(group) for group in groups for make in makers])
    return [_joined(found[place :: len(makers)]) for place in range(len(makers))]


def _joined(parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the numbers of several groups of seeds as those of one."""
    return {
        **parts[0],
        "accuracy": [run for part in parts for run in part["accuracy"]],
        **{name: sum(part[name] for part in parts) for name in ("diverged", "collapsed")},
    }


def piece(
    here: ExperimentSetup, request: ItemRequest, name: str, epsilon: float, seeds: range
) -> CachedRun:
    """Return the training of a method with these seeds."""
    steps = here.epochs * (len(here.private.x) // (here.lot if name == PSGD else here.batch))
    key = {
        "paper": "adlm",
        "experiment": here.experiment.name,
        "data": here.private.source,
        "records": len(here.private.x),
        "held_out": len(here.private.x_test),
        "digest": here.digest,
        "architecture": str(here.architecture),
        "method": name,
        "epsilon": epsilon,
        "settings": {**METHODS, **READINGS}.get(name, {}),
        "seeds": list(seeds),
        "batch": here.lot if name == PSGD else here.batch,
        "epochs": here.epochs,
        "lr": here.psgd_lr if name == PSGD else here.lr,
        "clip": here.experiment.clip if name == PSGD else None,
        "delta": here.delta if name == PSGD else None,
        "shares": here.shares,
        "quick": request.quick,
        **numbers_of_network(here, request),
    }

    def compute(on_step: OnStep) -> Mapping[str, Any]:
        if name == PSGD:
            return _gradients(here, epsilon, seeds, on_step)
        return _objective(here, request, name, epsilon, seeds, on_step)

    label = f"{name}, epsilon {shown_bound(epsilon)}{named(seeds)}"
    return CachedRun(label=label, key=key, compute=compute, steps=len(seeds) * steps)


def named(seeds: range) -> str:
    """Return the seed of a label; empty for several."""
    return f", seed {seeds[0]}" if len(seeds) == 1 else ""


def numbers_of_network(here: ExperimentSetup, request: ItemRequest) -> dict[str, Any]:
    """Return what the numbers of a run depend on besides its own settings."""
    trained = request.number("pretraining_epochs", here.experiment.pretraining)
    return {
        "pretraining": trained,
        **({} if here.device.type == "cpu" else {"device": str(here.device)}),
    }


def mechanism(here: ExperimentSetup, name: str, epsilon: float) -> AdLM:
    """Return the mechanism of one of ``METHODS``, or the one without noise."""
    network = build(here.architecture, here.private.row_shape, here.private.classes, seed=0)
    of = sizes(
        network,
        here.private.row_shape,
        records=len(here.private.x),
        batch=here.batch,
        name=here.experiment.name,
    )
    kind = AdLM if name.startswith("AdLM") else ILM
    options = {**METHODS, **READINGS}.get(name, {})
    return kind(epsilon=epsilon, setting=of, shares=here.shares, **options)


def _objective(
    here: ExperimentSetup,
    request: ItemRequest,
    name: str,
    epsilon: float,
    seeds: range,
    on_step: OnStep,
) -> Mapping[str, Any]:
    made = mechanism(here, name, epsilon)
    relevance = None
    if made.adaptive:
        data = here.public if made.relevance_from == "public" else here.private
        public = made.relevance_from != "trained_on_data"
        relevance = relevance_of(
            made, adlm_world.network(here, request, public=public), data, batch=len(data.x)
        )
    schedule = AdlmSchedule(
        lr=here.lr, optimizer="adam", epochs=here.epochs, evaluate_every=here.every
    )
    training = monte_carlo(
        made,
        here.private,
        here.architecture,
        schedule,
        seeds=seeds,
        relevance=relevance,
        device=here.device,
    )

    def step_done(done: int) -> None:
        on_step(len(seeds) * done)

    outcome = training.run(on_step=step_done)
    return {
        "accuracy": outcome.accuracy.double().tolist(),
        "epochs": outcome.epochs,
        "diverged": int(outcome.diverged.sum()),
        "collapsed": sum(one.collapsed for one in training.spread()),
        "claimed": made.epsilon_claimed(),
        "certified": made.epsilon_certified(visits=here.epochs),
        "relation": made.relation,
    }


def _gradients(
    here: ExperimentSetup, epsilon: float, seeds: range, on_step: OnStep
) -> Mapping[str, Any]:
    private = here.private
    where = runner.RunSetting(
        data=Dataset(
            x_train=private.inputs(private.x, "unit").float(),
            y_train=private.y,
            x_test=private.inputs(private.x_test, "unit").float(),
            y_test=private.y_test,
            classes=private.classes,
            source=private.source,
        ),
        model=lambda seed: _bare(here, seed),
        epochs=here.epochs,
        batch_size=here.lot,
        rule=update.SGD(lr=here.psgd_lr),
        delta=here.delta,
        device=here.device,
    )
    start = DPSGD(noise_multiplier=1.0, max_grad_norm=here.experiment.clip, arithmetic="float")
    noisy = accounting.calibrate(start, target_epsilon=epsilon, **where.accounting())
    each = []
    for place, seed in enumerate(seeds):
        before = place * where.steps
        each.append(
            runner.once(where, noisy, seed, on_step=lambda n, before=before: on_step(before + n))  # type: ignore[misc]
        )
    return {
        "accuracy": [[100 * e.heldout_accuracy for e in one.history] for one in each],
        "epochs": [e.epoch for e in each[0].history],
        "diverged": 0,
        "collapsed": sum(one.collapsed for one in each),
        "claimed": epsilon,
        "certified": each[0].epsilon_certified,
        "relation": each[0].relation,
    }


def _bare(here: ExperimentSetup, seed: int) -> nn.Module:
    """Build the network without min-max normalisation."""
    private = here.private
    network = build(here.architecture, private.row_shape, private.classes, seed=seed)
    return nn.Sequential(*(part for part in network if not isinstance(part, BatchMinMax)))


def last_accuracies(numbers: Mapping[str, Any]) -> list[float]:
    return [run[-1] for run in numbers["accuracy"]]


def beside(here: ExperimentSetup, printed: float | None) -> float | str | None:
    """Return a printed number, in words where our records are of another data set."""
    if printed is None or here.genuine:
        return printed
    return f"{printed:g} on other data ({here.experiment.kind})"


def row(
    item: str, here: ExperimentSetup, name: str, epsilon: float, numbers: Mapping[str, Any]
) -> ComparisonRow:
    values = last_accuracies(numbers)
    certified = float(numbers["certified"])
    diverged = numbers["diverged"]
    return ComparisonRow(
        item=item,
        setting=name if math.isinf(epsilon) else f"{name}, epsilon {shown_bound(epsilon)}",
        quantity="accuracy %",
        published=beside(here, PRINTED.get((here.experiment.name, name, epsilon))),
        ours=statistics.fmean(values),
        epsilon_claimed=None if math.isinf(epsilon) else float(numbers["claimed"]),
        epsilon_certified=None if math.isinf(epsilon) else certified,
        relation=numbers["relation"] if math.isfinite(certified) else "-",
        data=here.private.source,
        seeds=len(values),
        spread=(max(values) - min(values)) / 2,
        stopped=diverged,
        collapsed=numbers["collapsed"],
        note=_note(here, name, epsilon, diverged, statistics.fmean(values)),
    )


def lengths(epochs: int) -> list[int]:
    """Return three lengths of training: about a ninth, a third and all of the epochs."""
    return sorted({max(1, round(epochs / 9)), max(1, round(epochs / 3)), epochs})


def earlier(
    item: str, here: ExperimentSetup, name: str, epsilon: float, numbers: Mapping[str, Any]
) -> list[ComparisonRow]:
    """Return rows of the shorter lengths, whose runs are counted at their end."""
    whole, measured = row(item, here, name, epsilon, numbers), list(numbers["epochs"])
    rows = []
    for wanted in lengths(measured[-1])[:-1]:
        place = min(range(len(measured)), key=lambda i: abs(measured[i] - wanted))
        length, values = measured[place], [run[place] for run in numbers["accuracy"]]
        rows.append(
            replace(
                whole,
                setting=f"{whole.setting}, after {length} of {measured[-1]} epochs",
                published=None,
                ours=statistics.fmean(values),
                spread=(max(values) - min(values)) / 2,
                stopped=None,
                collapsed=None,
                note="",
            )
        )
    return rows


def with_control(result: Result, here: ExperimentSetup, plain: Mapping[str, Any]) -> Result:
    """Return the result with what the polynomial loss reaches without noise.

    Where that is not enough the figure is not drawn.
    """
    found = statistics.fmean(last_accuracies(plain))
    said = f"control without noise: {found:.1f} % after {here.epochs} epochs"
    if found >= here.control:
        return replace(result, control=f"{said}, at least {here.control:g} % as asked")
    said += f", below the {here.control:g} % that it must reach"
    return replace(result, control=said, panels=[withheld(result.title, said)])


def _note(here: ExperimentSetup, name: str, epsilon: float, diverged: int, accuracy: float) -> str:
    """Return what a reader must know of a row: runs that stopped, a control that fails."""
    bar = here.control
    if name == PLAIN and accuracy < bar:
        return (
            f"the control without noise has {accuracy:.1f} % after {here.epochs} epochs, less than "
            f"the {bar:g} % that it must reach: the figure is not drawn (--epochs, more rows)"
        )
    if diverged:
        return f"{name}, epsilon {shown_bound(epsilon)}: {diverged} runs diverged and were stopped"
    return ""


def averaged(name: str, epsilons: Sequence[float]) -> list[float]:
    """Return the epsilons that the paper's means are over."""
    inside = [e for e in epsilons if name != "MNIST" or 0.2 <= e <= 0.5]
    return inside or list(epsilons)


def curves(experiment: AdlmExperiment, epsilons: Sequence[float]) -> list[float]:
    """Return the epsilons whose curves over epochs are drawn: the source's, if they were run."""
    return [e for e in experiment.curves if e in epsilons] or sorted({epsilons[0], epsilons[-1]})


def _tests(
    item: str,
    here: ExperimentSetup,
    numbers: Mapping[tuple[str, float], Mapping[str, Any]],
    epsilons: Sequence[float],
    *,
    printed: bool,
) -> list[ComparisonRow]:
    """Return means over the epsilons that the paper averages, and paired tests against AdLM's.

    ``printed`` says whether they are the paper's own, so that its means stand beside ours.
    """
    name = here.experiment.name
    chosen = averaged(name, epsilons)

    def mean(method: str) -> list[float]:
        each = [last_accuracies(numbers[method, e]) for e in chosen]
        return [statistics.fmean(one) for one in zip(*each, strict=True)]

    over = "mean over epsilon " + ", ".join(shown_bound(e) for e in chosen)
    rows = []
    for method in ("AdLM", PSGD):
        values = mean(method)
        rows.append(
            ComparisonRow(
                item=item,
                setting=f"{method}, {over}",
                quantity="accuracy %",
                published=beside(here, MEANS[name].get(method)) if printed else None,
                ours=statistics.fmean(values),
                data=here.private.source,
                seeds=len(values),
                spread=(max(values) - min(values)) / 2,
            )
        )
    pairs = [
        ("AdLM", PSGD),
        ("AdLM", "ILM"),
        ("AdLM, corrected", "ILM, corrected"),
        ("AdLM, corrected", PSGD),
    ]
    for first, second in pairs:
        a, b = mean(first), mean(second)
        gain, level = (
            GAINS[name].get(second, (None, "")) if first == "AdLM" and printed else (None, "")
        )
        common: dict[str, Any] = {"item": item, "data": here.private.source, "seeds": len(a)}
        what = f"{first} over {second}, {over}"
        rows += [
            ComparisonRow(
                setting=what,
                quantity="gain in points",
                published=beside(here, gain),
                ours=statistics.fmean(a) - statistics.fmean(b),
                **common,
            ),
            ComparisonRow(
                setting=what,
                quantity="p of the paired t test",
                published=level or None if here.genuine else None,
                ours=intervals.paired_test(a, b),
                **common,
            ),
        ]
    return rows


def _panels(
    experiment: ExperimentSetup,
    numbers: Mapping[tuple[str, float], Mapping[str, Any]],
    epsilons: Sequence[float],
) -> list[Panel]:
    names = [*METHODS, PSGD]
    over = []
    for name in names:
        last = [intervals.interval(last_accuracies(numbers[name, e])) for e in epsilons]
        y, half = [one.mean for one in last], [one.half for one in last]
        crosses = [bool(verdicts.hindered(numbers[name, e])) for e in epsilons]
        over.append(Line(label=name, x=epsilons, y=y, half=half, spoiled=crosses))
        if experiment.same_data and name in verdicts.PRINTED_METHODS:
            printed = {
                e: v
                for (n, m, e), v in PRINTED.items()
                if (n, m) == (experiment.experiment.name, name)
            }
            over.append(
                Line(
                    label=f"{name}, published",
                    x=list(printed),
                    y=list(printed.values()),
                    points=True,
                )
            )
    panels = [
        Panel(
            title="after the last epoch",
            x_label="epsilon claimed",
            y_label="accuracy %",
            lines=over,
            log_x=True,
        )
    ]
    for epsilon in curves(experiment.experiment, epsilons):
        lines = [_curve(name, numbers[name, epsilon]) for name in names]
        lines.append(_curve(PLAIN, numbers[PLAIN, math.inf]))
        panels.append(
            Panel(
                title=f"epsilon {shown_bound(epsilon)}",
                x_label="epoch",
                y_label="accuracy %",
                lines=lines,
            )
        )
    return panels


def _curve(label: str, numbers: Mapping[str, Any]) -> Line:
    each = [intervals.interval(one) for one in zip(*numbers["accuracy"], strict=True)]
    y, half = [one.mean for one in each], [one.half for one in each]
    known = half if all(map(math.isfinite, half)) else ()
    return Line(label=label, x=numbers["epochs"], y=y, half=known, band=True)
