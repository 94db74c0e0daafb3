"""Item of AdLM in three columns: as printed, as its released code runs it, corrected.

Columns stand at both epsilons whose curves over the epochs figure 4 prints.

The released code has two columns, one for each end of what it did with the noise of labels, and two
controls: without any noise, and with the printed draw for every record in the place of one that the
batch shares.

Source: AdLM, figure 4, algorithm 1; haiphanNJIT/PrivateDeepLearning, commits 0445117 and 15fb1f3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from ...base.errors import InvalidInput
from ...objective.adlm import relevance_of
from ...privacy.accounting import shown_bound
from .. import intervals, runner
from ..pieces import CachedRun, OnStep
from ..result import ComparisonRow, Line, Panel, Result
from ..runner import ItemRequest
from ..verdict import Verdict, exact, of_epsilon, of_number
from . import released as code
from . import setup as adlm_world
from . import verdicts
from .published import PLAIN, PRINTED
from .released import FIRST, LAST, VERSIONS, ReleasedVersion
from .setup import MNIST, ExperimentSetup
from .training import (
    earlier,
    last_accuracies,
    mechanism,
    named,
    numbers_of_network,
    piece,
    row,
    trained,
    with_control,
)

EPSILONS, QUICK_EPSILONS = MNIST.curves, (2.0,)
"""Those whose curves figure 4 prints; quick runs take the one that leaves a signal."""
QUICK_RATE, QUICK_EPOCHS = 3e-3, 20
"""Few records need a larger rate and more epochs; the authors took 80,001 steps."""
LEAST_BATCH = 2
AS_PRINTED, CORRECTED = "AdLM", "AdLM, corrected"
RELEASED = {
    f"released code, {labels} ({commit})": ReleasedVersion(labels=labels)
    for labels, commit in VERSIONS.items()
}
CONTROLS = {
    "released code, without any noise": ReleasedVersion(noise=False),
    "released code, a draw for each record": ReleasedVersion(shared=False),
}
NOISELESS = (PLAIN, *(name for name, version in CONTROLS.items() if not version.noise))
NAMES = ("printed", "released, first", "released, last", "corrected")

Numbers = Mapping[tuple[str, float], Mapping[str, Any]]
"""Numbers of the runs by column and epsilon, which is infinite where nothing has noise."""

NOTES = (
    "printed and corrected: network, rate and batches as in figure 4 here; released code: its own "
    "network, inputs in [-1, 1], Adam at 3e-4, and batches normalised by their own moments, at "
    "test too",
    f"released code: noise has the source's |L| {code.BATCH} and |D| {code.RECORDS} whatever the "
    "size of the batches; relevances are those of a network trained on public records (theirs was "
    "shipped as a file)",
    "released code: one noise image per step is shared by the batch, so the difference of two "
    "records is released exactly, and every step draws anew at no counted cost",
    "the authors' 80,001 steps take days on a processor; nothing here is at their length",
    *runner.SEEDED,
)


def columns(request: ItemRequest) -> Result:
    """Train AdLM as printed, as released in two versions, and corrected, at figure 4's epsilons."""
    here = adlm_world.world(MNIST, request)
    if here.batch < LEAST_BATCH:
        raise InvalidInput(
            "rows" if request.batch_size is None else "batch_size",
            expected=f"batches of {LEAST_BATCH} records at least, which are a tenth of the private "
            "ones at most: the released code normalises a batch by its own moments",
            got=f"{here.batch} of {len(here.private.x)} records",
            remedy="Pass more --rows, and a --batch-size of 2 at least.",
        )
    epsilons = request.epsilons(QUICK_EPSILONS if request.quick else EPSILONS)
    seeds = request.repeats(2 if request.quick else 5)
    names = (AS_PRINTED, *RELEASED, CORRECTED, PLAIN, *CONTROLS)
    cells = [
        (name, epsilon)
        for epsilon in (*epsilons, math.inf)
        for name in names
        if (name in NOISELESS) == math.isinf(epsilon)
    ]
    theirs = {**RELEASED, **CONTROLS}
    with adlm_world.one_thread():
        makers = [
            partial(_piece if name in theirs else piece, here, request, name, epsilon)
            for name, epsilon in cells
        ]
        numbers = dict(zip(cells, trained(request, makers, seeds), strict=True))
    rows = [row("released", here, *cell, of_it) for cell, of_it in numbers.items()]
    for cell, of_it in numbers.items():
        rows += earlier("released", here, *cell, of_it)
    for epsilon in epsilons:
        rows += _differences(here, request, epsilon)
    settings = {
        "quick": request.quick,
        "epsilons": epsilons,
        "seeds": seeds,
        "epochs": here.epochs,
        "released_epochs": _epochs(request, here),
        "released_lr": _rate(request),
        "batch": here.batch,
        "records": len(here.private.x),
    }
    result = Result(
        paper="adlm",
        item="released",
        title="printed, released, corrected",
        rows=rows,
        panels=[panel for epsilon in epsilons for panel in _panels(_at(numbers, epsilon), epsilon)],
        notes=NOTES,
        settings=settings,
        verdicts=[
            *_labels(here, epsilons[0], _shares(request)[2]),
            *(one for e in epsilons for one in _verdicts(here, _at(numbers, e), e)),
        ],
    )
    return with_control(result, here, numbers[PLAIN, math.inf])


def _at(numbers: Numbers, epsilon: float) -> dict[str, Mapping[str, Any]]:
    """Return the numbers at one epsilon by name, with those of runs that have no noise."""
    return {name: of_it for (name, of), of_it in numbers.items() if of in (epsilon, math.inf)}


def _epochs(request: ItemRequest, here: ExperimentSetup) -> int:
    return request.epochs or (QUICK_EPOCHS if request.quick else here.epochs)


def _rate(request: ItemRequest) -> float:
    return request.lr or (QUICK_RATE if request.quick else code.RATE)


def _piece(
    here: ExperimentSetup, request: ItemRequest, name: str, epsilon: float, seeds: range
) -> CachedRun:
    version = {**RELEASED, **CONTROLS}[name]
    epochs, lr = _epochs(request, here), _rate(request)
    steps = epochs * (len(here.private.x) // here.batch)
    key = {
        "paper": "adlm released",
        "data": here.private.source,
        "records": len(here.private.x),
        "held_out": len(here.private.x_test),
        "digest": here.digest,
        "architecture": str(here.architecture),
        "version": asdict(version),
        "epsilon": epsilon,
        "seeds": list(seeds),
        "batch": here.batch,
        "epochs": epochs,
        "lr": lr,
        "shares": _shares(request),
        "quick": request.quick,
        **numbers_of_network(here, request),
    }

    def compute(on_step: OnStep) -> Mapping[str, Any]:
        relevance = (
            _relevance(here, request, epsilon)
            if version.noise
            else torch.zeros(here.private.features, dtype=torch.float64)
        )
        each = [
            code.train(
                version,
                here.private,
                here.architecture,
                epsilon=epsilon,
                relevance=relevance,
                batch=here.batch,
                epochs=epochs,
                lr=lr,
                seed=seed,
                shares=_shares(request),
                every=here.every,
                device=here.device,
                on_step=lambda done, before=place * steps: on_step(before + done),  # type: ignore[misc]
            )
            for place, seed in enumerate(seeds)
        ]
        return {
            "accuracy": [one["accuracy"] for one in each],
            "epochs": each[0]["epochs"],
            "diverged": 0,
            "collapsed": sum(one["collapsed"] for one in each),
            "claimed": epsilon if version.noise else math.inf,
            "certified": math.inf,
            "relation": "-",
        }

    return CachedRun(label=name + named(seeds), key=key, compute=compute, steps=len(seeds) * steps)


def _shares(request: ItemRequest) -> tuple[float, float, float]:
    """Return the released code's parts of epsilon for relevances, inputs and labels."""
    usual = dict(zip(("relevance_share", "input_share", "label_share"), code.SHARES, strict=True))
    relevance, labels = (
        request.number(name, usual[name]) for name in ("relevance_share", "label_share")
    )
    return relevance, 1 - relevance - labels, labels


def _relevance(here: ExperimentSetup, request: ItemRequest, epsilon: float) -> torch.Tensor:
    """Return mean relevances of public records by a network that was trained on them."""
    made = mechanism(here, CORRECTED, epsilon)
    network = adlm_world.network(here, request, public=True)
    return relevance_of(made, network, here.public, batch=len(here.public.x))


def _differences(
    here: ExperimentSetup, request: ItemRequest, epsilon: float
) -> list[ComparisonRow]:
    """Return the scales of the noise, a row for each column."""
    at = f"epsilon {shown_bound(epsilon)}"
    printed, corrected = (mechanism(here, name, epsilon) for name in (AS_PRINTED, CORRECTED))
    shares = torch.ones(here.private.features, dtype=torch.float64)
    equal = printed.input_scales(shares), corrected.input_scales(shares)
    parts = _shares(request)
    theirs = code.input_scale(here.architecture, here.private.row_shape, parts[1] * epsilon)
    labels = code.label_scale(here.private.classes, here.architecture.hidden, parts[2] * epsilon)
    # Their inputs have a range of 2, printed ones of 1.
    scales = {
        AS_PRINTED: float(equal[0][0]),
        "released code": theirs / 2,
        CORRECTED: float(equal[1][0]),
    }
    rows = [
        ComparisonRow(
            item="released",
            setting=f"{name}, {at}",
            quantity="scale of an input's noise at equal shares / range of an input",
            ours=scale,
        )
        for name, scale in scales.items()
    ]
    draws = {
        AS_PRINTED: (1.0, ""),
        "released code": (
            float(_epochs(request, here) * (len(here.private.x) // here.batch)),
            "every step draws anew, and epsilon is counted once",
        ),
        CORRECTED: (1.0, ""),
    }
    rows += [
        ComparisonRow(
            item="released",
            setting=f"{name}, {at}",
            quantity="releases of a record's input",
            ours=count,
            note=note,
        )
        for name, (count, note) in draws.items()
    ]
    rows += [
        ComparisonRow(
            item="released",
            setting=f"{name}, {at}",
            quantity="scale of a label's noise that training sees",
            ours=scale,
        )
        for name, scale in (
            (AS_PRINTED, printed.label_scale),
            *zip(RELEASED, (0.0, labels), strict=True),
            (CORRECTED, "randomized response"),
        )
    ]
    return rows


def _panels(numbers: Mapping[str, Mapping[str, Any]], epsilon: float) -> list[Panel]:
    chosen = (AS_PRINTED, *RELEASED, CORRECTED)
    last = [intervals.interval(last_accuracies(numbers[name])) for name in chosen]
    points = Line(
        label="after the last epoch",
        x=range(1, len(chosen) + 1),
        y=[one.mean for one in last],
        half=[one.half for one in last],
        points=True,
        spoiled=[bool(verdicts.hindered(numbers[name])) for name in chosen],
    )
    claimed = f"claimed epsilon {shown_bound(epsilon)}"
    curves = [
        Line(
            label=name,
            x=of_it["epochs"],
            y=[intervals.interval(one).mean for one in zip(*of_it["accuracy"], strict=True)],
        )
        for name, of_it in numbers.items()
    ]
    return [
        Panel(title=claimed, y_label="accuracy %", lines=[points], names=NAMES),
        Panel(title=claimed, x_label="epoch", y_label="accuracy %", lines=curves),
    ]


def _labels(here: ExperimentSetup, epsilon: float, label_share: float) -> list[Verdict]:
    """Judge that the first version's labels are perturbed."""
    return [
        exact(
            "released code, no label noise: labels are perturbed",
            False,
            unit=f"scale of the noise that training sees, epsilon {shown_bound(epsilon)}",
            published=code.label_scale(
                here.private.classes, here.architecture.hidden, label_share * epsilon
            ),
            ours=0.0,
            reason="the noise that is drawn is never fed; what is fed is that of the test, 0",
        )
    ]


def _verdicts(
    here: ExperimentSetup, numbers: Mapping[str, Mapping[str, Any]], epsilon: float
) -> list[Verdict]:
    first, last = (numbers[name] for name in RELEASED)
    each, shared = (
        intervals.interval(last_accuracies(numbers[name])).mean
        for name in ("released code, a draw for each record", next(iter(RELEASED)))
    )
    hindrance = (
        "" if here.same_data else f"measured on {here.private.source}, not on all of MNIST"
    ) or "fewer steps than the 80,001 of the released code"
    made = [
        of_epsilon(
            f"released code, {labels}: a record spends epsilon {shown_bound(epsilon)}",
            epsilon,
            math.inf,
            "A1: differences of records are released exactly"
            + ("; the label is used without noise" if labels == FIRST else ""),
        )
        for labels in (FIRST, LAST)
    ]
    printed = PRINTED.get(("MNIST", "AdLM", epsilon))
    if printed is not None:
        made += [
            of_number(
                f"released code, {labels}: {printed:g} % at epsilon {shown_bound(epsilon)}",
                printed,
                intervals.interval(last_accuracies(of_it)),
                len(of_it["accuracy"]),
                unit="% held out, mean over the runs",
                rounding=0.005,
                hindrance=hindrance,
            )
            for labels, of_it in ((FIRST, first), (LAST, last))
        ]
    made.append(
        exact(
            "released code: every record of a batch is perturbed by a draw of its own, epsilon "
            f"{shown_bound(epsilon)}",
            False,
            unit="draws of the input noise in a step",
            published=float(here.batch),
            ours=1.0,
            reason="A1: one image of noise is shared by the batch; with a draw for each record "
            f"accuracy is {each:.1f} % instead of {shared:.1f} % here",
        )
    )
    return made


__all__ = ["columns"]
