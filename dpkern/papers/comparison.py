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
from .result import Panel, Result
from .runner import ItemRequest, RunSetting
from .seeded import (
    WITHOUT_PRIVACY,
    Control,
    SeededCell,
    SeededRuns,
    over,
    train,
    with_controls,
)
from .verdict import TOO_QUICK, Verdict, of_order

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
        epochs=request.epochs or (15 if request.quick else EPOCHS),
        batch_size=min(request.batch_size or BATCH, len(data.x_train)),
        rule=update.SGD(lr=lr, momentum=request.number("momentum", MOMENTUM)),
        delta=request.delta or DELTA,
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


def _cell(
    request: ItemRequest, entry: ComparedMechanism, epsilon: float, lr: float, sigma: float | None
) -> SeededCell:
    """Return the training of an entry: calibrated, or published at the multiplier sigma."""
    where = task(request, lr)
    if sigma is None:
        made = calibrated(entry, where, epsilon)
    else:
        made = mechanism(entry, where, "published", sigma)
    return SeededCell(
        label=f"{entry.label}, epsilon {shown_bound(epsilon)}, lr {lr:g}",
        setting=where,
        mechanism=made,
        about={"paper": "comparison", "model": MODEL},
    )


def tuned(
    request: ItemRequest, pairs: Sequence[tuple[ComparedMechanism, float]]
) -> dict[tuple[str, float], float]:
    """Return the best rate of each entry's grid on the tuning seed by epsilon; quick: the middle.

    All of them are trained before the first one of the table, each kept as it is done.
    """
    if request.quick:
        return {
            (entry.label, epsilon): sorted(entry.grid)[len(entry.grid) // 2]
            for entry, epsilon in pairs
        }
    tries = [(entry, epsilon, lr) for entry, epsilon in pairs for lr in entry.grid]
    pieces = [_cell(request, *one, None).piece(TUNING_SEED) for one in tries]
    found: dict[tuple[str, float], dict[float, float]] = {}
    for (entry, epsilon, lr), numbers in zip(tries, request.through(pieces), strict=True):
        found.setdefault((entry.label, epsilon), {})[lr] = numbers["accuracy"][-1]
    return {key: max(of_it, key=lambda lr: of_it[lr]) for key, of_it in found.items()}


def table(request: ItemRequest) -> Result:
    """Tabulate test accuracy and time per step of every gradient mechanism."""
    seeds = request.repeats(1 if request.quick else SEEDS)
    epsilons = request.epsilons(EPSILONS[:1] if request.quick else EPSILONS)
    pairs = [(entry, e) for e in epsilons for entry in _chosen(CORRECTED, request)]
    best = tuned(request, pairs)
    rates: dict[str, dict[str, float]] = {}
    cells, labels = [], []
    for epsilon in epsilons:
        by_name: dict[str, float] = {}
        for entry in _chosen(CORRECTED, request):
            lr = best[entry.label, epsilon]
            by_name.setdefault(entry.name, lr)
            cells.append(_cell(request, entry, epsilon, lr, None))
            labels.append((entry.label, epsilon, lr, True))
        sigma = accounting.calibrate(
            DPSGD(noise_multiplier=1.0, max_grad_norm=1.0),
            target_epsilon=epsilon,
            **task(request, 1.0).accounting(),
        ).noise_multiplier
        for entry in _chosen(PUBLISHED, request):
            lr = by_name.get(entry.name, sorted(entry.grid)[1])
            cells.append(_cell(request, entry, epsilon, lr, sigma))
            labels.append((entry.label, epsilon, lr, False))
        rates[shown_bound(epsilon)] = by_name
    usual = next(iter(best.values()))
    free = replace(cells[0], label=f"without privacy, lr {usual:g}", mechanism=WITHOUT_PRIVACY)
    *found, control = train(request, [*cells, free], seeds)
    rows, lines = [], []
    for (label, epsilon, lr, corrected), runs in zip(labels, found, strict=True):
        note = "" if corrected else "published modes run at the multiplier of DP-SGD"
        what = (
            f"epsilon {shown_bound(epsilon)}: {label} (lr {lr:g}, {runs.ms_per_step:.1f} ms a step)"
        )
        rows.append(runs.row("comparison", what, ms_per_step=runs.ms_per_step, note=note))
    for epsilon in epsilons:
        own = [
            runs
            for (_, e, _, corrected), runs in zip(labels, found, strict=True)
            if e == epsilon and corrected
        ]
        places = [float(place) for place in range(1, len(own) + 1)]
        curve = over(f"certified epsilon {shown_bound(epsilon)}", places, own)
        lines.append(replace(curve, points=True))
    shown = [entry.label for entry in _chosen(CORRECTED, request)]
    panel = Panel(title="corrected modes", y_label="accuracy %", lines=lines, names=shown)
    result = Result(
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
        verdicts=_verdicts(labels, found, TOO_QUICK * request.quick),
    )
    return with_controls(result, [Control(ours=control.found.mean)])


def _verdicts(
    labels: Sequence[tuple[str, float, float, bool]],
    found: Sequence[SeededRuns],
    hindrance: str,
) -> list[Verdict]:
    """Judge, at equal certified epsilon, that each mechanism is more accurate than DP-SGD."""
    usual = {
        epsilon: runs
        for (label, epsilon, _, _), runs in zip(labels, found, strict=True)
        if label == CORRECTED[0].label
    }
    return [
        of_order(
            f"{label} is more accurate than DP-SGD, certified epsilon {shown_bound(epsilon)}",
            runs.last,
            usual[epsilon].last,
            unit="points held out, mean over the seeds",
            hindrance=hindrance or runs.spoiled,
        )
        for (label, epsilon, _, corrected), runs in zip(labels, found, strict=True)
        if corrected and label != CORRECTED[0].label
    ]


def _chosen(entries: Sequence[ComparedMechanism], request: ItemRequest) -> list[ComparedMechanism]:
    return [entry for entry in entries if not request.quick or entry.label in QUICK]


def _settings(request: ItemRequest, seeds: int) -> dict[str, Any]:
    where = task(request, 1.0)
    return {
        "model": MODEL,
        "batch": where.batch_size,
        "epochs": where.epochs,
        "momentum": request.number("momentum", MOMENTUM),
        "delta": where.delta,
        "seeds": seeds,
        "quick": request.quick,
    }
