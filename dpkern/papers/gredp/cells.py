"""Train cells of GReDP's tables and figures, seed by seed, each kept as soon as it is done."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...engine.demo import models
from ...engine.named import Run, make
from ...ops import update
from ...privacy import accounting
from ...privacy.mechanisms import DPSGD
from ...privacy.mechanisms.base import Mechanism
from .. import runner
from ..pieces import CachedRun, OnStep
from ..result import ComparisonRow
from ..runner import ItemRequest, RunSetting
from .published import EXPERIMENTS, SAME

DELTA = 1e-5
LEARNING_RATE, BATCH, EPOCHS = 0.01, 500, 30
"""The source's learning rate (the text has 0.001 too) and batch; it prints no number of epochs."""
QUICK_LEARNING_RATE, QUICK_BATCH, QUICK_EPOCHS, QUICK_ROWS = 0.5, 50, 2, 1000
"""The sizes of quick runs are ours: few steps need a larger rate."""
QUICK_PLAIN_RATE = 0.01
"""The rate of training without privacy in quick runs, with Adam."""

NAMES = {SAME: "gredp", "Spectral-DP": "spectral_dp", "GReDP": "gredp", "DP-SGD": "dpsgd"}


def setting(
    request: ItemRequest,
    name: str,
    method: str,
    *,
    batch: int | None = None,
    lr: float | None = None,
) -> RunSetting:
    """Return data, model and length of a run.

    Args:
        request: chooses rows, epochs, batch and learning rate; None leaves them to the source, in
            quick runs to us.
        name: one of ``EXPERIMENTS``.
        method: one of ``METHODS``, or ``SAME``.
        batch, lr: values that a figure is about.
    """
    experiment, quick = EXPERIMENTS[name], request.quick
    rows = request.rows or (QUICK_ROWS if quick else None)
    data = request.dataset(experiment.substitute, rows=rows, kind=experiment.kind)
    width = experiment.width if quick else 1.0
    batch = batch or request.batch_size or (QUICK_BATCH if quick else BATCH)
    lr = lr or request.lr or (QUICK_LEARNING_RATE if quick else LEARNING_RATE)
    # A few dozen plain steps learn nothing where gradients are not scaled to the bound.
    rule = update.Adam(lr=QUICK_PLAIN_RATE) if quick and method == "plain" else update.SGD(lr=lr)
    linear = "dense" if method in ("plain", "DP-SGD") else "circulant"
    return RunSetting(
        data=data,
        model=lambda seed: models.build(
            experiment.model,
            row_shape=data.row_shape,
            classes=data.classes,
            linear=linear,
            width=width,
            init_seed=seed,
        ),
        epochs=request.epochs or (QUICK_EPOCHS if quick else EPOCHS),
        batch_size=min(batch, len(data.x_train)),
        rule=rule,
        delta=DELTA,
    )


def mechanism(method: str, where: RunSetting, epsilon: float, *, clip: float = 1.0) -> Mechanism:
    """Return the published mechanism, its claim calibrated to ``epsilon``.

    ``plain`` neither clips nor adds noise.
    """
    if method == "plain":
        return DPSGD(noise_multiplier=0.0, max_grad_norm=math.inf)
    model = where.model(0)
    sigma = _sigma(epsilon, tuple(where.accounting().items()))
    # Without the clip of all lags nothing of the spectrum is left: real noise on the gradient.
    same = ("clip_domain=cropped",) if method == SAME else ()
    made, _ = make(
        NAMES[method],
        Run(
            model=model,
            row_shape=where.data.row_shape,
            classes=where.data.classes,
            steps=where.steps,
            sample_rate=where.accounting()["sample_rate"],
            rows=len(where.data.x_train),
            batch_size=where.batch_size,
            delta=where.delta,
        ),
        mode="published",
        settings=same,
        max_grad_norm=clip,
        epsilon=epsilon,
    )
    return made.with_noise_multiplier(sigma)


@lru_cache(maxsize=64)
def _sigma(epsilon: float, run: tuple[tuple[str, Any], ...]) -> float:
    """Return the multiplier that every claim rests on: DP-SGD's at this epsilon."""
    usual = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, mode="published")
    return accounting.calibrate(usual, target_epsilon=epsilon, **dict(run)).noise_multiplier


@dataclass(frozen=True, kw_only=True)
class AccuracyCell:
    """One accuracy of a table or figure.

    Attributes:
        name, method: of ``EXPERIMENTS``, and of ``METHODS`` or ``SAME``.
        epsilon: claimed by DP-SGD at this sigma.
        what: the row's setting.
        printed: the source's accuracy.
        clip, batch, lr: what the item is about; None is the usual one.
    """

    name: str
    method: str
    epsilon: float
    what: str
    printed: float | None
    clip: float = 1.0
    batch: int | None = None
    lr: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainedCell:
    """A cell's row, and held-out accuracy in per cent after every epoch, the mean over seeds."""

    row: ComparisonRow
    curve: list[float]


def trained(item: str, cells: Sequence[AccuracyCell], request: ItemRequest) -> list[TrainedCell]:
    """Train every seed of every cell, a piece each; what is finished is not computed again.

    Data are read, models built and noise calibrated for all cells before the first one is trained.
    """
    seeds = request.repeats(1)
    made = []
    for cell in cells:
        where = setting(request, cell.name, cell.method, batch=cell.batch, lr=cell.lr)
        made.append((where, mechanism(cell.method, where, cell.epsilon, clip=cell.clip)))
    pieces = [
        _piece(request, cell, *one, seed)
        for cell, one in zip(cells, made, strict=True)
        for seed in range(seeds)
    ]
    numbers = request.through(pieces)
    found = []
    for index, (cell, (where, _)) in enumerate(zip(cells, made, strict=True)):
        own = numbers[index * seeds : (index + 1) * seeds]
        found.append(_trained_cell(item, cell, request, where, own))
    return found


def _piece(
    request: ItemRequest, cell: AccuracyCell, where: RunSetting, made: Mechanism, seed: int
) -> CachedRun:
    experiment = EXPERIMENTS[cell.name]
    key = {
        "paper": "gredp",
        "model": experiment.model,
        "width": experiment.width if request.quick else 1.0,
        "method": cell.method,
        "mechanism": made.fingerprint,
        "data": where.data.source,
        "records": len(where.data.x_train),
        "held_out": len(where.data.x_test),
        "batch": where.batch_size,
        "rule": repr(where.rule),
        "epochs": where.epochs,
        "delta": where.delta,
        "seed": seed,
    }

    def compute(on_step: OnStep) -> Mapping[str, Any]:
        one = runner.once(where, made, seed, on_step=on_step)
        return {
            "accuracy": [100 * epoch.heldout_accuracy for epoch in one.history],
            "claimed": one.epsilon_claimed,
            "certified": one.epsilon_certified,
            "relation": one.relation,
            "ms_per_step": one.ms_per_step,
        }

    label = f"{cell.what}, seed {seed}"
    return CachedRun(label=label, key=key, compute=compute, steps=where.steps)


def _trained_cell(
    item: str,
    cell: AccuracyCell,
    request: ItemRequest,
    where: RunSetting,
    numbers: Sequence[Mapping[str, Any]],
) -> TrainedCell:
    last = [float(one["accuracy"][-1]) for one in numbers]
    first, plain = numbers[0], cell.method == "plain"
    experiment = EXPERIMENTS[cell.name]
    real = request.root(experiment.kind) is not None
    printed: float | str | None = cell.printed
    if printed is not None and not real:
        printed = f"{printed:g} on other data ({experiment.kind})"
    claimed = None if cell.method == SAME else float(first["claimed"])
    row = ComparisonRow(
        item=item,
        setting=cell.what,
        quantity="accuracy %",
        published=printed,
        ours=statistics.fmean(last),
        epsilon_claimed=None if plain else claimed,
        epsilon_certified=None if plain else float(first["certified"]),
        relation="" if plain else str(first["relation"]),
        data=where.data.source,
        seeds=len(last),
        spread=(max(last) - min(last)) / 2,
    )
    curves = zip(*(one["accuracy"] for one in numbers), strict=True)
    return TrainedCell(row=row, curve=[statistics.fmean(each) for each in curves])
