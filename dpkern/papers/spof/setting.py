"""Train one setting of SPOF's experiments: a method, on records, for some runs.

All runs of a setting are one batched computation, one kernel where ``objective.descent`` has it;
its numbers are kept as a piece, so that figures which need the same setting share it. Runs are
seeded: every epsilon is that of the method as if the seeds were secret.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ...base.devices import training_device
from ...base.errors import InvalidInput
from ...base.validate import positive
from ...objective import Method, NonPrivate, SpofTraining, VisitSchedule, records
from ...objective.descent import fits
from ...objective.records import Records
from ...privacy.accounting import shown_bound
from ...privacy.mechanisms import FM, SPOF, OutputSGD
from ...privacy.mechanisms.functional import Functional
from ...train.objective_options import read_bounds, split
from ..intervals import Interval, interval
from ..pieces import CachedRun, OnStep
from ..result import ComparisonRow, Line
from ..runner import ItemRequest
from ..verdict import spoiled
from .items import CLIP, CODE, CONSTANT, FEATURES, USERS
from .raw_results import TABLE, is_authors_table

EPSILONS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
SENSOR_NOISE = 5.0
"""Standard deviation of the sensors' noise in the noisy condition."""
LEARNING_RATE = 0.05
CPU = torch.device("cpu")
TIMED = 200
"""Steps that stand for an epoch's where only its time is asked for."""
RUNS, QUICK_RUNS = 100, 5
ROWS, QUICK_ROWS = 1000, 500
EPOCHS = 1

QUANTITIES = {
    "accuracy %": "accuracy",
    "squared error of a record": "mse",
    "cross-entropy of a record": "bce",
}
NON_PRIVATE, OURS, BASELINE, FUNCTIONAL = "non-private", "SPOF", "DP-SGD", "FM"
CORRECTED = ", corrected"


@dataclass(frozen=True, kw_only=True)
class MethodNumbers:
    """Numbers that a method may need: visits of a record, c, and the clipping bound of DP-SGD."""

    epochs: int
    constant: float = CONSTANT
    clip: float = CLIP


def non_private(epsilon: float, numbers: MethodNumbers) -> Method:
    """Return the cross-entropy, without noise; no epsilon changes it."""
    del epsilon, numbers
    return NonPrivate()


def _spof(epsilon: float, numbers: MethodNumbers, *, mode: str) -> Method:
    return SPOF(epsilon=epsilon, mode=mode, constant=numbers.constant)


def _fm(epsilon: float, numbers: MethodNumbers, *, mode: str) -> Method:
    del numbers
    return FM(epsilon=epsilon, mode=mode)


def _sgd(epsilon: float, numbers: MethodNumbers, *, mode: str) -> Method:
    """Return DP-SGD; corrected, every visit costs, and epsilon is that of all epochs."""
    each = epsilon if mode == "published" else epsilon / numbers.epochs
    return OutputSGD(epsilon=each, mode=mode, max_grad_norm=numbers.clip)


METHODS: Mapping[str, Callable[..., Method]] = MappingProxyType(
    {
        NON_PRIVATE: non_private,
        OURS: partial(_spof, mode="published"),
        BASELINE: partial(_sgd, mode="published"),
        FUNCTIONAL: partial(_fm, mode="published"),
        OURS + CORRECTED: partial(_spof, mode="corrected"),
        BASELINE + CORRECTED: partial(_sgd, mode="corrected"),
        FUNCTIONAL + CORRECTED: partial(_fm, mode="corrected"),
    }
)
PRIVATE = tuple(name for name in METHODS if name != NON_PRIVATE)


@dataclass(frozen=True, kw_only=True)
class SpofExperiment:
    """Data and length of the runs of an item.

    Attributes:
        records: records of ``USERS`` users.
        epochs: visits of every record.
        runs: one for each seed 0, 1, ...
        epsilons: grid of the figures.
        lr: eta, where a figure is not about it.
        constant: c, where a figure is not about it.
        clip: clipping bound of DP-SGD.
        sensor_noise: standard deviation of the sensors' noise in the noisy condition.
        code: units of a user's code.
        device: where methods train whose steps are one kernel; others stay on the processor.
    """

    records: Records
    epochs: int
    runs: int
    epsilons: tuple[float, ...] = EPSILONS
    lr: float = LEARNING_RATE
    constant: float = CONSTANT
    clip: float = CLIP
    sensor_noise: float = SENSOR_NOISE
    code: int = CODE
    device: torch.device = CPU

    @property
    def sigmas(self) -> tuple[float, float]:
        """The noiseless and the noisy condition."""
        return 0.0, self.sensor_noise

    @property
    def rows(self) -> int:
        """The number of training records of each user."""
        return int(self.records.train.shape[1])

    @property
    def data(self) -> str:
        """The data that rows are said to be computed on."""
        name = self.records.source
        return f"synthetic: {name}" if self.records.synthetic else f"{name} ({self.bounds})"

    @property
    def of_the_source(self) -> bool:
        """Whether the records are those of the authors' table."""
        return is_authors_table(Path(self.records.source))

    def beside(self, printed: float | str) -> float | str:
        """Return a printed number, in words where our records are of another data set."""
        return printed if self.of_the_source else f"{printed} on other data (fitbit)"

    @property
    def bounds(self) -> str:
        return f"scaled by {self.records.bounds}"

    def settings(self) -> dict[str, Any]:
        """Return the settings for a result."""
        return {
            "records_per_user": self.rows,
            "held_out_per_user": int(self.records.test.shape[1]),
            "epochs": self.epochs,
            "runs": self.runs,
            "lr": self.lr,
            "epsilons": self.epsilons,
            "sigmas": self.sigmas,
            "clip": self.clip,
            "constant": self.constant,
            "data": self.data,
            "columns": list(self.records.columns),
        }


def experiment(request: ItemRequest) -> SpofExperiment:
    """Load the user's table, or generate records; ``rows``, ``epochs``, ``seeds`` as requested.

    Raises:
        InvalidInput: a table that cannot be used.
        BackendError: the requested device is not there.
    """
    usual = QUICK_ROWS if request.quick else ROWS
    rows = usual if request.rows is None else request.rows
    given = request.root("fitbit")
    table = _table_options(request)
    if given is None:
        for name in table:
            raise InvalidInput(
                name,
                expected="none without a table: the records are generated",
                got=getattr(request, name),
                remedy="Pass --data fitbit=FILE.csv as well.",
            )
        found = records.generated(users=USERS, records=rows, features=FEATURES)
    else:
        path = Path(given)
        file = path / TABLE if path.is_dir() else path
        found = records.load(file, users=USERS, features=FEATURES, samples=rows, **table)
    return SpofExperiment(
        records=found,
        epochs=EPOCHS if request.epochs is None else request.epochs,
        runs=request.repeats(QUICK_RUNS if request.quick else RUNS),
        epsilons=request.epsilons(EPSILONS),
        lr=request.lr or LEARNING_RATE,
        constant=request.number("constant", CONSTANT),
        clip=request.max_grad_norm or CLIP,
        sensor_noise=positive(sensor_noise=request.number("sensor_noise", SENSOR_NOISE)),
        code=int(request.number("code", CODE)),
        device=training_device(request.device),
    )


def _table_options(request: ItemRequest) -> dict[str, Any]:
    """Return the request's columns, user column and bounds: those that were given.

    Raises:
        InvalidInput: bounds that are no numbers.
    """
    found = {
        "columns": None if request.columns is None else split(request.columns),
        "user_column": request.user_column,
        "bounds": read_bounds(request.bounds),
    }
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting of an experiment.

    ``constant`` is c, which matters to SPOF only, and ``rate`` is eta; None takes the experiment's.
    """

    name: str
    epsilon: float = 1.0
    sigma: float = 0.0
    constant: float | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        """The label in rows and the progress bar."""
        parts = [self.name]
        if self.name != NON_PRIVATE:
            parts.append(f"epsilon {shown_bound(self.epsilon)}")
        if self.constant is not None and self.constant != CONSTANT:
            parts.append(f"c {self.constant:g}")
        if self.rate is not None:
            parts.append(f"learning rate {self.rate:g}")
        return ", ".join([*parts, condition(self.sigma)])

    def method(self, where: SpofExperiment) -> Method:
        """Return the method that trains the cell."""
        constant = where.constant if self.constant is None else self.constant
        numbers = MethodNumbers(epochs=where.epochs, constant=constant, clip=where.clip)
        return METHODS[self.name](self.epsilon, numbers)


def condition(sigma: float) -> str:
    """Return the environment's condition in words."""
    return f"sigma {sigma:g}" if sigma else "noiseless"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The numbers of a cell.

    Attributes:
        cell: the cell itself.
        accuracy, mse, bce: results of each run, on held-out records; a run that diverged stays
            where it was stopped.
        diverged: number of runs that diverged.
        collapsed: number of runs whose outputs are the same for every held-out record.
        seconds: seconds of an epoch, all runs together, by operations on tensors.
        took: seconds of the whole training, in one kernel where there is one.
        claimed, certified: epsilon of one record over the whole schedule.
        relation: relation of the certificate.
    """

    cell: Cell
    accuracy: tuple[float, ...]
    mse: tuple[float, ...]
    bce: tuple[float, ...]
    diverged: int
    collapsed: int
    seconds: float
    took: float
    claimed: float | None
    certified: float | None
    relation: str

    @property
    def mean(self) -> Interval:
        return interval(self.accuracy)

    @property
    def label(self) -> str:
        """The cell, and the share of its runs that were stopped."""
        share = 100 * self.diverged / len(self.accuracy)
        return f"{self.cell.label}; {share:.3g} % stopped" if self.diverged else self.cell.label

    def row(
        self, item: str, where: SpofExperiment, quantity: str = "accuracy %", **more: Any
    ) -> ComparisonRow:
        """Return a mean over the runs with its interval; ``more`` fills other fields."""
        mean, half = interval(getattr(self, QUANTITIES[quantity]))
        content: dict[str, Any] = {"setting": self.label, **more}
        return ComparisonRow(
            item=item,
            quantity=quantity,
            ours=mean,
            spread=half if math.isfinite(half) else None,
            epsilon_claimed=self.claimed,
            epsilon_certified=self.certified,
            relation=self.relation,
            data=where.data,
            seeds=len(self.accuracy),
            stopped=self.diverged,
            collapsed=self.collapsed,
            **content,
        )


def train(request: ItemRequest, where: SpofExperiment, cells: Sequence[Cell]) -> dict[Cell, Found]:
    """Train every cell once; methods that epsilon or c does not change share their runs."""
    unique = list(dict.fromkeys(cells))
    digest = _digest(where.records)
    numbers = request.through([_piece(where, cell, digest) for cell in unique])
    return {cell: _found(where, cell, of_it) for cell, of_it in zip(unique, numbers, strict=True)}


def _piece(where: SpofExperiment, cell: Cell, digest: str) -> CachedRun:
    method = cell.method(where)
    each = where.rows * (USERS if isinstance(method, FM) else 1)
    fused = fits(method, sigma=cell.sigma)
    place = where.device if fused else CPU
    return CachedRun(
        label=cell.label,
        key={
            "training": "autoencoder",
            "records": digest,
            "method": method.fingerprint,
            "lr": cell.rate or where.lr,
            "epochs": where.epochs,
            "runs": where.runs,
            "sigma": cell.sigma,
            "code": where.code,
            "fused": fused,
            **({} if place.type == "cpu" else {"device": str(place)}),
        },
        compute=partial(_compute, where, method, cell, place),
        steps=each * where.epochs,
    )


def _compute(
    where: SpofExperiment, method: Method, cell: Cell, place: torch.device, on_step: OnStep
) -> dict[str, Any]:
    make = partial(
        SpofTraining,
        where.records.pooled() if isinstance(method, FM) else where.records,
        method,
        VisitSchedule(lr=cell.rate or where.lr, epochs=where.epochs),
        seeds=range(where.runs),
        sigma=cell.sigma,
        code=where.code,
    )
    training = make(device=place)

    def tell(done: int, of: int) -> None:
        del of
        on_step(done)

    outcome = training.run(on_step=tell)
    return {
        "accuracy": outcome.accuracy.tolist(),
        "mse": outcome.mse.tolist(),
        "bce": outcome.bce.tolist(),
        "diverged": int(outcome.diverged.sum()),
        "collapsed": sum(one.collapsed for one in training.spread()),
        "seconds": _seconds_apart(make(fused=False)) if training.fused else training.seconds,
        "took": training.seconds,
        "visits": outcome.visits,
    }


def _seconds_apart(training: SpofTraining) -> float:
    """Return seconds of the whole schedule by operations on tensors, from its first steps.

    So methods are timed alike: of some every step is one, of others all steps are one kernel.
    """
    training.step()  # which may release the records, once
    first, more = training.seconds, min(TIMED, training.steps - 1)
    for _ in range(more):
        training.step()
    return first + (training.seconds - first) * (training.steps - 1) / max(1, more)


def _found(where: SpofExperiment, cell: Cell, numbers: Mapping[str, Any]) -> Found:
    method = cell.method(where)
    claimed = certified = None
    relation = ""
    if not isinstance(method, NonPrivate):
        claimed = cell.epsilon
        certified = _certified(method, where.records, int(numbers["visits"]))
        relation = method.relation if math.isfinite(certified) else ""
    return Found(
        cell=cell,
        **{name: tuple(numbers[name]) for name in ("accuracy", "mse", "bce")},
        diverged=int(numbers["diverged"]),
        collapsed=int(numbers["collapsed"]),
        seconds=float(numbers["seconds"]) / where.epochs,
        took=float(numbers["took"]),
        claimed=claimed,
        certified=certified,
        relation=relation,
    )


def _certified(method: Functional | OutputSGD, data: Records, visits: int) -> float:
    """Return the certified epsilon of one row of the user's table, over the whole schedule.

    Copies of a row among the samples share its one release; every visit of a copy costs. Infinite
    where columns were scaled by what all records decide.
    """
    if data.unproved:
        return math.inf
    if isinstance(method, OutputSGD):
        return method.epsilon_certified(visits=visits * data.copies)
    return method.epsilon_certified(visits=visits)


def _digest(data: Records) -> str:
    """Return a digest of everything that training sees."""
    made = hashlib.sha256(f"{data.source} {data.columns}".encode())
    for part in (data.train, data.test):
        made.update(str(tuple(part.shape)).encode())
        made.update(part.contiguous().numpy().tobytes())
    return made.hexdigest()


def gains(
    found: Mapping[Cell, Found], first: str, second: str, sigma: float, epsilons: Sequence[float]
) -> list[float]:
    """Return each run's mean over epsilon of the first method's accuracy minus the second's.

    Runs with the same seed begin with the same weights, so differences are taken run by run.
    """
    pairs = [
        (
            found[Cell(name=first, epsilon=epsilon, sigma=sigma)].accuracy,
            found[Cell(name=second, epsilon=epsilon, sigma=sigma)].accuracy,
        )
        for epsilon in epsilons
    ]
    runs = range(len(pairs[0][0]))
    return [statistics.fmean(a[run] - b[run] for a, b in pairs) for run in runs]


def curve(label: str, x: Sequence[float], found: Sequence[Found]) -> Line:
    """Draw accuracies with their 95 % intervals over the runs."""
    means = [one.mean for one in found]
    return Line(
        label=label,
        x=x,
        y=[m.mean for m in means],
        half=[m.half for m in means],
        spoiled=[bool(spoiled(one.diverged, one.collapsed, len(one.accuracy))) for one in found],
    )
