"""Train cells of GReDP's tables and figures, seed by seed, each kept as soon as it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...engine.demo import models
from ...engine.named import Run, make
from ...ops import update
from ...privacy import accounting
from ...privacy.mechanisms import DPSGD
from ...privacy.mechanisms.base import Mechanism
from ..result import ComparisonRow
from ..runner import ItemRequest, RunSetting
from ..seeded import WITHOUT_PRIVACY, Control, SeededCell, SeededRuns, train
from .published import EXPERIMENTS, SAME

DELTA = 1e-5
LEARNING_RATE, BATCH, EPOCHS, CLIP = 0.01, 500, 30, 1.0
"""The source's learning rate (the text has 0.001 too), batch and clipping bound.

It prints no number of epochs.
"""
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
        delta=request.delta or DELTA,
    )


def mechanism(method: str, where: RunSetting, epsilon: float, *, clip: float = 1.0) -> Mechanism:
    """Return the published mechanism, its claim calibrated to ``epsilon``.

    ``plain`` neither clips nor adds noise.
    """
    if method == "plain":
        return WITHOUT_PRIVACY
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
    clip: float = CLIP
    batch: int | None = None
    lr: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainedCell:
    """A cell, its runs and its row."""

    cell: AccuracyCell
    runs: SeededRuns
    row: ComparisonRow
    same_data: bool
    departure: str
    control: str = ""

    @property
    def hindrance(self) -> str:
        """The reason that these runs decide nothing of the source's; empty where they do."""
        if not self.same_data:
            kind = EXPERIMENTS[self.cell.name].kind
            return f"measured on {self.row.data}, not on all of {kind} as published"
        return self.departure or self.runs.spoiled

    @property
    def accuracy_hindrance(self) -> str:
        """The same for a printed accuracy, which takes a rate and length that may be the source's.

        ``control`` says why ours are not; training without privacy is judged as it is.
        """
        return self.hindrance or ("" if self.cell.method == "plain" else self.control)

    def spent(self) -> list[float]:
        """Return the epsilon that is claimed after every epoch."""
        where, made = self.runs.cell.setting, self.runs.cell.mechanism
        run = where.accounting()
        epochs = range(1, len(self.runs.accuracy[0]) + 1)
        return [
            accounting.claimed_epsilon(made, **{**run, "steps": epoch * where.steps_per_epoch})
            for epoch in epochs
        ]


def trained(item: str, cells: Sequence[AccuracyCell], request: ItemRequest) -> list[TrainedCell]:
    """Train every seed of every cell, a piece each; what is finished is not computed again.

    Data are read, models built and noise calibrated for all cells before the first one is trained.
    """
    made = [_seeded(cell, request) for cell in cells]
    found = train(request, made, request.repeats(1))
    return [
        _trained_cell(item, cell, request, runs) for cell, runs in zip(cells, found, strict=True)
    ]


def controls(
    item: str, names: Sequence[str], found: Sequence[TrainedCell], request: ItemRequest
) -> list[Control]:
    """Return each model's training without privacy, trained now where the figure has none."""
    free = {one.cell.name: one for one in found if one.cell.method == "plain"}
    missing = [
        AccuracyCell(
            name=name,
            method="plain",
            epsilon=EXPERIMENTS[name].epsilon,
            what=f"{name}, plain",
            printed=EXPERIMENTS[name].printed["plain"],
        )
        for name in names
        if name not in free
    ]
    free |= {one.cell.name: one for one in trained(item, missing, request)}
    return [
        Control(name=name, ours=free[name].runs.found.mean, printed=free[name].row.published)
        for name in names
    ]


def _seeded(cell: AccuracyCell, request: ItemRequest) -> SeededCell:
    where = setting(request, cell.name, cell.method, batch=cell.batch, lr=cell.lr)
    experiment = EXPERIMENTS[cell.name]
    about = {
        "paper": "gredp",
        "model": experiment.model,
        "width": experiment.width if request.quick else 1.0,
        "method": cell.method,
    }
    clip = request.max_grad_norm or cell.clip
    made = mechanism(cell.method, where, cell.epsilon, clip=clip)
    return SeededCell(label=cell.what, setting=where, mechanism=made, about=about)


def _trained_cell(
    item: str, cell: AccuracyCell, request: ItemRequest, runs: SeededRuns
) -> TrainedCell:
    plain, experiment = cell.method == "plain", EXPERIMENTS[cell.name]
    genuine = request.genuine(experiment.kind)
    same = genuine and request.rows is None and not request.quick
    printed: float | str | None = cell.printed
    if printed is not None and not genuine:
        printed = f"{printed:g} on other data ({experiment.kind})"
    row = runs.row(
        item,
        cell.what,
        published=printed,
        epsilon_claimed=None if plain or cell.method == SAME else runs.claimed,
        epsilon_certified=None if plain else runs.certified,
        relation="" if plain else runs.relation,
        ms_per_step=runs.ms_per_step,
    )
    departure = request.departure(
        epochs=EPOCHS, batch_size=BATCH, lr=LEARNING_RATE, max_grad_norm=CLIP, delta=DELTA
    )
    return TrainedCell(cell=cell, runs=runs, row=row, same_data=same, departure=departure)
