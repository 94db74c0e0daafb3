"""Set up AdLM's experiments: data, networks and lengths, quick and at length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...base.devices import training_device
from ...base.threads import torch_threads
from ...objective.adlm import ARCHITECTURES, Architecture, pretrained
from ...objective.adlm_data import Labelled
from ...train import formats
from ...train.data import Dataset
from .. import data_cache, data_roots
from ..runner import ItemRequest

PUBLIC_SHARE = 0.2
"""The public share of the training records, for the corrected mode's relevances.

No run trains on them.
"""

DELTA = 1e-5
"""Delta of pSGD."""
PSGD_LR = 0.1
RELEVANCE_SHARE = LABEL_SHARE = 1 / 3
"""Parts of epsilon that pay for relevances and labels; inputs get the rest."""
MEASURED = 20
"""Number of times that a run's accuracy is measured, at least where it has as many epochs."""
THREADS = 1
"""Threads of a run: networks this small only wait for a second one."""


@dataclass(frozen=True, kw_only=True)
class AdlmExperiment:
    """One of the paper's two experiments.

    Attributes:
        name: name of its data.
        kind: the same, as ``--data KIND=FOLDER`` has it.
        substitute: the data where the user gives none; of quick runs.
        quick_substitute: the same for quick runs.
        architecture: its network.
        quick_architecture: the same for quick runs.
        batch: |L|; at most a tenth of the records.
        lot, clip: lot and clipping bound of pSGD; the lot at most a tenth of the records too.
        epsilons, quick_epsilons: grids of the curve over epsilon.
        curves: epsilons whose curves over epochs are printed.
        pretraining: epochs of the network that relevances come from.
        bar: share of its own records that this network must classify right.
        control, quick_control: per cent that training without noise must reach for a figure to be
            drawn.
        source_epochs: the source's, which the epochs of its figures are.
        epochs, quick_epochs, quick_rows: ours.
        shrink: pixels that become one, in quick runs.
        quick_pretraining: as ``pretraining``, in quick runs.
    """

    name: str
    kind: str
    substitute: str
    quick_substitute: str
    architecture: str
    quick_architecture: Architecture
    batch: int
    lot: int
    clip: float
    epsilons: tuple[float, ...]
    quick_epsilons: tuple[float, ...]
    curves: tuple[float, ...]
    pretraining: int
    bar: float
    control: float
    source_epochs: int
    epochs: int = 20
    quick_epochs: int = 16
    quick_rows: int = 600
    quick_control: float = 80.0
    shrink: int = 1
    quick_pretraining: int = 12


MNIST = AdlmExperiment(
    name="MNIST",
    kind="mnist",
    substitute="synthetic-mnist",
    quick_substitute="digits",
    architecture="mnist",
    quick_architecture=ARCHITECTURES["digits"],
    batch=1800,
    lot=600,
    clip=4.0,
    epsilons=(0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    quick_epsilons=(0.5, 2.0),
    curves=(0.5, 2.0),
    pretraining=12,
    bar=0.97,
    control=97.0,
    source_epochs=500,
)
CIFAR10 = AdlmExperiment(
    name="CIFAR-10",
    kind="cifar10",
    substitute="synthetic-cifar10",
    quick_substitute="synthetic-cifar10",
    architecture="cifar10",
    quick_architecture=ARCHITECTURES["digits"],
    batch=7200,
    lot=2000,
    clip=3.0,
    epsilons=(0.25, 0.5, 1.0, 2.0, 2.5, 4.0, 8.0),
    quick_epsilons=(2.5, 8.0),
    curves=(2.5, 8.0),
    pretraining=50,
    bar=0.7,
    control=70.0,
    source_epochs=800,
    quick_rows=500,
    quick_epochs=32,
    quick_control=30.0,
    shrink=4,
    quick_pretraining=100,
)


@dataclass(frozen=True, kw_only=True)
class ExperimentSetup:
    """The data and sizes that the runs of one request share.

    Attributes:
        experiment: the paper's ``AdlmExperiment``.
        private: the records that runs train on.
        public: records of the same kind that nothing protects.
        architecture: architecture of every network.
        genuine: whether the records are of the source's data set.
        same_data: whether they are all of them.
        batch, lot, epochs, lr: sizes and learning rate of every run.
        psgd_lr, delta: learning rate and delta of pSGD.
        shares: parts of epsilon that pay for relevances, inputs and labels.
        device: device that runs train on.
        control: per cent that training without noise must reach.
    """

    experiment: AdlmExperiment
    private: Labelled
    public: Labelled
    architecture: Architecture
    genuine: bool
    same_data: bool
    batch: int
    lot: int
    epochs: int
    lr: float
    psgd_lr: float
    delta: float
    shares: tuple[float, float, float]
    device: torch.device
    control: float

    @property
    def every(self) -> int:
        """The number of epochs from one measurement of accuracy to the next."""
        return max(1, self.epochs // MEASURED)

    @property
    def digest(self) -> str:
        """The digest of everything that runs train on or are measured by."""
        own, public = self.private, self.public
        return data_cache.digest(own.x, own.y, own.x_test, own.y_test, public.x, public.y)


def world(experiment: AdlmExperiment, request: ItemRequest) -> ExperimentSetup:
    """Load the user's data, else generated or embedded ones; quick runs take the first rows."""
    quick = request.quick
    experiment = replace(
        experiment,
        clip=request.max_grad_norm or experiment.clip,
        lot=int(request.number("psgd_lot", experiment.lot)),
    )
    relevance, labels = (
        request.number(f"{name}_share", usual)
        for name, usual in (("relevance", RELEVANCE_SHARE), ("label", LABEL_SHARE))
    )
    most = request.rows or (experiment.quick_rows if quick else None)
    usual = experiment.quick_substitute if quick else experiment.substitute
    given = request.root(experiment.kind)
    data = data_cache.load(given or usual)
    named = data_roots.read(request.data) is not None
    if given is not None and (named or formats.kind_of(Path(given)) is not None):
        data_roots.check(data, experiment.kind, given)
    if quick and len(data.row_shape) == 3 and experiment.shrink > 1:
        data = _smaller(data, experiment.shrink)
    rows = len(data.x_train)
    source = data.source
    if most is not None and rows > most:
        rows = most
        source = f"{source}, first {rows} rows"
    held = len(data.x_test) if most is None else min(len(data.x_test), most)
    count = round((1 - PUBLIC_SHARE) * rows)
    shape = (8, 8) if data.row_shape == (64,) else data.row_shape
    whole = Labelled(
        x=data.x_train[:count].reshape(-1, *shape),
        y=data.y_train[:count],
        x_test=data.x_test[:held].reshape(-1, *shape),
        y_test=data.y_test[:held],
        classes=data.classes,
        source=source,
        synthetic=source.startswith("synthetic"),
    )
    public = replace(
        whole, x=data.x_train[count:rows].reshape(-1, *shape), y=data.y_train[count:rows]
    )
    chosen = experiment.quick_architecture if quick else ARCHITECTURES[experiment.architecture]
    if not chosen.convolutions or len(shape) < 2:
        chosen = ARCHITECTURES["dense"]
    return ExperimentSetup(
        experiment=experiment,
        private=whole,
        public=public,
        architecture=chosen,
        genuine=request.genuine(experiment.kind),
        same_data=request.genuine(experiment.kind) and not quick and request.rows is None,
        batch=max(1, min(request.batch_size or experiment.batch, count // 10)),
        lot=max(1, min(experiment.lot, count // 10)),
        epochs=request.epochs or (experiment.quick_epochs if quick else experiment.epochs),
        lr=request.lr or 0.01,
        psgd_lr=request.number("psgd_lr", PSGD_LR),
        delta=request.delta or DELTA,
        shares=(relevance, 1 - relevance - labels, labels),
        device=training_device(request.device),
        control=experiment.quick_control if quick else experiment.control,
    )


def _smaller(data: Dataset, pixels: int) -> Dataset:
    """Average squares of pixels."""
    side = data.row_shape[-1] // pixels
    return replace(
        data,
        x_train=functional.avg_pool2d(data.x_train, pixels),
        x_test=functional.avg_pool2d(data.x_test, pixels),
        source=f"{data.source} reduced to {side} x {side}",
    )


@lru_cache(maxsize=4)
def _pretrained(experiment: str, request: ItemRequest, public: bool) -> nn.Sequential:
    chosen = MNIST if experiment == MNIST.name else CIFAR10
    here = world(chosen, request)
    data = here.public if public else here.private
    usual = chosen.quick_pretraining if request.quick else chosen.pretraining
    epochs = int(request.number("pretraining_epochs", usual))
    with one_thread():
        return pretrained(data, here.architecture, epochs=epochs, bar=chosen.bar)


def network(here: ExperimentSetup, request: ItemRequest, *, public: bool) -> nn.Sequential:
    """Pre-train the network that relevances come from, on the private or the public records."""
    return _pretrained(here.experiment.name, request, public)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to ``THREADS`` threads inside the block."""
    with torch_threads(THREADS):
        yield


def image(values: Tensor) -> list[list[float]]:
    """Return ``[C, H, W]`` or ``[H, W]`` as rows, the mean over channels."""
    flat = values.double().mean(0) if values.dim() == 3 else values.double()
    found: list[list[float]] = flat.reshape(-1, flat.shape[-1]).tolist()
    return found
