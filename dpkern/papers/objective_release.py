"""Accuracy of the objective release over epsilon, by feature map; no paper prints it.

One release and one fit for every seed, on scikit-learn's digits or the user's data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..base.collapse import of_scores
from ..base.rng import Key
from ..base.threads import torch_threads
from ..objective import moments
from ..objective.feature_maps import MAPS, FeatureMap, to_radius
from ..privacy.accounting import shown_bound
from ..privacy.mechanisms import ObjectiveRelease
from ..train.data import Dataset
from . import intervals, runner
from .data_cache import digest
from .pieces import CachedRun, OnStep
from .result import ComparisonRow, Line, Panel, Paper, Result
from .runner import ItemRequest
from .seeded import Control, with_controls
from .verdict import of_epsilon

DELTA, RIDGES = 1e-5, (0.2, 0.4)
EPSILONS, QUICK_EPSILONS = (0.5, 1.0, 2.0, 2.93, 4.0, 8.0), (1.0, 2.0, 2.93)
SEEDS, QUICK_SEEDS = 20, 5
PAPER = Paper("objective-release", notes=runner.SEEDED)


def table(request: ItemRequest) -> Result:
    """Release and fit at every epsilon, for every feature map that the rows allow."""
    data = request.dataset("digits")
    images = len(data.row_shape) in (2, 3)
    maps = [each for each in MAPS if images or each in ("affine", "random")]
    epsilons = request.epsilons(QUICK_EPSILONS if request.quick else EPSILONS)
    delta = request.delta or DELTA
    ridges = tuple(
        request.number(f"ridge{number}", usual) for number, usual in enumerate(RIDGES, start=1)
    )
    seeds = request.repeats(QUICK_SEEDS if request.quick else SEEDS)
    cells = [(each, epsilon) for each in maps for epsilon in epsilons]
    # Features of a map are kept until those of the next one are needed.
    of_each_map = [(each, epsilon) for each in maps for epsilon in (*epsilons, math.inf)]
    made = {cell: _mechanism(data, *cell, delta) for cell in of_each_map}
    with torch_threads(1):
        pieces = [
            _piece(request, data, *cell, made[cell], seeds if cell in cells else 1, ridges)
            for cell in made
        ]
        numbers = dict(zip(made, request.through(pieces), strict=True))
    rows = [
        _row(data, *cell, ridge, made[cell], numbers[cell]) for cell in cells for ridge in ridges
    ]
    lines = []
    for each in maps:
        found = [intervals.interval(numbers[each, e]["accuracy"][str(ridges[0])]) for e in epsilons]
        y, half = [one.mean for one in found], [one.half for one in found]
        lines.append(Line(label=each, x=epsilons, y=y, half=half))
    panel = Panel(title=data.source, x_label="epsilon", y_label="accuracy %", lines=lines)
    title = "accuracy of the objective release"
    result = PAPER.result("", title, rows, [panel], quick=request.quick, delta=delta, ridges=ridges)
    least = min(numbers[each, math.inf]["accuracy"][str(ridges[0])][0] for each in maps)
    result = with_controls(result, [Control(ours=least)])
    return result.judged(
        [
            of_epsilon(
                f"{each}: a release for epsilon {shown_bound(epsilon)} pays for all training",
                epsilon,
                made[each, epsilon].epsilon_certified(),
            )
            for each, epsilon in cells
            if epsilon == epsilons[0]
        ]
    )


def _mechanism(data: Dataset, kind: str, epsilon: float, delta: float) -> ObjectiveRelease:
    length = FeatureMap(map=kind, row_shape=data.row_shape).length
    return ObjectiveRelease(epsilon=epsilon, delta=delta, length=length, classes=data.classes)


def _piece(
    request: ItemRequest,
    data: Dataset,
    kind: str,
    epsilon: float,
    mechanism: ObjectiveRelease,
    seeds: int,
    ridges: tuple[float, ...],
) -> CachedRun:
    key = {
        "paper": "objective-release",
        "data": data.source,
        "records": len(data.x_train),
        "held_out": len(data.x_test),
        "digest": digest(data.x_train, data.y_train, data.x_test, data.y_test),
        "features": repr(FeatureMap(map=kind, row_shape=data.row_shape)),
        "mechanism": mechanism.fingerprint,
        "ridges": ridges,
        "seeds": seeds,
    }

    def compute(on_step: OnStep) -> Mapping[str, Any]:
        train, test = _features(request.data, kind)
        shown = to_radius(test, mechanism.radius).double()
        counted = to_radius(train, mechanism.radius)
        sums = moments.contributions(mechanism, counted, data.y_train)
        found: dict[str, list[float]] = {str(ridge): [] for ridge in ridges}
        collapsed = dict.fromkeys(found, 0)
        for seed in range(seeds):
            noisy = moments.noised(mechanism, sums, Key.from_unsafe_seed(seed))
            released = moments.read(mechanism, noisy)
            for ridge in ridges:
                scores = shown @ released.solve(ridge=ridge).T
                right = float((scores.argmax(1) == data.y_test).double().mean())
                found[str(ridge)].append(100 * right)
                collapsed[str(ridge)] += of_scores(scores).collapsed
            on_step(seed + 1)
        return {"accuracy": found, "collapsed": collapsed}

    noise = f"epsilon {shown_bound(epsilon)}" if math.isfinite(epsilon) else "without noise"
    label = f"{kind}, {noise}"
    return CachedRun(label=label, key=key, compute=compute, steps=seeds)


@lru_cache(maxsize=1)
def _features(source: str | None, kind: str) -> tuple[Tensor, Tensor]:
    """Return features of training and held-out rows, before they are brought to a radius."""
    data = ItemRequest(data=source).dataset("digits")
    mapped = FeatureMap(map=kind, row_shape=data.row_shape)
    with torch.no_grad():
        return mapped.features(data.x_train), mapped.features(data.x_test)


def _row(
    data: Dataset,
    kind: str,
    epsilon: float,
    ridge: float,
    mechanism: ObjectiveRelease,
    numbers: Mapping[str, Any],
) -> ComparisonRow:
    values = numbers["accuracy"][str(ridge)]
    return ComparisonRow(
        item=PAPER.name,
        setting=f"{kind}, {mechanism.length} features, ridge {ridge:g}, epsilon "
        f"{shown_bound(epsilon)}",
        quantity="accuracy %",
        ours=statistics.fmean(values),
        epsilon_claimed=epsilon,
        epsilon_certified=mechanism.epsilon_certified(),
        relation=mechanism.relation,
        data=data.source,
        seeds=len(values),
        spread=(max(values) - min(values)) / 2,
        stopped=0,
        collapsed=numbers["collapsed"][str(ridge)],
    )
