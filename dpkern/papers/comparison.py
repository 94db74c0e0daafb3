"""Compare all gradient mechanisms on one task, corrected ones at equal certified epsilon.

The task is scikit-learn's digits with the small LeNet-5 of ``dpkern train``, Poisson batches, the
add-or-remove relation and one delta: what differs is the mechanism. Published modes run at the
multiplier of DP-SGD, beside what they then certify. The learning rate of every corrected mechanism
is the best of a grid on a seed that the table does not use, on the same public data; a published
mode takes its corrected mode's. Private projected SGD and randomized response live under relations
of their own and have tables of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..engine.demo import models
from ..engine.named import Run, make
from ..ops import update
from ..privacy import accounting
from ..privacy.accounting import shown_bound
from ..privacy.mechanisms import DPSGD
from ..privacy.mechanisms.base import Mechanism
from . import runner
from .result import ComparisonRow, Line, Panel, Result
from .runner import ItemRequest, RunOutcome, RunSetting

EPSILONS = (3.0, 1.0)
DELTA = 1e-5
MODEL, BATCH, EPOCHS = "lenet5", 400, 30
MOMENTUM = 0.9
TUNING_SEED = 1000
SEEDS = 5


@dataclass(frozen=True, kw_only=True)
class ComparedMechanism:
    """The mechanism of one row.

    Attributes:
        label: label in the table.
        name: name that ``dpkern train --mechanism`` takes.
        settings: values of ``--set``.
        clipping: value of ``--clipping``.
        grid: learning rates to try, for the optimizer with momentum.
    """

    label: str
    name: str
    settings: tuple[str, ...] = ()
    clipping: str | None = None
    grid: tuple[float, ...] = (0.1, 0.3, 1.0)


CORRECTED = (
    ComparedMechanism(label="DP-SGD, flat", name="dpsgd"),
    ComparedMechanism(label="DP-SGD, per layer", name="dpsgd", clipping="per_layer"),
    ComparedMechanism(label="DP-SGD, automatic", name="dpsgd", clipping="automatic"),
    ComparedMechanism(label="Laplace SGD", name="laplace_sgd"),
    ComparedMechanism(label="Spectral-DP, whitened clip", name="spectral_dp"),
    ComparedMechanism(
        label="Spectral-DP, spectrum clip", name="spectral_dp", settings=("clip_domain=spectrum",)
    ),
    ComparedMechanism(label="GReDP", name="gredp"),
    ComparedMechanism(label="Directional, isotropic", name="directional"),
    ComparedMechanism(
        label="Directional, elliptic",
        name="directional",
        settings=("shape=elliptic",),
    ),
    # The printed start sqrt(h1 h2) is too small to leave within this many steps.
    ComparedMechanism(
        label="AdaClip, scales start at .01", name="adaclip", settings=("initial_scale=.01",)
    ),
    ComparedMechanism(label="Pruned, mask of the step before", name="pruned", grid=(0.3, 1.0, 3.0)),
)
PUBLISHED = (
    ComparedMechanism(label="Laplace SGD, published", name="laplace_sgd"),
    ComparedMechanism(label="Spectral-DP, published", name="spectral_dp"),
    ComparedMechanism(label="GReDP, published", name="gredp"),
    ComparedMechanism(
        label="Directional (Ours, w of the lot), published",
        name="directional",
        settings=("importance_multiplier=8",),
    ),
    ComparedMechanism(label="AdaClip, published start", name="adaclip"),
    ComparedMechanism(label="Pruned, published", name="pruned", grid=(0.3, 1.0, 3.0)),
)
QUICK = ("DP-SGD, flat", "Spectral-DP, whitened clip", "GReDP", "GReDP, published")


def task(request: ItemRequest, lr: float) -> RunSetting:
    """Return the task: digits and LeNet-5; 15 epochs in quick runs."""
    data = request.dataset("digits")
    return RunSetting(
        data=data,
        model=lambda seed: models.build(
            MODEL, row_shape=data.row_shape, classes=data.classes, init_seed=seed
        ),
        epochs=15 if request.quick else EPOCHS,
        batch_size=BATCH,
        rule=update.SGD(lr=lr, momentum=MOMENTUM),
        delta=DELTA,
    )


def mechanism(
    entry: ComparedMechanism, where: RunSetting, mode: str, multiplier: float
) -> Mechanism:
    """Make the entry's mechanism at this noise multiplier."""
    made, _ = make(
        entry.name,
        Run(
            model=where.model(0),
            row_shape=where.data.row_shape,
            classes=where.data.classes,
            steps=where.steps,
            sample_rate=where.accounting()["sample_rate"],
            rows=len(where.data.x_train),
            batch_size=where.batch_size,
            delta=where.delta,
        ),
        mode=mode,
        settings=entry.settings,
        noise_multiplier=multiplier,
        clipping=entry.clipping,
    )
    return made


def calibrated(entry: ComparedMechanism, where: RunSetting, epsilon: float) -> Mechanism:
    """Return the corrected mechanism with the least noise that is certified for ``epsilon``."""
    return accounting.calibrate(
        mechanism(entry, where, "corrected", 1.0), target_epsilon=epsilon, **where.accounting()
    )


def tuned(request: ItemRequest, entry: ComparedMechanism, epsilon: float) -> float:
    """Return the best learning rate of the entry's grid on the tuning seed; quick: the middle."""
    if request.quick:
        return sorted(entry.grid)[len(entry.grid) // 2]
    found = {}
    for lr in entry.grid:
        where = task(request, lr)
        made = calibrated(entry, where, epsilon)
        found[lr] = runner.once(where, made, TUNING_SEED).accuracy
    return max(found, key=lambda lr: found[lr])


def table(request: ItemRequest) -> Result:
    """Tabulate test accuracy and time per step of every gradient mechanism."""
    seeds = request.repeats(1 if request.quick else SEEDS)
    rows: list[ComparisonRow] = []
    lines = []
    rates: dict[str, dict[str, float]] = {}
    for epsilon in EPSILONS[:1] if request.quick else EPSILONS:
        best: dict[str, float] = {}
        points = []
        for entry in _chosen(CORRECTED, request):
            lr = tuned(request, entry, epsilon)
            best.setdefault(entry.name, lr)
            where = task(request, lr)
            found = runner.run(where, calibrated(entry, where, epsilon), seeds=seeds)
            rows.append(_row(entry.label, epsilon, lr, where, found))
            points.append(found.accuracy)
        sigma = accounting.calibrate(
            DPSGD(noise_multiplier=1.0, max_grad_norm=1.0),
            target_epsilon=epsilon,
            **task(request, 1.0).accounting(),
        ).noise_multiplier
        for entry in _chosen(PUBLISHED, request):
            lr = best.get(entry.name, sorted(entry.grid)[1])
            where = task(request, lr)
            found = runner.run(where, mechanism(entry, where, "published", sigma), seeds=seeds)
            row = _row(entry.label, epsilon, lr, where, found)
            rows.append(replace(row, note="published modes run at the multiplier of DP-SGD"))
        rates[shown_bound(epsilon)] = best
        lines.append(
            Line(
                label=f"certified epsilon {shown_bound(epsilon)}",
                x=range(1, len(points) + 1),
                y=points,
                points=True,
            )
        )
    panel = Panel(title="corrected modes", x_label="row", y_label="accuracy %", lines=lines)
    return Result(
        paper="comparison",
        item="",
        title="gradient mechanisms on digits",
        rows=rows,
        panels=[panel],
        notes=(
            "corrected modes at equal certified epsilon, add or remove one row, Poisson batches",
            "learning rates: best of a grid on one public seed outside the table, per mechanism",
            "ms per step: capture, clipping, noise and update together, median over the steps",
            *runner.SEEDED,
        ),
        settings=_settings(request, seeds) | {"learning_rates": rates},
    )


def _chosen(entries: Sequence[ComparedMechanism], request: ItemRequest) -> list[ComparedMechanism]:
    return [entry for entry in entries if not request.quick or entry.label in QUICK]


def _row(
    label: str, epsilon: float, lr: float, where: RunSetting, found: RunOutcome
) -> ComparisonRow:
    return ComparisonRow(
        item="comparison",
        setting=f"epsilon {shown_bound(epsilon)}: {label} "
        f"(lr {lr:g}, {found.ms_per_step:.1f} ms per step)",
        quantity="accuracy %",
        ours=found.accuracy,
        epsilon_claimed=found.epsilon_claimed,
        epsilon_certified=found.epsilon_certified,
        relation=found.relation,
        data=where.data.source,
        seeds=found.seeds,
        spread=found.spread,
        ms_per_step=found.ms_per_step,
    )


def _settings(request: ItemRequest, seeds: int) -> dict[str, Any]:
    where = task(request, 1.0)
    return {
        "model": MODEL,
        "batch": BATCH,
        "epochs": where.epochs,
        "momentum": MOMENTUM,
        "delta": DELTA,
        "seeds": seeds,
        "quick": request.quick,
    }
