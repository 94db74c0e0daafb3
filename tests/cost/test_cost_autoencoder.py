"""The autoencoder's steps: the source's counts to the digit, each correction, and an execution."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from dpkern.base.counts import Counts
from dpkern.base.errors import InvalidInput
from dpkern.cost import processors, trace
from dpkern.cost.autoencoder import (
    CORRECTED,
    FORMS,
    PRINTED,
    VARIANTS,
    CountOptions,
    executed,
    noise_sample,
    op_count,
)
from dpkern.cost.scalar import Number, OpCounter, select
from dpkern.cost.sensitivity import reduction
from dpkern.cost.table_read import TableReader
from dpkern.cost.trace import Sample, op_trace

K7 = processors.load("k7")
SHAPES = [
    (n, numbers.randint(1, n))
    for numbers in [random.Random(6)]
    for n in [1, 2, *(numbers.randint(1, 24) for _ in range(48))]
]


def cost(system: str, n: int, code: int, options: CountOptions = PRINTED) -> float:
    return K7.price(op_count(system, n, code, options).counts)


def saved(n: int, code: int, options: CountOptions = PRINTED) -> float:
    value = reduction(cost("spof", n, code, options), cost("dpsgd-da", n, code, options))
    assert value is not None
    return value


def sample_of(n: int, code: int, *, seed: int = 0, **fields: float) -> Sample:
    numbers = random.Random(seed)
    return Sample(
        x=[numbers.random() for _ in range(n)],
        hidden=[numbers.random() for _ in range(code)],
        decoder=[numbers.gauss(0, 1) for _ in range(n * code)],
        table=[numbers.gauss(0, 1) for _ in range(32)],
        stride=5,
        base=3,
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("n", "code", "spof", "dpsgd", "percent"),
    [
        (14, 7, 364, 1403, 74.0556),
        (8, 4, 184, 923, 80.07),
        (32, 16, 1120, 2843, 60.60),
        (64, 32, 3264, 5403, 39.59),
        (126, 63, 10332, 10363, 0.30),
        (128, 64, 10624, 10523, -0.96),
    ],
)
def test_printed_totals(n: int, code: int, spof: int, dpsgd: int, percent: float) -> None:
    assert cost("spof", n, code) == spof == (19 + code) * n
    assert cost("dpsgd-da", n, code) == dpsgd == 80 * n + 283
    assert saved(n, code) == pytest.approx(percent, abs=0.005 if percent != 74.0556 else 5e-5)


def test_printed_lines() -> None:
    lines = {
        system: {item.name: K7.price(item.counts) for item in op_count(system, 14, 7).items}
        for system in ("spof", "dpsgd-da", "fm")
    }
    assert lines["spof"] == {"noise": 14 * 14, "coefficients": 5 * 14, "stabilisation": 14 * 7}
    assert lines["dpsgd-da"] == {
        "noise": 7 * 14,
        "clipping divisions": 32 * 14 + 32,
        "sum of squares": 13,
        "squares": 6 * 14,
        "square root": 252,
        "gradient": 34 * 14,
    }
    assert lines["fm"] == {"noise": 14 * 14, "coefficients": 5 * 14}
    assert K7.price(noise_sample()) == 6


@pytest.mark.parametrize(
    ("options", "spof", "dpsgd", "percent"),
    [
        (CountOptions(squarings=1), 364, 1361, 73.25),
        (CountOptions(squarings=1, a_zero_shortcut=True), 364, 899, 59.51),
        (CountOptions(shared_exp=True), 364, 1403 - 13 * 33, 62.63),
        (CountOptions(shared_exp=True, a_zero_shortcut=True), 364, 1403 - 14 * 33, 61.32),
        # c_j: 6 ADD, 1 MUL; sensitivity: 3 MUL, 2 ADD; scaling: 28 MUL. Scaling: 14 MUL; branches.
        (CountOptions(omitted_terms=True), 364 + 9 + 11 + 84, 1403 + 42 + 9, 67.81),
        (CountOptions(alpha3_by_shift=True), 364 - 14 * 2, 1403, 76.05),
        (CountOptions(gate_weight=32), 364 + 28 * 4 * 31, 1403 + 14 * 4 * 31, -22.20),
    ],
)
def test_corrected_counts(options: CountOptions, spof: int, dpsgd: int, percent: float) -> None:
    assert cost("spof", 14, 7, options) == spof
    assert cost("dpsgd-da", 14, 7, options) == dpsgd
    assert saved(14, 7, options) == pytest.approx(percent, abs=0.005)


@pytest.mark.parametrize("n", [1, 5, 14, 60])
def test_corrected_counts_for_every_n(n: int) -> None:
    once = CountOptions(squarings=1)
    assert cost("dpsgd-da", n, 1, once) == 77 * n + 283
    assert cost("dpsgd-da", n, 1, replace(once, a_zero_shortcut=True)) == 44 * n + 283


@pytest.mark.parametrize("n", [20, 60, 126, 200])
def test_spof_costs_more_from_l_above_61_and_283_over_n(n: int) -> None:
    for code in range(1, n + 1):
        assert (cost("spof", n, code) > cost("dpsgd-da", n, code)) == (code > 61 + 283 / n)


@pytest.mark.parametrize("system", FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_execution_counts_what_the_form_says(system: str, variant: str) -> None:
    options = VARIANTS[variant]
    for n, code in SHAPES:
        traced = op_trace(system, sample_of(n, code, seed=n), options=options).counted
        form = op_count(system, n, code, executed(options))
        counted = {item.name: item.counts for item in traced.items}
        expected = {item.name: item.counts for item in form.items if item.counts}
        assert counted == expected, (n, code)


@pytest.mark.parametrize("system", FORMS)
def test_an_operation_more_is_noticed(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = TableReader.read
    monkeypatch.setattr(TableReader, "read", lambda self: read(self) + 0.0)
    traced = op_trace(system, sample_of(14, 7)).counted
    (gap,) = trace.differences(system, 14, 7, counted=traced, options=executed(PRINTED))
    assert gap.name == "noise"
    assert gap.counts == Counts(ADD=14 if system == "dpsgd-da" else 28)


def test_s14_what_the_source_leaves_out_is_itemised() -> None:
    gaps = {item.name: item.counts for item in trace.differences("spof", 14, 7)}
    assert gaps == {
        "constant c_j": Counts(ADD=6, MUL=1),
        "sensitivity": Counts(ADD=2, MUL=3),
        "scaling of the noise": Counts(MUL=28),
    }
    gaps = {item.name: item.counts for item in trace.differences("dpsgd-da", 14, 7)}
    assert gaps == {
        "squares": Counts(MUL=-14),
        "scaling of the noise": Counts(MUL=14),
        "branches": Counts(CMP=1, MUX=2),
    }
    assert trace.differences("fm", 14, 7) == ()
    assert trace.differences("dpsgd-da", 14, 7, options=CORRECTED) == ()


def draws(sample: Sample, number: int) -> list[float]:
    """The table's samples at (k stride mod K + base) mod K, k = 1, 2, ..."""
    size = len(sample.table)
    places = [k * sample.stride % size + sample.base for k in range(1, number + 1)]
    return [sample.table[place % size] for place in places]


def test_the_pointer_stays_in_the_table() -> None:
    sample, tally = sample_of(3, 2), OpCounter()
    reader = TableReader(sample.table, tally, stride=5, base=3)
    for k, draw in enumerate(draws(sample, 100), start=1):
        assert reader.read().value == draw
        assert reader.pointer.value == 5 * k % 32
    assert tally.itemised.counts == 100 * noise_sample()


@pytest.mark.parametrize("by_shift", [False, True])
@pytest.mark.parametrize("system", ["spof", "fm"])
def test_the_execution_perturbs_the_coefficients(system: str, by_shift: bool) -> None:
    sample = sample_of(9, 4, epsilon=0.5)
    traced = op_trace(system, sample, options=CountOptions(alpha3_by_shift=by_shift))
    constant = sample.c * sum(sample.hidden) if system == "spof" else 0.0
    sensitivity = 1.5 * 9 + 9 * constant * (constant / 2 + 2)
    scale = sensitivity / (math.sqrt(2) * 0.5)
    noise = [scale * draw for draw in draws(sample, 18)]
    alpha2 = [0.5 - x + m for x, m in zip(sample.x, noise[0::2], strict=True)]
    alpha3 = [x / 2 - 0.25 + m for x, m in zip(sample.x, noise[1::2], strict=True)]
    assert traced.outputs["alpha2"] == pytest.approx(alpha2, rel=1e-12, abs=1e-12)
    assert traced.outputs["alpha3"] == pytest.approx(alpha3, rel=1e-12, abs=1e-12)
    if system == "spof":
        decoder = [w + constant for w in sample.decoder]
        assert traced.outputs["decoder"] == pytest.approx(decoder, rel=1e-12)


@pytest.mark.parametrize("clip", [0.1, 4.0])
@pytest.mark.parametrize("a", [0.0, 1.3])
def test_the_execution_clips_and_perturbs_the_gradient(a: float, clip: float) -> None:
    sample = sample_of(9, 4, a=a, clip=clip, epsilon=2.0)
    middle = 1 / (1 + math.exp(-a))
    gradient = [middle - x for x in sample.x]
    ratio = math.hypot(*gradient) / clip
    scale = (2 * 9 * clip if ratio > 1 else 9) / 2.0
    expected = [
        g / max(1.0, ratio) + scale * m for g, m in zip(gradient, draws(sample, 9), strict=True)
    ]
    for options in (PRINTED, CountOptions(shared_exp=True)):
        for steps in (None, 7):
            traced = op_trace("dpsgd-da", sample, options=options, newton_steps=steps)
            assert traced.outputs["gradient"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("steps", [None, 7])
def test_seven_newton_steps_are_k7_s_square_root(steps: int | None) -> None:
    traced = op_trace("dpsgd-da", sample_of(14, 7), newton_steps=steps).counted
    assert K7.price(traced.counts) == 1403 - 42 + 42 + 9


@pytest.mark.parametrize("value", [1e-6, 0.3, 1.0, 2.0, 14.0, 3e5])
def test_seven_newton_steps_reach_the_root(value: float) -> None:
    tally = OpCounter(newton_steps=7)
    assert tally.number(value).sqrt().value == pytest.approx(math.sqrt(value), rel=1e-12)
    assert tally.itemised.counts == Counts(ADD=7, MUL=7, DIV=7)


def test_every_operator_counts_once_under_its_name() -> None:
    tally = OpCounter(gate_weight=8)
    x, y = tally.number(3.0), tally.number(2.0)
    u, v = tally.word(12), tally.word(10)
    done: list[tuple[float, float]] = [
        ((x + y).value, 5.0),
        ((x - y).value, 1.0),
        ((1.0 - x).value, -2.0),
        ((-x).value, -3.0),
        ((x * y).value, 6.0),
        ((x / y).value, 1.5),
        (x.halved().value, 1.5),
        (x.exp().value, math.exp(3.0)),
        (x.sqrt().value, math.sqrt(3.0)),
        (select(x > y, x, y).value, 3.0),
        (select(y > x, x, y).value, 2.0),
        ((u & v).value, 8),
        ((u | v).value, 14),
        ((~u).value, ~12),
        ((u + v).value, 22),
    ]
    assert all(found == expected for found, expected in done)
    assert tally.itemised.counts == Counts(
        ADD=2, SUB=3, MUL=1, DIV=1, SHIFT=1, EXP=1, SQRT=1, CMP=2, MUX=2, AND=8, OR=8, NOT=8
    )
    assert isinstance(x, Number)


@pytest.mark.parametrize("size", [(0, 1), (14, 0), (7, 8), (14.0, 7), (True, 1)])
def test_impossible_sizes_are_refused(size: tuple[int, int]) -> None:
    for system in FORMS:
        with pytest.raises(InvalidInput):
            op_count(system, *size)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidInput, match="system: expected one of 'spof', 'dpsgd-da', 'fm'"):
        op_count("sgd", 14, 7)
    with pytest.raises(InvalidInput, match="squarings"):
        CountOptions(squarings=3)
    with pytest.raises(InvalidInput, match="gate_weight"):
        CountOptions(gate_weight=0)
    with pytest.raises(InvalidInput, match="shared_exp"):
        CountOptions(shared_exp=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="a_zero_shortcut: expected a = 0, got 1"):
        op_trace("dpsgd-da", sample_of(3, 2, a=1.0), options=CountOptions(a_zero_shortcut=True))
    with pytest.raises(InvalidInput, match="decoder: expected 6 weights"):
        replace(sample_of(3, 2), decoder=[0.0])
    with pytest.raises(InvalidInput, match="table: expected a power of two"):
        replace(sample_of(3, 2), table=[0.0] * 3)
    with pytest.raises(InvalidInput, match="code"):
        replace(sample_of(3, 2), hidden=[0.0] * 4)
    with pytest.raises(InvalidInput, match="epsilon"):
        sample_of(3, 2, epsilon=0.0)
