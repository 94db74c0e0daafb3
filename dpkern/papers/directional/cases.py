"""Set up the directional paper's trainings: data, networks, lengths, and its generators of noise.

Learning rates are not published (ours: 0.1 on MNIST, 0.05 elsewhere). Quick runs take 1000 rows, 4
epochs and lots of 50.

Source: directional noise for DP-SGD, tables 1 and 2, figures 3 to 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from ...engine.demo import models
from ...ops import update
from ...privacy import accounting
from ...privacy.accounting import shown_bound
from ...privacy.mechanisms import AdaClip, Directional, Pruned
from ...privacy.mechanisms.base import Mechanism
from ..runner import ItemRequest, RunSetting
from ..seeded import WITHOUT_PRIVACY, SeededCell

DELTA = 1e-5
QUICK_ROWS, QUICK_EPOCHS, QUICK_LOT = 1000, 4, 50
QUICK_STEP = 0.3
"""Learning rate times alpha in quick runs: a few dozen steps must suffice."""
ADACLIP_START = 0.01
"""Scales of AdaClip at the start, at which it trains; printed is sqrt(h1 h2) = 3e-6."""


@dataclass(frozen=True, kw_only=True)
class DirectionalCase:
    """A column of table 1.

    Attributes:
        model: name in ``engine.demo.sources``.
        kind: its data set, as ``--data KIND=FOLDER`` names it.
        substitute: data where the user gives none.
        clip: alpha.
        lot: printed lot size.
        epochs: printed.
        lr: ours.
        epsilons: epsilons of figures 3 and 4.
        plain: printed accuracy without noise, percent.
        pruning: printed share of coordinates that is not released.
    """

    model: str
    kind: str
    substitute: str
    clip: float
    lot: int
    epochs: int
    lr: float
    epsilons: tuple[float, ...]
    plain: float
    pruning: float


CASES = {
    "MNIST": DirectionalCase(
        model="directional-lenet",
        kind="mnist",
        substitute="synthetic-mnist",
        clip=0.1,
        lot=512,
        epochs=60,
        lr=0.1,
        epsilons=(0.2, 0.5, 1.0),
        plain=98.32,
        pruning=0.0,
    ),
    "SVHN": DirectionalCase(
        model="directional-alexnet",
        kind="svhn",
        substitute="synthetic-svhn",
        clip=2.0,
        lot=256,
        epochs=30,
        lr=0.05,
        epsilons=(1.0, 5.0, 10.0),
        plain=93.01,
        pruning=0.9,
    ),
    "CIFAR-10": DirectionalCase(
        model="directional-resnet18",
        kind="cifar10",
        substitute="synthetic-cifar10",
        clip=2.0,
        lot=256,
        epochs=100,
        lr=0.05,
        epsilons=(1.0, 5.0, 15.0),
        plain=91.43,
        pruning=0.9,
    ),
}


@dataclass(frozen=True, kw_only=True)
class GeneratorRequest:
    """A run that a generator of noise is made for, with its claimed epsilon, alpha and pruning.

    ``start`` is the scale that AdaClip starts at where it trains.
    """

    where: RunSetting
    epsilon: float
    clip: float
    pruning: float
    start: float = ADACLIP_START


def _directional(
    asked: GeneratorRequest, *, generator: str, split: float | None = None
) -> Mechanism:
    where = asked.where
    share: dict[str, Any] = {} if split is None else {"budget_split": split}
    made = Directional(
        max_grad_norm=asked.clip,
        epsilon=asked.epsilon,
        delta=where.delta,
        steps=where.steps,
        sample_rate=where.accounting()["sample_rate"],
        generator=generator,
        mode="published",
        **share,
    )
    if not asked.pruning:
        return made
    return Pruned(
        inner=made,
        expected_batch_size=where.batch_size,
        ratio=asked.pruning,
        mask="published",
    )


def _adaclip(asked: GeneratorRequest, *, printed: bool) -> Mechanism:
    made = AdaClip(
        noise_multiplier=1.0,
        expected_batch_size=asked.where.batch_size,
        initial_scale=None if printed else asked.start,
        # Exact sums would write out the scaled gradient of every record.
        arithmetic="float",
        mode="published",
    )
    run = asked.where.accounting()
    return accounting.calibrate(made, target_epsilon=asked.epsilon, to="claimed", **run)


def _plain(asked: GeneratorRequest) -> Mechanism:
    del asked
    return WITHOUT_PRIVACY


PLAIN, GAUSSIAN, ADACLIP, ISOTROPIC, OURS = (
    "unperturbed",
    "Gaussian",
    "AdaClip",
    "Ours (w=1)",
    "Ours (1/8)",
)
_STARTS_AT = "AdaClip, scales start at {:g}"
ADACLIP_TRAINS = _STARTS_AT.format(ADACLIP_START)
GENERATORS: MappingProxyType[str, Callable[[GeneratorRequest], Mechanism]] = MappingProxyType(
    {
        PLAIN: _plain,
        GAUSSIAN: partial(_directional, generator="gaussian"),
        ADACLIP: partial(_adaclip, printed=True),
        ADACLIP_TRAINS: partial(_adaclip, printed=False),
        ISOTROPIC: partial(_directional, generator="ours_w1"),
        OURS: partial(_directional, generator="ours"),
        "Ours (1/4)": partial(_directional, generator="ours", split=1 / 4),
        "Ours (1/3)": partial(_directional, generator="ours", split=1 / 3),
    }
)
"""Makers of mechanisms, claimed at an epsilon; the fraction pays for the importance."""


def setting(
    request: ItemRequest, name: str, *, lot: int | None = None, plain: bool = False
) -> RunSetting:
    """Return data, network and length of a run; the request's sizes replace the source's."""
    case, quick = CASES[name], request.quick
    rows = request.rows or (QUICK_ROWS if quick else None)
    data = request.dataset(case.substitute, rows=rows, kind=case.kind)
    usual = request.batch_size or (QUICK_LOT if quick else case.lot)
    lr = request.lr or (QUICK_STEP / (request.max_grad_norm or case.clip) if quick else case.lr)
    return RunSetting(
        data=data,
        model=lambda seed: models.build(
            case.model, row_shape=data.row_shape, classes=data.classes, init_seed=seed
        ),
        epochs=request.epochs or (QUICK_EPOCHS if quick else case.epochs),
        batch_size=min(lot or usual, len(data.x_train)),
        # The few steps of quick runs need a rate that gradients of no bound cannot take.
        rule=update.Adam(lr=0.01) if plain and quick else update.SGD(lr=lr),
        delta=request.delta or DELTA,
    )


def shown(kind: str, request: ItemRequest) -> str:
    """Return a generator's name in rows and legends: with the start that AdaClip was asked for."""
    start = request.number("adaclip_start", ADACLIP_START)
    return _STARTS_AT.format(start) if kind == ADACLIP_TRAINS else kind


def cell(
    request: ItemRequest,
    name: str,
    kind: str,
    epsilon: float,
    *,
    lot: int | None = None,
    clip: float | None = None,
    pruning: float | None = None,
    what: str = "",
) -> SeededCell:
    """Return the training of a data set with a generator, claimed at ``epsilon``.

    Args:
        request: sizes and data.
        name: one of ``CASES``.
        kind: one of ``GENERATORS``.
        epsilon: claimed.
        lot, clip, pruning: values that a figure is about; None takes the source's.
        what: the same in words.
    """
    case = CASES[name]
    where = setting(request, name, lot=lot, plain=kind == PLAIN)
    asked = GeneratorRequest(
        where=where,
        epsilon=epsilon,
        clip=clip or request.max_grad_norm or case.clip,
        pruning=case.pruning if pruning is None else pruning,
        start=request.number("adaclip_start", ADACLIP_START),
    )
    # Without noise no bound and no epsilon changes anything: such runs are shared.
    label = f"{name}, {shown(kind, request)}, epsilon {shown_bound(epsilon)}"
    return SeededCell(
        label=label + f", {what}" * bool(what),
        setting=where,
        mechanism=GENERATORS[kind](asked),
        about={"paper": "directional", "model": case.model},
    )
