"""Execute the autoencoder's private steps with counting numbers, as the proof of ``op_count``.

A trace does what the steps must do, so it squares with one multiplication and leaves nothing out;
``differences`` itemises what the paper counts otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..base import validate as check
from ..base.counts import Counts, Item, Itemised
from ..base.errors import InvalidInput
from .autoencoder import FORMS, PRINTED, CountOptions, executed, op_count
from .scalar import Number, OpCounter, select
from .table_read import TableReader


@dataclass(frozen=True, kw_only=True)
class CountTrace:
    """The counts and outputs of an execution.

    Attributes:
        counted: operations by the items of ``op_count``.
        outputs: ``alpha2``, ``alpha3`` and, for SPOF, ``decoder``; for DP-SGD ``gradient``.
    """

    counted: Itemised
    outputs: Mapping[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The inputs of one user's step.

    Attributes:
        x: n features in [0, 1].
        hidden: the code h of length l in (0, 1).
        decoder: the user's n l decoder weights.
        table: samples of unit noise, a power of two of them.
        stride, base: stride and base of the table's reader.
        epsilon: epsilon of the step.
        c: stabilisation constant (SPOF).
        a: expansion point (DP-SGD).
        clip: bound C (DP-SGD).
    """

    x: Sequence[float]
    hidden: Sequence[float]
    decoder: Sequence[float]
    table: Sequence[float]
    stride: int = 1
    base: int = 0
    epsilon: float = 1.0
    c: float = 2.5
    a: float = 0.0
    clip: float = 4.0

    def __post_init__(self) -> None:
        n, code = len(self.x), len(self.hidden)
        check.integer(1, features=n)
        check.integer(1, n, code=code)
        for name in ("epsilon", "clip"):
            check.positive(**{name: getattr(self, name)})
        size = len(self.table)
        for name, good, expected, got in (
            ("decoder", len(self.decoder) == n * code, f"{n * code} weights", len(self.decoder)),
            ("table", size > 0 and size & (size - 1) == 0, "a power of two of samples", size),
        ):
            if not good:
                raise InvalidInput(name, expected=expected, got=got, remedy=f"Pass {expected}.")


def op_trace(
    system: str,
    sample: Sample,
    *,
    options: CountOptions = PRINTED,
    newton_steps: int | None = None,
) -> CountTrace:
    """Do the steps of ``spof``, ``dpsgd-da`` or ``fm`` and count them.

    ``counted`` equals ``op_count(system, n, l, executed(options))`` item by item, but for their
    notes. Of the options those count that change what is done: ``a_zero_shortcut``,
    ``shared_exp``, ``alpha3_by_shift``, ``gate_weight``. ``newton_steps`` does the square root so.

    Raises:
        InvalidInput: another system; ``a_zero_shortcut`` where a is not 0.
    """
    check.choice(tuple(FORMS), system=system)
    if options.a_zero_shortcut and sample.a != 0:
        raise InvalidInput(
            "a_zero_shortcut",
            expected="a = 0",
            got=sample.a,
            remedy="Set a_zero_shortcut=False, or a=0.",
        )
    tally = OpCounter(newton_steps=newton_steps, gate_weight=options.gate_weight)
    if system == "dpsgd-da":
        outputs = _dpsgd(sample, options, tally)
    else:
        outputs = _functional(sample, options, tally, stabilised=system == "spof")
    return CountTrace(counted=tally.itemised, outputs=outputs)


def differences(
    system: str,
    n: int,
    code: int,
    *,
    counted: Itemised | None = None,
    options: CountOptions = PRINTED,
) -> tuple[Item, ...]:
    """Return item by item what ``counted`` has beyond ``op_count(system, n, code, options)``.

    ``counted`` is by default an execution's closed form; counts are negative where the paper counts
    too much.
    """
    expected = _by_name(op_count(system, n, code, executed(options)))
    found = expected if counted is None else _by_name(counted)
    said = _by_name(op_count(system, n, code, options))
    gaps = (
        (name, found.get(name, Counts()) - said.get(name, Counts()))
        for name in {**said, **expected, **found}
    )
    return tuple(Item(name=name, counts=gap) for name, gap in gaps if gap)


def _by_name(itemised: Itemised) -> dict[str, Counts]:
    return {item.name: item.counts for item in itemised.items}


def _functional(
    sample: Sample, options: CountOptions, tally: OpCounter, *, stabilised: bool
) -> dict[str, list[float]]:
    """Compute noisy coefficients, and SPOF's shifted decoder: Steps 3 and 5 of Algorithm 1."""
    n = len(sample.x)
    outputs: dict[str, list[float]] = {}
    unit = 1 / (math.sqrt(2) * sample.epsilon)
    public = 1.5 * n * unit  # FM's scale and the constant part of SPOF's: made with the table
    reader = TableReader(sample.table, tally, stride=sample.stride, base=sample.base)
    scale = None
    if stabilised:
        with tally.phase("constant c_j"):
            constant = _sum(tally.numbers(list(sample.hidden))) * sample.c
        with tally.phase("sensitivity"):
            scale = (constant * 0.5 + 2.0) * constant * (n * unit) + public
        with tally.phase("stabilisation"):
            weights = [w + constant for w in tally.numbers(list(sample.decoder))]
        outputs["decoder"] = [w.value for w in weights]
    pairs = []
    for x in tally.numbers(list(sample.x)):
        with tally.phase("coefficients"):
            alpha2 = 0.5 - x
            alpha3 = -alpha2.halved() if options.alpha3_by_shift else x * 0.5 - 0.25
        pairs.append((alpha2, alpha3))
    noisy: list[list[float]] = [[], []]
    for pair in pairs:
        for place, coefficient in zip(noisy, pair, strict=True):
            with tally.phase("noise"):
                draw = reader.read()
            if scale is None:
                draw = tally.number(draw.value * public)  # read from the scaled table
            else:
                with tally.phase("scaling of the noise"):
                    draw = draw * scale
            with tally.phase("noise"):
                place.append((coefficient + draw).value)
    return {"alpha2": noisy[0], "alpha3": noisy[1], **outputs}


def _dpsgd(sample: Sample, options: CountOptions, tally: OpCounter) -> dict[str, list[float]]:
    """Compute the output gradient, clipped and perturbed: Steps 4 and 6 of Algorithm 2."""
    n = len(sample.x)
    with tally.phase("gradient"):
        gradient = _gradient(sample, options, tally)
    with tally.phase("squares"):
        squares = [g * g for g in gradient]
    with tally.phase("sum of squares"):
        energy = _sum(squares)
    with tally.phase("square root"):
        norm = energy.sqrt()
    with tally.phase("clipping divisions"):
        ratio = norm / sample.clip
    with tally.phase("branches"):
        clips = ratio > 1.0
        divisor = select(clips, ratio, tally.number(1.0))
        scale = select(
            clips,
            tally.number(2 * n * sample.clip / sample.epsilon),
            tally.number(n / sample.epsilon),
        )
    with tally.phase("clipping divisions"):
        clipped = [g / divisor for g in gradient]
    reader = TableReader(sample.table, tally, stride=sample.stride, base=sample.base)
    noisy = []
    for component in clipped:
        with tally.phase("noise"):
            draw = reader.read()
        with tally.phase("scaling of the noise"):
            draw = draw * scale
        with tally.phase("noise"):
            noisy.append((component + draw).value)
    return {"gradient": noisy}


def _gradient(sample: Sample, options: CountOptions, tally: OpCounter) -> list[Number]:
    """Compute A_i = e^a/(1 + e^a) - x_i; at a = 0 simply 1/2 - x_i."""
    features = tally.numbers(list(sample.x))
    if options.a_zero_shortcut:
        return [0.5 - x for x in features]
    if options.shared_exp:
        middle = _sigmoid(tally.number(sample.a))
        return [middle - x for x in features]
    return [_sigmoid(tally.number(sample.a)) - x for x in features]


def _sigmoid(a: Number) -> Number:
    power = a.exp()
    return power / (power + 1.0)


def _sum(values: Sequence[Number]) -> Number:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


__all__ = ["CountTrace", "Sample", "differences", "op_trace"]
