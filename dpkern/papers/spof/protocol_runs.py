"""Runs in SPOF's authors' own protocol: data, methods, and their numbers by epsilon.

Every run has rows of its own making (``released.expanded``); the authors stored one such table. The
methods are those that give the published runs: the noisy ones of SPOF have the scale of an earlier
script, and stand beside those of the stored one.

Source: the repository theorycoder/distributedautoencoders, commit b92bab58.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from ...base.errors import InvalidInput
from ...base.validate import positive
from ...objective import _columns, records
from ..pieces import CachedRun, OnStep
from ..runner import ItemRequest
from . import raw_results
from .raw_results import EPSILONS, TABLE, RawResults
from .released import (
    CLIP,
    CONSTANT,
    DPSGD,
    FEATURES,
    FM,
    LOSS,
    NON_PRIVATE,
    RATE,
    RECORD,
    SPOF,
    ReleasedMethod,
    ReleasedTraining,
    constant_accuracy,
    expanded,
)

ROWS = 456
COPIES, QUICK_COPIES = (20, 4), (20,)
RUNS, QUICK_RUNS = 10, 2

SIGMA = 5.0
"""Standard deviation of the sensors' noise in the noisy condition."""
NOISY_SPOF = ReleasedMethod(name=SPOF, sigma=SIGMA, constant_over_epsilon=False)
STORED_NOISY_SPOF = ReleasedMethod(name=SPOF, sigma=SIGMA)
AS_RELEASED = tuple(
    NOISY_SPOF if (name, sigma) == (SPOF, SIGMA) else ReleasedMethod(name=name, sigma=sigma)
    for sigma in (0.0, SIGMA)
    for name in (SPOF, DPSGD, FM, NON_PRIVATE)
)
NO_NOISE = ReleasedMethod(name=SPOF, noise=False)
PRINTED = ReleasedMethod(name=SPOF, target=RECORD, gradient=LOSS)
PRINTED_NO_NOISE = ReleasedMethod(name=SPOF, target=RECORD, gradient=LOSS, noise=False)
LABELS = {
    STORED_NOISY_SPOF: "SPOF, all of its scale over epsilon as in the stored script",
    NO_NOISE: "SPOF without its noise",
    PRINTED: "SPOF with the record as target, gradient of the loss",
    PRINTED_NO_NOISE: "SPOF with the record as target, gradient of the loss, without its noise",
}


@dataclass(frozen=True)
class Protocol:
    """The data and the length of the item.

    Attributes:
        rows: float64 ``[456, 14]``, before the expansion.
        copies: stages of the expansion.
        runs: repetitions.
        data: name of the data in rows.
        raw: the authors' own runs, if they stand beside the data.
        numbers: fields of every method that are not the source's.
        sensor_noise: standard deviation of the sensors' noise in the noisy condition.
    """

    rows: torch.Tensor
    copies: tuple[int, ...]
    runs: int
    data: str
    raw: RawResults | None
    numbers: Mapping[str, float] = field(default_factory=dict)
    sensor_noise: float = SIGMA

    def adapted(self, method: ReleasedMethod) -> ReleasedMethod:
        """Return the method with the numbers that were asked for."""
        sigma = self.sensor_noise if method.sigma else 0.0
        changed: dict[str, Any] = {"sigma": sigma, **self.numbers}
        return replace(method, **changed)

    @property
    def steps(self) -> int:
        """The number of steps of a run: batch 1, one epoch of 80 % of the rows."""
        return int(0.8 * len(self.rows) * math.prod(self.copies))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.rows.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class ProtocolRuns:
    """The runs of a method, by epsilon; ``spread`` is that of the outputs over the records."""

    accuracy: Mapping[float, Sequence[float]]
    mean: Mapping[float, Sequence[float]]
    spread: Mapping[float, Sequence[float]]
    curve: Sequence[Sequence[float]]

    def finite(self, epsilon: float) -> list[float]:
        """Return the accuracies of the runs that did not overflow."""
        return [a for a in self.accuracy[epsilon] if math.isfinite(a)]


def train(
    request: ItemRequest,
    where: Protocol,
    methods: Sequence[ReleasedMethod] = (*AS_RELEASED, *LABELS),
) -> dict[ReleasedMethod, ProtocolRuns]:
    """Train every method, or read what was finished before."""
    numbers = request.through([_piece(where, method) for method in methods])
    return {method: _runs(method, of_it) for method, of_it in zip(methods, numbers, strict=True)}


def protocol(request: ItemRequest) -> Protocol:
    for name in ("rows", "epochs"):
        if getattr(request, name) is not None:
            raise InvalidInput(
                name,
                expected="none: the protocol fixes it",
                got=getattr(request, name),
                remedy=f"Leave --{name} out.",
            )
    raw, data = None, "synthetic: generated"
    given = request.root("fitbit")
    if given is None:
        made = records.generated(users=1, records=ROWS, features=FEATURES)
        rows = made.train[0].double()
    else:
        rows, data, raw = _given(Path(given))
    quick = request.quick
    asked = {
        "shift": request.number("constant", CONSTANT),
        "clip": request.max_grad_norm or CLIP,
        "rate": request.lr or RATE,
    }
    source = {"shift": CONSTANT, "clip": CLIP, "rate": RATE}
    numbers = {name: value for name, value in asked.items() if value != source[name]}
    noise = positive(sensor_noise=request.number("sensor_noise", SIGMA))
    return Protocol(
        rows=rows,
        copies=QUICK_COPIES if quick else COPIES,
        runs=request.repeats(QUICK_RUNS if quick else RUNS),
        data=data + (", expanded" if not quick else f", expanded {QUICK_COPIES[0]} times only"),
        # A quarter of the rows, or other numbers, are another experiment than the published one.
        raw=None if quick or numbers or noise != SIGMA else raw,
        numbers=numbers,
        sensor_noise=noise,
    )


def _given(path: Path) -> tuple[torch.Tensor, str, RawResults | None]:
    """Load the authors' table with their runs beside it, or rows of another table."""
    file = path / TABLE if path.is_dir() else path
    if not file.is_file():
        raise InvalidInput(
            "data",
            expected=f"a CSV file, or the folder of the released code that holds {TABLE}",
            got=str(path),
            remedy="Pass the path of a table that exists.",
        )
    if file.name != TABLE:
        own = records.load(file, users=1, features=FEATURES)
        return torch.cat([own.train[0], own.test[0]]).double(), str(file), None
    columns = _columns.read(file)
    cells = [columns.numbers(name) for name in columns.names]
    # The file has one row more than the authors' training read.
    rows = torch.tensor(cells, dtype=torch.float64).T.contiguous()[:ROWS]
    if rows.shape != (ROWS, FEATURES) or not bool((rows >= 0).all()):
        raise InvalidInput(
            "data",
            expected=f"{ROWS} rows of {FEATURES} numbers, none of them negative",
            got=f"{file}: {' x '.join(map(str, rows.shape))}",
            remedy=f"Restore {TABLE} from the released code.",
        )
    raw = raw_results.load(file.parent) if raw_results.is_authors_table(file) else None
    return rows, f"{file.name}, {len(rows)} rows", raw


def as_released(name: str, sigma: float) -> ReleasedMethod:
    """Return the method whose runs were published under this name and condition."""
    return next(one for one in AS_RELEASED if (one.name, one.sigma) == (name, sigma))


def expansions_differ(where: Protocol) -> float:
    """Return the standard deviation, over expansions, of the accuracy of outputs that are 0.

    The authors' runs share one expansion, so this is an error of every one of their means.
    """
    if where.runs < 2:
        return 0.0
    return statistics.stdev(
        constant_accuracy(expanded(where.rows, seed, copies=where.copies), 0.0)
        for seed in range(where.runs)
    )


def label(where: Protocol, method: ReleasedMethod) -> str:
    usual = replace(method, shift=CONSTANT)
    return (
        LABELS.get(usual, method.name)
        + (f", c {method.shift:g}" if method != usual else "")
        + (f", sensors' noise {where.sensor_noise:g}" if method.sigma else "")
    )


def epsilons(method: ReleasedMethod) -> tuple[float, ...]:
    """Return the epsilons of a method's runs: without noise all are the same runs."""
    return EPSILONS if method.noise and method.name != NON_PRIVATE else (1.0,)


def _piece(where: Protocol, method: ReleasedMethod) -> CachedRun:
    return CachedRun(
        label=label(where, method),
        key={
            "training": "spof released",
            "rows": where.digest,
            "copies": where.copies,
            "runs": where.runs,
            "method": asdict(where.adapted(method)),
            "epsilons": epsilons(method),
        },
        compute=partial(_compute, where, method),
        steps=where.steps,
    )


def _compute(where: Protocol, method: ReleasedMethod, on_step: OnStep) -> dict[str, Any]:
    pairs = [(epsilon, seed) for epsilon in epsilons(method) for seed in range(where.runs)]
    budgets, seeds = zip(*pairs, strict=True)
    data = lru_cache(partial(expanded, where.rows, copies=where.copies))
    return asdict(ReleasedTraining(where.adapted(method), budgets, seeds, data).run(on_step))


def _runs(method: ReleasedMethod, numbers: Mapping[str, Any]) -> ProtocolRuns:
    each = epsilons(method)
    runs = len(numbers["accuracy"]) // len(each)

    def by_epsilon(name: str) -> dict[float, list[float]]:
        return {e: numbers[name][i * runs : (i + 1) * runs] for i, e in enumerate(each)}

    return ProtocolRuns(
        accuracy=by_epsilon("accuracy"),
        mean=by_epsilon("output_mean"),
        spread=by_epsilon("output_spread"),
        curve=numbers["spreads"],
    )
