"""Noise sources as an axis of comparisons: draws, epsilon, break-even prices, whole steps."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern import DPStep
from dpkern.base.counts import Counts, Itemised
from dpkern.base.errors import InvalidInput
from dpkern.base.rng import Key, Purpose
from dpkern.cost import break_even, compare, comparison, counting, drawing, processors, steps
from dpkern.cost.autoencoder import CORRECTED, op_count
from dpkern.cost.counted import tally_of
from dpkern.cost.phases import by_phase
from dpkern.cost.systems import SYSTEMS
from dpkern.ops import coef, noise, update
from dpkern.privacy.mechanisms import DPSGD, LaplaceSGD, Mechanism
from dpkern.reports import three_ways
from dpkern.step.noise_tables import Layout
from dpkern.step.noise_tables.named import SOURCES, source_of

K7, ZEN4 = processors.load("k7"), processors.load("zen4")
KEY = Key.from_unsafe_seed(5)


def saved(source: str, machine: processors.Processor) -> float:
    mine, base = (
        machine.price(op_count(s, 14, 7, source=source).counts) for s in ("spof", "dpsgd-da")
    )
    return 100 * (1 - mine / base)


@pytest.mark.parametrize(
    ("source", "spof", "dpsgd", "percent"),
    [("table", 364, 1403, 74.06), ("inline", 7050, 4747, -48.51), ("cdt", 8457, 5450, -55.17)],
)
def test_the_saving_falls_below_zero_as_noise_becomes_real(
    source: str, spof: int, dpsgd: int, percent: float
) -> None:
    report = compare.report(noise=[source])
    costs = {fact["mechanism"]: fact["cost"] for fact in report.facts["costs"]}
    assert costs == {"spof": spof, "dpsgd-da": dpsgd}
    (fact,) = report.facts["reductions"]
    assert fact["reduction_percent"] == percent
    assert fact["noise"] == source


def test_a_private_number_by_hand() -> None:
    """48 + 16 bits a number, and the operations of draw, bits and release."""
    for system, numbers in (("spof", 28), ("dpsgd-da", 14)):
        items = {i.name: i.counts for i in op_count(system, 14, 7, source="inline").items}
        assert "noise" not in items
        assert items["noise draws"] == Counts(
            RNG=numbers * 3 // 2 + numbers // 2,
            ADD=2 * numbers,
            AND=4 * numbers + numbers,
            XOR=numbers,
            OR=numbers,
            SHIFT=math.ceil(5.25 * numbers + numbers / 2),
            MUX=numbers,
            CMP=2 * numbers + 1,
        )
        assert items["noise release"] == numbers * Counts(
            ADD=4, SUB=2, MUL=5, CVT=5, CMP=1, SHIFT=1
        )
    assert K7.price(Counts(RNG=1)) == 101  # a sixteenth of a ChaCha20 block
    assert saved("inline", K7) == pytest.approx(-48.51, abs=0.005)
    assert saved("inline", ZEN4) == pytest.approx(-78.64, abs=0.005)


def test_draws_are_those_that_kernels_execute() -> None:
    """A tile of each source, as the counted kernels draw it."""
    tile = noise.TILE
    place: dict[str, Any] = {"position": 0, "count": tile}
    stream, bits = KEY.stream(Purpose.LAPLACE, 1), KEY.stream(Purpose.ROUNDING, 1)
    _, made = tally_of(noise.lattice_draws, (stream,), {**place, "distribution": "laplace"})
    _, rounded = tally_of(noise.rounding_bits, (bits,), place)
    written = Counts(STORE=2 * tile)
    inline = made.counts + rounded.counts - written
    assert _draws("inline", tile) == inline
    # What is written is read again by the update: a draw and its bits.
    assert _draws("ring", tile) == inline + written + Counts(LOAD=2 * tile)
    source = source_of("cdt")
    assert source is not None
    layout = Layout(law="laplace", first=0, count=tile, rounding=True, device=torch.device("cpu"))
    source.bind(KEY, layout)
    _, looked_up = tally_of(noise.source_draws, (source.take(1),), place)
    assert _draws("cdt", tile) == looked_up.counts + rounded.counts - written


def _draws(source: str, count: int) -> Counts:
    return drawing.coordinates(source, count).items[0].counts


def test_spof_draws_twice_what_dp_sgd_draws() -> None:
    """Words of 512 records, as the ops of both trainers take them."""
    records, n = 512, 14
    targets = torch.rand(records, n)
    given = coef.Noise(
        scale=torch.full((records,), 3.0),
        stream=KEY.stream(Purpose.LAPLACE, 1),
        rounding=KEY.stream(Purpose.ROUNDING, 1),
    )
    _, spof = tally_of(coef.perturb, (targets,), {"form": "printed", "noise": given})
    how = {"distribution": "laplace", "scale": 1.0, "stream": given.stream}
    _, sgd = tally_of(noise.add_noise, (targets.clone(),), how | {"rounding": given.rounding})
    for system, run in (("spof", spof), ("dpsgd-da", sgd)):
        each = op_count(system, n, 7, source="inline").counts["RNG"]
        assert run.counts["RNG"] == records * each
        assert SYSTEMS[system].noise_draws(n) == each // 2


@pytest.mark.parametrize("law", [DPSGD, LaplaceSGD])
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("source", SOURCES)
def test_whole_steps_count_what_runs(source: str, arithmetic: str, law: type[Mechanism]) -> None:
    shapes = [(3, 5), (700,)]
    mechanism = law(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic=arithmetic)  # type: ignore[call-arg]
    params = [torch.randn(shape) for shape in shapes]
    given: dict[str, Any] = {"optimizer": update.SGD(lr=0.1), "unsafe_seed": 3}
    given |= {"expected_batch_size": 2.0, "sample_rate": 0.1, "noise_source": source_of(source)}
    step = DPStep(mechanism, params, **given)
    grads = [torch.full((2, *shape), 1e3) for shape in shapes]

    def run() -> None:
        step.add(grads)
        step.finish()

    run()
    if source == "ring":
        _wait_for(step)
    found = _exact(counting.count(run).items)
    form = steps.form(mechanism, shapes, 2, rule=given["optimizer"], source=source)
    ahead = Itemised(tuple(i for i in form.items if i.name.endswith(", ahead")))
    mine = Itemised(tuple(i for i in form.items if i not in ahead.items))
    assert found == _exact(by_phase(mine))
    # A ring's producer works on another thread: 3 tiles of draws, and of bits for floats.
    words = 3 * (768 + 256 * (arithmetic == "float"))
    assert ahead.counts["RNG"] == (words if source == "ring" else 0)


def _wait_for(step: DPStep) -> None:
    """Wait for the ring's blocks: a step that needs one earlier helps to fill it."""
    ring: Any = step._supply.source
    for _ in range(1000):
        if all(block.work.done() for block in ring._blocks):
            return
        time.sleep(0.01)
    raise AssertionError("the ring's thread has not filled its blocks")


def _exact(items: Itemised) -> dict[tuple[str, str], Counts]:
    return {(i.name, i.kind): i.counts for i in items.items if i.kind != "random"}


def test_epsilon_stands_beside_every_cost() -> None:
    report = compare.report(["spof", "fm", "dpsgd-da"])
    assert report.facts["noise"] == ["table", "inline", "ring", "cdt"]
    for cost in report.facts["costs"]:
        epsilon = cost["epsilon"]
        assert epsilon["claimed"] == (math.inf if cost["noise"] == "table" else 1.0)
        assert epsilon["certified"] == math.inf  # the record enters what is trained without noise
    assert "with noise from a table: epsilon infinite" in report.summary
    assert "48.51 % more with inline" in report.summary
    figures = {figure.name: figure for figure in report.figures}
    bars = list(dict.fromkeys(figures["cost"].series[0].x))
    assert bars[0] == "SPOF, table, ε\xa0∞"
    assert "SPOF, inline, ε\xa01\xa0/\xa0∞" in bars
    assert len(bars) == 3 * 4


def test_whole_steps_have_the_epsilon_of_their_noise() -> None:
    facts = compare.report(["laplace_sgd", "dpsgd"], noise=SOURCES, sizes=[(6, 3)]).facts
    found = {
        (cost["mechanism"], cost["noise"]): cost["epsilon"]["certified"] for cost in facts["costs"]
    }
    for name in ("laplace_sgd", "dpsgd"):
        assert found[name, "table"] == math.inf
        assert found[name, "inline"] == found[name, "ring"] < found[name, "cdt"] < math.inf
        assert found[name, "cdt"] == pytest.approx(found[name, "inline"], rel=1e-3)
    assert found["dpsgd", "inline"] == pytest.approx(4.3775, abs=1e-3)


@pytest.mark.parametrize("machine", [K7, ZEN4])
def test_the_break_even_price_is_where_nothing_is_saved(machine: processors.Processor) -> None:
    question = comparison.asked(["spof", "dpsgd-da"], [(14, 7)], [machine], None)
    (fact,) = break_even.facts(question)
    # By hand, printed lines of both without the 7 operations of every noisy number.
    printed = [op_count(s, 14, 7).counts for s in ("spof", "dpsgd-da")]
    table = Counts(ADD=3, NOT=1, AND=2, OR=1)
    mine, base = printed[0] - 28 * table, printed[1] - 14 * table
    even = (machine.price(base) - machine.price(mine)) / 14
    assert fact["break_even"] == pytest.approx(even, rel=1e-5)
    prices = break_even.DrawPrices.of(question, SYSTEMS["spof"], machine)
    assert prices.saved(even) == pytest.approx(0, abs=1e-9)
    assert prices.saved(0.9 * even) > 0 > prices.saved(1.1 * even)  # type: ignore[operator]
    for source in SOURCES:
        assert prices.reductions[source] == pytest.approx(saved(source, machine))
        # A record's share of a tile is rounded up.
        assert prices.saved(prices.each[source]) == pytest.approx(saved(source, machine), abs=0.1)
    assert fact["price_by_source"]["table"] == pytest.approx(machine.price(table))


def test_the_figure_of_the_saving_falls_through_zero() -> None:
    figure = break_even.figure(comparison.asked(["spof", "dpsgd-da"], [(14, 7)], ["k7"], None))
    assert figure is not None
    for series in figure.series:
        y = [v for v in series.y if v is not None]
        assert y == sorted(y, reverse=True)
        assert y[0] > 0 > y[-1]
    assert (figure.series[0].label, figure.series[0].y[0]) == ("AMD K7", 74.06)
    marks = {mark.text.split(":")[0]: mark for mark in figure.marks}
    assert marks["table"].text.endswith("ε ∞")
    assert marks["break-even"].y == 0
    assert marks["break-even"].x == pytest.approx(81.21 / 7, abs=0.01)


def test_fm_and_corrected_counts_have_no_break_even_of_their_own() -> None:
    asked = comparison.asked(["spof", "fm"], [(14, 7)], ["k7"], None)
    (fact,) = break_even.facts(asked)
    assert fact["break_even"] is None  # both draw 2 n numbers
    corrected = comparison.asked(["spof", "dpsgd-da"], [(14, 7)], ["k7"], CORRECTED)
    assert break_even.facts(corrected) == []
    assert break_even.figure(corrected) is None


def test_scales_of_records_are_counted_where_nothing_is_left_out() -> None:
    options = replace(CORRECTED, squarings=1)
    spof = {i.name: i.counts for i in op_count("spof", 14, 7, options, "inline").items}
    assert spof["scaling of the noise"]["DIV"] == 2  # unit and cell of the record's scale
    sgd = {i.name: i.counts for i in op_count("dpsgd-da", 14, 7, options, "inline").items}
    assert sgd["scaling of the noise"] == Counts(DIV=14, MUL=14)


def test_a_processor_without_a_price_of_random_words_says_so() -> None:
    report = compare.report(processors=["cmos45"])
    assert "has no price for random words" in report.summary
    assert "As noise becomes real" not in report.summary
    table = next(t for t in report.tables if t.title.startswith("Price of a noisy number"))
    assert list(table.rows[0]).count("no price") == 3
    figure = next(f for f in report.figures if f.name == "noise-price")
    assert "CMOS at 45 nm" not in [series.label for series in figure.series]


def test_wrong_sources_are_refused() -> None:
    for names, text in (
        (["spof", "dpsgd-da"], "noise: expected different names"),
        (["pruned", "dpsgd"], "noise: expected inline with"),
        (["randomized_response", "dpsgd"], "mechanisms: expected equal work"),
    ):
        with pytest.raises(InvalidInput, match=text):
            compare.report(names, noise=["cdt", "cdt"] if "spof" in names else ["cdt"])
    with pytest.raises(InvalidInput, match="noise: expected one of 'inline'"):
        compare.report(noise=["dice"])
    with pytest.raises(InvalidInput, match="source: expected one of 'inline'"):
        op_count("spof", 14, 7, source="dice")


@pytest.mark.parametrize("source", SOURCES)
def test_mechanisms_with_maps_of_their_own_are_counted_with_every_source(source: str) -> None:
    """Their noise is added apart from the update."""
    facts = three_ways.report("adaclip", noise=source).facts
    assert facts["noise"] == source
