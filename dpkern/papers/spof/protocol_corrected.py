"""Train SPOF and DP-SGD, corrected, on the rows of the authors' protocol, in its measure.

Here epsilon is a record's, of the whole training: SPOF releases a record once and visits it as
often as the released code takes steps, DP-SGD pays for its single visit. Rows are no copies of
each other, for a copy of a record would spend its budget again; two users have rows of their own.
Accuracy is 1 - mean squared error on the held-out fifth.

Source: SPOF, section VII, with the corrections of S4 to S8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...base.json import plain
from ...objective import Method, SpofTraining, VisitSchedule, records
from ...privacy.accounting import shown_bound
from ...privacy.mechanisms import OutputSGD
from ...privacy.mechanisms.functional import Functional
from ..intervals import interval
from ..pieces import CachedRun, OnStep
from ..result import ComparisonRow, Line, Panel
from ..runner import ItemRequest
from ..verdict import Verdict, of_order
from .items import CODE, FEATURES, USERS
from .protocol_runs import Protocol
from .raw_results import EPSILONS
from .setting import BASELINE, CORRECTED, METHODS, NON_PRIVATE, OURS, MethodNumbers

RATE = 0.05
NAMES = (OURS + CORRECTED, BASELINE + CORRECTED)
HELD_OUT = 0.2


@dataclass(frozen=True)
class CorrectedRuns:
    """The runs of a method at one epsilon, with what they certify of a record."""

    name: str
    epsilon: float
    epochs: int
    accuracy: Sequence[float]
    diverged: int
    collapsed: int
    certified: float | None
    relation: str

    @property
    def label(self) -> str:
        visits = f"{self.epochs} visits of a record" if self.epochs > 1 else "one visit of a record"
        private = f", epsilon {shown_bound(self.epsilon)}" if self.certified is not None else ""
        return f"{self.name}{private}, {visits}"


def own_rows(where: Protocol) -> records.Records:
    """Return the protocol's rows, without copies, dealt to two users; a fifth is held out.

    They are divided by the maxima of their columns, which a certificate has to take as public.
    """
    scaled = (where.rows / where.rows.max(0).values.clamp_min(1e-300)).float()
    order = torch.randperm(len(scaled), generator=torch.Generator().manual_seed(0))
    each = len(scaled) // USERS
    held = round(HELD_OUT * each)
    parts = torch.stack([scaled[order[user::USERS][:each]] for user in range(USERS)])
    return records.Records(
        train=parts[:, held:].contiguous(),
        test=parts[:, :held].contiguous(),
        columns=tuple(f"feature{number + 1}" for number in range(FEATURES)),
        source=where.data,
        synthetic=False,
        bounds=records.PUBLIC,
        notes=(),
        rows=torch.arange(each - held).repeat(USERS, 1),
    )


def train(request: ItemRequest, where: Protocol) -> list[CorrectedRuns]:
    """Train every method at every epsilon, or read what was finished before."""
    data = own_rows(where)
    visits = _visits(where, data)
    cells = [(NON_PRIVATE, 1.0, visits)]
    cells += [(NAMES[0], epsilon, visits) for epsilon in EPSILONS]
    cells += [(NAMES[1], epsilon, 1) for epsilon in EPSILONS]
    numbers = request.through([_piece(where, data, *cell) for cell in cells])
    return [_runs(where, *cell, of_it) for cell, of_it in zip(cells, numbers, strict=True)]


def over_constants(
    request: ItemRequest, where: Protocol, constants: Sequence[float]
) -> dict[tuple[float, float], CorrectedRuns]:
    """Train SPOF, corrected, with every constant at every epsilon; by constant and epsilon."""
    data = own_rows(where)
    visits = _visits(where, data)
    places = [(c, epsilon) for c in constants for epsilon in EPSILONS]
    with_constant = {
        c: replace(where, numbers={**where.numbers, "shift": c}) for c in dict.fromkeys(constants)
    }
    numbers = request.through(
        [_piece(with_constant[c], data, NAMES[0], epsilon, visits) for c, epsilon in places]
    )
    return {
        (c, epsilon): _runs(with_constant[c], NAMES[0], epsilon, visits, of_it)
        for (c, epsilon), of_it in zip(places, numbers, strict=True)
    }


def _visits(where: Protocol, data: records.Records) -> int:
    """Return the visits of a record for as many steps as the released code takes."""
    return max(1, where.steps // data.train.shape[1])


def _piece(
    where: Protocol, data: records.Records, name: str, epsilon: float, epochs: int
) -> CachedRun:
    method = _method(where, name, epsilon, epochs)
    steps = epochs * int(data.train.shape[1])

    def compute(on_step: OnStep) -> dict[str, Any]:
        schedule = VisitSchedule(lr=RATE, epochs=epochs)
        training = SpofTraining(data, method, schedule, seeds=range(where.runs), code=CODE)
        outcome = training.run(on_step=lambda done, of: on_step(done))
        return {
            "accuracy": (1 - outcome.mse / FEATURES).tolist(),
            "diverged": int(outcome.diverged.sum()),
            "collapsed": sum(one.collapsed for one in training.spread()),
        }

    key = {
        "training": "spof released, corrected",
        "rows": where.digest,
        "runs": where.runs,
        "method": method.fingerprint,
        "epochs": epochs,
        "lr": RATE,
        "code": CODE,
    }
    label = f"{name}, epsilon {shown_bound(epsilon)}, {epochs} visits"
    if "shift" in where.numbers:
        label += f", c {where.numbers['shift']:g}"
    return CachedRun(label=label, key=key, compute=compute, steps=steps)


def _method(where: Protocol, name: str, epsilon: float, epochs: int) -> Method:
    asked = {
        of: where.numbers[given]
        for of, given in (("constant", "shift"), ("clip", "clip"))
        if given in where.numbers
    }
    made: Method = METHODS[name](epsilon, MethodNumbers(epochs=epochs, **asked))
    return made


def _runs(where: Protocol, name: str, epsilon: float, epochs: int, numbers: Any) -> CorrectedRuns:
    method = _method(where, name, epsilon, epochs)
    certified, relation = None, ""
    if isinstance(method, (Functional, OutputSGD)):
        certified, relation = method.epsilon_certified(visits=epochs), method.relation
    return CorrectedRuns(
        name=name,
        epsilon=epsilon,
        epochs=epochs,
        accuracy=numbers["accuracy"],
        diverged=numbers["diverged"],
        collapsed=numbers["collapsed"],
        certified=certified,
        relation=relation,
    )


def rows(where: Protocol, found: Sequence[CorrectedRuns]) -> list[ComparisonRow]:
    """Return a row for each method and epsilon."""
    made = []
    for one in found:
        mean, half = interval(one.accuracy)
        made.append(
            ComparisonRow(
                item="released",
                setting=one.label,
                quantity="accuracy, held out",
                ours=mean,
                spread=plain(half) if len(one.accuracy) > 1 else None,
                epsilon_claimed=None if one.certified is None else one.epsilon,
                epsilon_certified=one.certified,
                relation=one.relation,
                data=f"{where.data.split(', expanded')[0]}, not expanded",
                seeds=len(one.accuracy),
                stopped=one.diverged,
                collapsed=one.collapsed,
            )
        )
    return made


def panel(where: Protocol, found: Sequence[CorrectedRuns]) -> Panel:
    """Draw both methods over epsilon, beside training without privacy and the columns' means."""
    lines = []
    for name in NAMES:
        means = [interval(one.accuracy) for one in found if one.name == name]
        y, half = [mean.mean for mean in means], [mean.half for mean in means]
        lines.append(Line(label=name, x=EPSILONS, y=y, half=half))
    free = interval(next(one.accuracy for one in found if one.name == NON_PRIVATE)).mean
    lines.append(Line(label=NON_PRIVATE, x=EPSILONS, y=[free] * len(EPSILONS), level=True))
    constant = [column_means(where)] * len(EPSILONS)
    lines.append(Line(label="the columns' means", x=EPSILONS, y=constant, level=True))
    return Panel(
        title="corrected, held-out rows",
        x_label="epsilon of a record, whole training",
        y_label="accuracy",
        lines=lines,
        log_x=True,
    )


def control(where: Protocol, found: Sequence[CorrectedRuns]) -> str:
    """Return what training without privacy reaches on held-out rows, beside the columns' means."""
    free = interval(next(one.accuracy for one in found if one.name == NON_PRIVATE)).mean
    means = column_means(where)
    side = "above" if free > means else "below"
    return f"corrected, without privacy: {free:.3f}, {side} the columns' means, {means:.3f}"


def column_means(where: Protocol) -> float:
    """Return the accuracy, on held-out rows, of the training rows' means; no epsilon covers it."""
    data = own_rows(where)
    mean = data.train.mean((0, 1), keepdim=True)
    return 1 - float((data.test - mean).double().square().mean())


def verdict(where: Protocol, found: Sequence[CorrectedRuns], hindrance: str = "") -> Verdict:
    """Judge SPOF against DP-SGD at equal certified epsilon.

    Args:
        where: the protocol.
        found: the runs of both.
        hindrance: why they decide nothing; empty where they do.
    """
    by_run = [
        [sum(run) / len(EPSILONS) for run in zip(*each, strict=True)]
        for name in NAMES
        if (each := [one.accuracy for one in found if one.name == name])
    ]
    best = max(interval(one.accuracy).mean for one in found if one.name in NAMES)
    return of_order(
        "corrected, SPOF is more accurate than DP-SGD at equal certified epsilon",
        *by_run,
        unit="1 - mean squared error, mean over runs and epsilon",
        hindrance=hindrance,
        reason=f"neither reaches the columns' means, {column_means(where):.3f}"
        if best < column_means(where)
        else "",
    )


__all__ = [
    "CorrectedRuns",
    "column_means",
    "control",
    "over_constants",
    "own_rows",
    "panel",
    "rows",
    "train",
    "verdict",
]
