"""Run one training of a reproduced experiment, and load the data it takes.

Runs are seeded so that the same request gives the same table; so every epsilon here is that of the
mechanism, as if the seed were secret (a run with a known seed is itself certified for nothing).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..base.collapse import of_scores
from ..base.errors import InvalidInput
from ..base.rng import Key
from ..engine.demo import models
from ..engine.sampling import make_batches
from ..ops import update
from ..privacy import accounting
from ..privacy.mechanisms.base import Mechanism
from ..step.step import DPStep
from ..train import formats
from ..train.data import Dataset
from ..train.gradient_report import Epoch
from ..train.loop import Loss, TrainingSteps, summed_cross_entropy
from . import data_cache, data_roots
from .pieces import CachedRun, OnStep, ProgressListener, ResultCache, through

SEEDED = (
    "runs are seeded: epsilon is that of the mechanism if the seed were secret",
    "held-out rows are not protected by epsilon",
)
PHYSICAL_BATCH = 256
CPU = torch.device("cpu")


class ItemPlanned(Exception):
    """An item was followed up to its first training: all of its checks have passed."""


@dataclass(frozen=True, kw_only=True)
class ItemRequest:
    """The user's request for an item.

    Attributes:
        quick: the preset that ends within a minute on two cores.
        data: a folder with the paper's data set, a name as in ``train.data``, folders by data set
            (``data_roots``), or None.
        seeds: repetitions of every training run; None leaves it to the item.
        rows, epochs: training rows (of each user) and epochs; None leaves them to the item.
        lr, batch_size, max_grad_norm: of every run; None leaves them to the item.
        epsilon: epsilons of the figure's axis or table, ascending; None leaves them to the item.
        delta: delta of every run whose privacy has one; None leaves it to the item.
        device: name of the device that gradients are computed on; None is the processor.
        columns, user_column, bounds: of a table of users' days, as texts (``train`` has the same
            options); None is the source's: all numeric columns, rows dealt to the users, and every
            column divided by its maximum.
        weights: file of a pre-trained network; None for none.
        train_last: number of its last convolutions that are trained; None takes 1 and 2.
        numbers: other numbers of the protocol by name, see ``numbers.NUMBERS``; those that are not
            there are the source's.
        finished: settings that need not be computed again.
        watch: observer of the item's progress.
        planned: takes the pieces that an item would compute, which ends the item there; None
            computes them.
    """

    quick: bool = True
    data: str | None = None
    seeds: int | None = None
    rows: int | None = None
    epochs: int | None = None
    lr: float | None = None
    batch_size: int | None = None
    max_grad_norm: float | None = None
    epsilon: tuple[float, ...] | None = None
    delta: float | None = None
    device: str | None = None
    columns: str | None = None
    user_column: str | None = None
    bounds: str | None = None
    weights: str | None = None
    train_last: int | None = None
    numbers: tuple[tuple[str, float], ...] = ()
    finished: ResultCache = field(default_factory=ResultCache, compare=False, repr=False)
    watch: ProgressListener | None = field(default=None, compare=False, repr=False)
    planned: list[CachedRun] | None = field(default=None, compare=False, repr=False)

    def repeats(self, usual: int) -> int:
        """Return the number of repetitions."""
        return usual if self.seeds is None else self.seeds

    def epsilons(self, usual: tuple[float, ...]) -> tuple[float, ...]:
        """Return the epsilons of an axis."""
        return usual if self.epsilon is None else self.epsilon

    def number(self, name: str, usual: float) -> float:
        """Return a number of the protocol."""
        return dict(self.numbers).get(name, usual)

    def one_epsilon(self, usual: float) -> float:
        """Return the epsilon of an item that has a single one.

        Raises:
            InvalidInput: several were given.
        """
        if self.epsilon is None:
            return usual
        if len(self.epsilon) > 1:
            raise InvalidInput(
                "epsilon",
                expected="one number: all runs of this item have the same epsilon",
                got=", ".join(f"{value:g}" for value in self.epsilon),
                remedy="Pass one of them.",
            )
        return self.epsilon[0]

    def departure(self, **usual: float) -> str:
        """Return the sizes that were given and are not the usual ones; empty where all are.

        Runs of other sizes decide nothing of what a source prints for its own.
        """
        given = {name: getattr(self, name) for name in usual}
        return ", ".join(
            f"{name.replace('_', ' ')} {value:g} instead of {usual[name]:g}"
            for name, value in given.items()
            if value is not None and value != usual[name]
        )

    def through(self, pieces: Sequence[CachedRun]) -> list[dict[str, Any]]:
        """Return each piece's numbers, computed unless they are known; see ``pieces.through``.

        Raises:
            ItemPlanned: the pieces were asked for only.
        """
        if self.planned is not None:
            self.planned.extend(pieces)
            raise ItemPlanned
        return through(pieces, self.finished, self.watch)

    def root(self, kind: str) -> str | None:
        """Return the user's folder of this data set, one of ``data_roots.KINDS``; None without."""
        roots = data_roots.read(self.data)
        return self.data if roots is None else roots.get(kind)

    def genuine(self, kind: str) -> bool:
        """Whether the user's data are this data set: its own files, with the published digests.

        Rows of the same shape from elsewhere decide nothing of what a source prints.
        """
        given = self.root(kind)
        if given is None or formats.kind_of(Path(given)) != kind:
            return False
        return not data_cache.load(given).warnings

    def dataset(
        self, substitute: str, *, rows: int | None = None, kind: str | None = None
    ) -> Dataset:
        """Load the user's data, else the substitute, and of each part the first rows.

        Args:
            substitute: data where the user gives none.
            rows: number of rows, in quick runs and where the user chose it.
            kind: the data set that the item is about; folders of others are refused. None takes
                any data.

        Raises:
            InvalidInput: data of another kind, or whatever is wrong with its files.
        """
        given = self.data if kind is None else self.root(kind)
        if kind is None and data_roots.read(given) is not None:
            raise data_roots.not_by_name(given)
        found = data_cache.load(given or substitute)
        if kind is not None and given is not None:
            data_roots.check(found, kind, given)
        if rows is None or not (self.quick or self.rows is not None):
            return found
        return replace(
            found,
            x_train=found.x_train[:rows],
            y_train=found.y_train[:rows],
            x_test=found.x_test[:rows],
            y_test=found.y_test[:rows],
            source=f"{found.source}, first {rows} rows"
            if rows < len(found.x_train)
            else found.source,
        )


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """The parts of a run besides mechanism and seed; ``model`` takes the seed of its parameters.

    ``data`` and models are made on the processor; a run takes them to ``device``.
    """

    data: Dataset
    model: Callable[[int], nn.Module]
    epochs: int
    batch_size: int
    rule: update.Rule
    delta: float = 1e-5
    sampling: str = "poisson"
    device: torch.device = CPU

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.data.x_train) // self.batch_size)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def accounting(self) -> dict[str, Any]:
        """Return the arguments of ``accounting.certify`` and its kin."""
        return {
            "steps": self.steps,
            "sample_rate": self.batch_size / len(self.data.x_train),
            "delta": self.delta,
            "sampling": self.sampling,
            "dataset_size": len(self.data.x_train),
        }


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The outcome of one run, or the mean over several seeds.

    Attributes:
        accuracy: held-out accuracy after the last step, percent.
        best: the best of all epochs, percent; chosen by looking at held-out rows.
        spread: half the range of ``accuracy`` over the seeds.
        seeds: number of seeds.
        epsilon_claimed, epsilon_certified: epsilon of the whole run.
        relation: relation of the certificate.
        ms_per_step: wall time, capture, clipping, noise and update together.
        history: epochs of the first seed.
        collapsed: number of runs whose outputs are the same for every held-out record.
    """

    accuracy: float
    best: float
    spread: float
    seeds: int
    epsilon_claimed: float
    epsilon_certified: float
    relation: str
    ms_per_step: float
    history: tuple[Epoch, ...]
    collapsed: int = 0


def run(
    setting: RunSetting, mechanism: Mechanism, *, seeds: int, on_step: OnStep | None = None
) -> RunOutcome:
    """Train once per seed 0, 1, ...; ``on_step`` gets the number of steps done in all runs."""
    return summarised(
        [
            once(setting, mechanism, seed, on_step=_after(seed * setting.steps, on_step))
            for seed in range(seeds)
        ]
    )


def _after(before: int, on_step: OnStep | None) -> OnStep | None:
    return None if on_step is None else lambda done: on_step(before + done)


def summarised(runs: Sequence[RunOutcome]) -> RunOutcome:
    """Return the mean over seeds; epsilons do not differ between them."""
    accuracies = [run.accuracy for run in runs]
    return replace(
        runs[0],
        accuracy=statistics.fmean(accuracies),
        best=statistics.fmean(run.best for run in runs),
        spread=(max(accuracies) - min(accuracies)) / 2,
        seeds=len(runs),
        ms_per_step=statistics.median(run.ms_per_step for run in runs),
        collapsed=sum(run.collapsed for run in runs),
    )


def once(
    setting: RunSetting,
    mechanism: Mechanism,
    seed: int,
    *,
    loss: Loss = summed_cross_entropy,
    on_step: OnStep | None = None,
) -> RunOutcome:
    """Train once; the seed decides the initial parameters, the batches and the noise."""
    model, data = setting.model(seed).to(setting.device), setting.data.to(setting.device)
    rows = len(data.x_train)
    batches = make_batches(
        setting.sampling,
        dataset_size=rows,
        batch_size=setting.batch_size,
        steps=setting.steps,
        key=Key.from_unsafe_seed(seed),
    )
    step = DPStep(
        mechanism,
        [p.detach() for p in model.parameters() if p.requires_grad],
        expected_batch_size=batches.expected_batch_size,
        optimizer=setting.rule,
        unsafe_seed=seed,
        sampling=setting.sampling,
        sample_rate=batches.sample_rate,
        dataset_size=rows,
        gradients="batched",
    )
    training = TrainingSteps(
        data=data,
        model=model,
        step=step,
        batches=batches,
        steps_per_epoch=setting.steps_per_epoch,
        delta=setting.delta,
        max_physical_batch_size=PHYSICAL_BATCH,
        epsilon_points=0,
        loss=loss,
    )
    clock = [time.perf_counter()]

    def step_done(done: int) -> None:
        clock.append(time.perf_counter())
        if on_step is not None:
            on_step(done)

    training.run(on_step=step_done)
    history = tuple(training.history)
    shapes = tuple(tuple(p.shape) for p in step.params)
    spent = _spent(mechanism, shapes, tuple(setting.accounting().items()))
    return RunOutcome(
        accuracy=100 * history[-1].heldout_accuracy,
        best=100 * max(epoch.heldout_accuracy for epoch in history),
        spread=0.0,
        seeds=1,
        epsilon_claimed=spent.claimed,
        epsilon_certified=spent.certified,
        relation=spent.relation,
        ms_per_step=1e3 * _median_step(clock, setting.steps_per_epoch),
        history=history,
        collapsed=int(of_scores(models.scores(model, data.x_test)).collapsed),
    )


class PrivacyCost(NamedTuple):
    """The epsilon of a run, as its paper claims it and as it is proved."""

    claimed: float
    certified: float
    relation: str


@lru_cache(maxsize=64)
def _spent(
    mechanism: Mechanism, shapes: tuple[tuple[int, ...], ...], run: tuple[tuple[str, Any], ...]
) -> PrivacyCost:
    """Return the cost of a run, cached: it is the same for every seed."""
    certificate = accounting.certify(mechanism.plan(shapes), **dict(run))
    claimed = accounting.claimed_epsilon(mechanism, **dict(run))
    return PrivacyCost(claimed, certificate.epsilon, certificate.relation)


def _median_step(clock: Sequence[float], steps_per_epoch: int) -> float:
    """Return the seconds of a step, without those that end with an evaluation if possible."""
    times = [after - before for before, after in pairwise(clock)]
    inside = [t for number, t in enumerate(times, start=1) if number % steps_per_epoch]
    return statistics.median(inside or times)
