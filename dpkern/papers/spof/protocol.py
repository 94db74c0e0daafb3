"""Item of SPOF in its authors' own protocol: their runs, the same runs here, and what was undone.

Accuracy is 1 - mean squared error over all rows; the gain is that of the means over epsilon,
relative.

Source: SPOF, figure 3 and the tables of gains and times; the repository
theorycoder/distributedautoencoders, commit b92bab58.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from ...privacy.accounting import shown_bound
from ..intervals import interval
from ..result import ComparisonRow, Line, Panel, Result
from ..runner import SEEDED, ItemRequest
from ..verdict import TOO_QUICK
from . import protocol_corrected
from .items import PAPER
from .protocol_runs import (
    AS_RELEASED,
    LABELS,
    PRINTED,
    PRINTED_NO_NOISE,
    SIGMA,
    Protocol,
    ProtocolRuns,
    as_released,
    epsilons,
    label,
    protocol,
    train,
)
from .protocol_verdicts import COLLAPSED, verdicts
from .raw_results import EPSILONS
from .released import (
    CLIP,
    CONSTANT,
    NON_PRIVATE,
    RATE,
    ReleasedMethod,
    constant_accuracy,
    expanded,
)


def released(request: ItemRequest) -> Result:
    """Run the authors' protocol, as their code runs it and with the record as its target."""
    where = protocol(request)
    found = train(request, where)
    corrected = protocol_corrected.train(request, where)
    rows = [row for method in found for row in _rows(where, method, found[method])]
    rows += _constants(where) + protocol_corrected.rows(where, corrected)
    notes = (
        "accuracy is 1 - mean squared error over all rows, training included; inputs have sensors' "
        "noise at evaluation only, and the targets of non-private training have it",
        "noisy SPOF has the scale of an earlier script, whose term of the constant is not divided "
        "by epsilon: its runs are the published ones, those of the stored script are not",
        f"epsilon is that of one step and is spent {where.steps} times; nothing is certified, for "
        "the noise has a scale that follows the record (S6), and DP-SGD's Laplace noise is scaled "
        "to a bound on the L2 norm",
        "corrected: epsilon is a record's, of the whole training, where the columns' maxima are "
        "public; rows are not copied, and accuracy is that of held-out rows",
        f"outputs that vary over the records by less than {COLLAPSED:g} are one constant",
        "published: means of the authors' own runs"
        if where.raw
        else "no published runs: they hold for the authors' data set only (--data)",
        *SEEDED[:1],
    )
    result = PAPER.result(
        "released",
        "the authors' protocol",
        rows,
        [*_panels(where, found), protocol_corrected.panel(where, corrected)],
        notes,
        steps=where.steps,
        runs=where.runs,
        epsilons=EPSILONS,
        clip=where.numbers.get("clip", CLIP),
        constant=where.numbers.get("shift", CONSTANT),
        rate=where.numbers.get("rate", RATE),
        copies=where.copies,
        data=where.data,
    )
    control = protocol_corrected.control(where, corrected)
    return replace(result, control=f"{_control(where, found)}; {control}").judged(
        [
            *verdicts(where, found),
            protocol_corrected.verdict(where, corrected, TOO_QUICK * request.quick),
        ]
    )


def _control(where: Protocol, found: Mapping[ReleasedMethod, ProtocolRuns]) -> str:
    """Return what the authors' training without privacy reaches, beside a constant.

    It may stay below: their figure shows what their code does, and so does ours.
    """
    free = interval(found[as_released(NON_PRIVATE, 0.0)].finite(1.0)).mean
    means = max(float(row.ours or 0.0) for row in _constants(where))
    side = "above" if free > means else "below"
    return f"as released, without privacy: {free:.3f}, {side} the {means:.3f} of a constant"


def _rows(where: Protocol, method: ReleasedMethod, found: ProtocolRuns) -> list[ComparisonRow]:
    rows = []
    for epsilon in epsilons(method):
        finite = found.finite(epsilon)
        mean, half = interval(finite)
        overflowed = len(found.accuracy[epsilon]) - len(finite)
        private = method.name != NON_PRIVATE and method.noise
        said = f"{overflowed} of {where.runs} runs overflowed and are not in the mean"
        notes = [said] if overflowed else []
        if finite and max(s for s in found.spread[epsilon] if math.isfinite(s)) < COLLAPSED:
            outputs = statistics.fmean(m for m in found.mean[epsilon] if math.isfinite(m))
            notes.append(f"collapsed: every record gets the same output, {outputs:.2g} on average")
        rows.append(
            ComparisonRow(
                item="released",
                setting=label(where, method)
                + (f", epsilon {shown_bound(epsilon)} a step" if private else ""),
                quantity="accuracy",
                published=_published(where, method, epsilon),
                ours=mean,
                spread=half if math.isfinite(half) else None,
                epsilon_claimed=epsilon if private else None,
                epsilon_certified=math.inf if private else None,
                data=where.data,
                seeds=len(found.accuracy[epsilon]),
                stopped=overflowed,
                collapsed=sum(spread < COLLAPSED for spread in found.spread[epsilon]),
                note="; ".join(notes),
            )
        )
    return rows


def _published(where: Protocol, method: ReleasedMethod, epsilon: float) -> float | None:
    if where.raw is None or method in LABELS:
        return None
    runs = where.raw.accuracy.get((method.name, method.sigma))
    if runs is None:
        return None
    return statistics.fmean(runs.get(epsilon) or runs[EPSILONS[0]])


def _constants(where: Protocol) -> list[ComparisonRow]:
    """Return what outputs score that are the same for every record."""
    made = [expanded(where.rows, seed, copies=where.copies) for seed in range(where.runs)]
    kinds = {
        "every output 0": [constant_accuracy(rows, 0.0) for rows in made],
        "every output 1/2": [constant_accuracy(rows, 0.5) for rows in made],
        "each output the mean of its column": [
            constant_accuracy(rows, rows.mean(0)) for rows in made
        ],
    }
    rows = []
    for what, values in kinds.items():
        mean, half = interval(values)
        rows.append(
            ComparisonRow(
                item="released",
                setting=f"no network: {what}",
                quantity="accuracy",
                ours=mean,
                spread=half if math.isfinite(half) else None,
                data=where.data,
                seeds=len(values),
            )
        )
    return rows


def _panels(where: Protocol, found: Mapping[ReleasedMethod, ProtocolRuns]) -> list[Panel]:
    zeros = statistics.fmean(
        constant_accuracy(expanded(where.rows, seed, copies=where.copies), 0.0)
        for seed in range(where.runs)
    )
    panels = []
    for sigma, title in ((0.0, "noiseless"), (SIGMA, f"sensors' noise {where.sensor_noise:g}")):
        lines = []
        for method in AS_RELEASED:
            if method.sigma != sigma or method.name == NON_PRIVATE:
                continue
            means = [interval(found[method].finite(e)) for e in EPSILONS]
            lines.append(
                Line(
                    label=method.name,
                    x=EPSILONS,
                    y=[m.mean for m in means],
                    half=[m.half for m in means],
                )
            )
            if where.raw is not None:
                runs = where.raw.accuracy[method.name, sigma]
                y = [statistics.fmean(runs[e]) for e in EPSILONS]
                lines.append(Line(label=f"{method.name}, published", x=EPSILONS, y=y, points=True))
        free = as_released(NON_PRIVATE, sigma)
        found_free = interval(found[free].finite(1.0)).mean
        lines.append(Line(label=NON_PRIVATE, x=EPSILONS, y=[found_free] * 5, level=True))
        lines.append(Line(label="every output 0", x=EPSILONS, y=[zeros] * 5, level=True))
        panels.append(
            Panel(
                title=title,
                x_label="epsilon of a step",
                y_label="accuracy",
                lines=lines,
                log_x=True,
            )
        )
    collapse = (
        ("SPOF, as released", AS_RELEASED[0]),
        ("record as target, without noise", PRINTED_NO_NOISE),
        ("record as target", PRINTED),
    )
    lines = [
        Line(
            label=label,
            x=[float(step) for step, _ in found[method].curve],
            y=[max(value, 1e-9) for _, value in found[method].curve],
        )
        for label, method in collapse
    ]
    panels.append(
        Panel(
            title="spread of the outputs over the records",
            x_label="step",
            y_label="standard deviation",
            lines=lines,
            log_y=True,
        )
    )
    return panels


__all__ = ["released"]
