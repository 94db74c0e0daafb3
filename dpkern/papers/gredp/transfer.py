"""Table VII of GReDP: the last convolutions of a pre-trained ResNet-18, on other data.

The source publishes neither its weights nor the name of its data; the user brings weights in
torchvision's layout, and the data are CIFAR-10 or a substitute. The output layer has as many units
as the data have classes, so it is trained as well.

Source: GReDP, table VII.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from ...base.errors import InvalidInput
from ...ops import update
from ...privacy.accounting import shown_bound
from ..result import Panel, Result
from ..runner import ItemRequest, RunSetting
from ..seeded import SeededCell, over, train
from ..verdict import of_epsilon, of_order
from . import resnet18
from .cells import CLIP, DELTA, EPOCHS, QUICK_EPOCHS, QUICK_ROWS, mechanism
from .published import SAME
from .training import NOTES, PAPER

EPSILONS, QUICK_EPSILONS = (0.5, 1.0, 2.0), (2.0,)
LEARNING_RATE, BATCH, QUICK_BATCH = 0.001, 500, 100
METHODS = ("DP-SGD", "Spectral-DP", "GReDP", SAME)
PRINTED = {
    1: {
        "DP-SGD": (63.87, 65.98, 67.05),
        "Spectral-DP": (70.22, 74.37, 76.48),
        "GReDP": (70.86, 74.91, 77.21),
    },
    2: {
        "DP-SGD": (62.51, 65.70, 67.64),
        "Spectral-DP": (68.57, 75.34, 79.54),
        "GReDP": (69.96, 76.96, 80.94),
    },
}
"""Accuracies of table VII in per cent, by number of convolutions, for epsilon .5, 1, 2."""


def table7(request: ItemRequest) -> Result:
    """Train the last one or two convolutions of a pre-trained ResNet-18, for every method.

    Raises:
        InvalidInput: no weights, or a file that is not a ResNet-18's.
    """
    if request.weights is None:
        raise InvalidInput(
            "weights",
            expected="a file of the state_dict of torchvision.models.resnet18",
            got="none: the source's pre-trained network is not published",
            remedy="Add --weights FILE, and --train-last 1 or 2 for one of the two columns.",
        )
    counts = (1, 2) if request.train_last is None else (request.train_last,)
    epsilons = request.epsilons(QUICK_EPSILONS if request.quick else EPSILONS)
    places = [(c, method, e) for c in counts for method in METHODS for e in epsilons]
    cells = [_cell(request, *place) for place in places]
    found = dict(zip(places, train(request, cells, request.repeats(1)), strict=True))
    rows, panels, verdicts = [], [], []
    for (count, method, epsilon), runs in found.items():
        printed = dict(zip(EPSILONS, PRINTED[count].get(method, ()), strict=False))
        accuracy = printed.get(epsilon)
        value = None if accuracy is None else f"{accuracy:g} on unnamed data"
        what = f"{count} convolution{'s' * (count > 1)}, {method}, claimed epsilon"
        rows.append(
            runs.row(
                "table7",
                f"{what} {shown_bound(epsilon)}",
                published=value,
                epsilon_claimed=None if method == SAME else runs.claimed,
            )
        )
    for count in counts:
        lines = [
            over(method, epsilons, [found[count, method, e] for e in epsilons])
            for method in METHODS
        ]
        title = f"last {count} convolution{'s' * (count > 1)}"
        panels.append(
            Panel(title=title, x_label="claimed epsilon", y_label="accuracy %", lines=lines)
        )
        verdicts += [
            of_epsilon(
                f"{title}, {method}: the run spends epsilon {shown_bound(epsilons[0])}",
                found[count, method, epsilons[0]].claimed,
                found[count, method, epsilons[0]].certified,
                "" if method == "DP-SGD" else "G2, G3: half the variance, every layer clipped to c",
            )
            for method in METHODS[:3]
        ]
        verdicts += [
            of_order(
                f"{title}: GReDP is more accurate than {other}, claimed epsilon "
                f"{shown_bound(epsilons[-1])}",
                found[count, "GReDP", epsilons[-1]].last,
                found[count, other, epsilons[-1]].last,
                unit="points held out, mean over the seeds",
                hindrance="the source names neither its data nor its weights",
            )
            for other in ("DP-SGD", "Spectral-DP")
        ]
    notes = ("1Conv, 2Conv: the last convolutions and the new output layer are trained", *NOTES)
    result = PAPER.result("table7", "transfer learning", rows, panels, notes, quick=request.quick)
    return result.judged(verdicts)


def _cell(request: ItemRequest, count: int, method: str, epsilon: float) -> SeededCell:
    assert request.weights is not None
    where = _setting(request, count)
    label = f"{count} convolutions, {method}, epsilon {shown_bound(epsilon)}"
    about = {
        "paper": "gredp",
        "model": "resnet18",
        "weights": _digest(request.weights),
        "train_last": count,
        "method": method,
    }
    made = mechanism(method, where, epsilon, clip=request.max_grad_norm or CLIP)
    return SeededCell(label=label, setting=where, mechanism=made, about=about)


def _setting(request: ItemRequest, count: int) -> RunSetting:
    """Return the rows as the frozen trunk sees them, and the block that is trained on them."""
    quick = request.quick
    rows = request.rows or (QUICK_ROWS if quick else None)
    assert request.weights is not None
    trunk = _trunk(request.weights)
    data = request.dataset("synthetic-cifar10", rows=rows, kind="cifar10")
    x_train, x_test = _features(request.weights, data.source, data.x_train, data.x_test)
    return RunSetting(
        data=replace(data, x_train=x_train, x_test=x_test),
        model=lambda seed: trunk.head(data.classes, count, seed),
        epochs=request.epochs or (QUICK_EPOCHS if quick else EPOCHS),
        batch_size=min(request.batch_size or (QUICK_BATCH if quick else BATCH), len(x_train)),
        rule=update.SGD(lr=request.lr or LEARNING_RATE),
        delta=request.delta or DELTA,
    )


_known: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}


def _features(
    weights: str, source: str, train_rows: torch.Tensor, test_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the trunk's outputs, computed once for each file and data set."""
    key = _digest(weights), source
    if key not in _known:
        trunk = _trunk(weights)
        _known.clear()
        _known[key] = trunk.features(train_rows), trunk.features(test_rows)
    return _known[key]


@lru_cache(maxsize=1)
def _trunk(weights: str) -> resnet18.Trunk:
    return resnet18.load(weights)


@lru_cache(maxsize=4)
def _digest(weights: str) -> str:
    return hashlib.sha256(Path(weights).read_bytes()).hexdigest()[:32]


__all__ = ["table7"]
