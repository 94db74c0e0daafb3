"""Reports of counts and comparisons: their facts, what their figures show, what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dpkern.base.errors import InvalidInput
from dpkern.base.report import Report
from dpkern.cost import compare, comparison, count, processors
from dpkern.cost.autoencoder import CORRECTED, CountOptions, op_count
from dpkern.cost.sensitivity import crossovers, reduction, sensitivities
from dpkern.cost.systems import SYSTEMS
from dpkern.cost.table_read import TableReader

K7 = processors.load("k7")


def whole(report: Report) -> None:
    """Facts are JSON, tables rectangular, figures' series as long as their axes."""
    assert json.loads(json.dumps(report.facts)) == report.facts
    for table in report.tables:
        assert all(len(row) == len(table.columns) for row in table.rows), table.title
    for figure in report.figures:
        assert figure.series, figure.name
        for series in figure.series:
            assert len(series.x) == len(series.y), figure.name
    names = [figure.name for figure in report.figures]
    assert len(set(names)) == len(names)
    assert report.summary
    assert report.notes


def test_the_source_s_comparison() -> None:
    given = {"sizes": [(14, 7)], "processors": ["k7"], "noise": ["table"]}
    report = compare.report(["spof", "dpsgd-da"], **given)
    whole(report)
    assert report == compare.report(noise=["table"])
    costs = {fact["mechanism"]: fact["cost"] for fact in report.facts["costs"]}
    assert costs == {"spof": 364, "dpsgd-da": 1403}
    (fact,) = report.facts["reductions"]
    assert fact["reduction_percent"] == 74.06
    assert (fact["mechanism"], fact["baseline"]) == ("spof", "dpsgd-da")
    for said in ("364", "1,403", "74.06 %", "from n = 128 on"):
        assert said in report.summary


def test_every_correction_is_reported_with_its_number() -> None:
    facts = compare.report().facts["corrections"]
    found = {
        fact["count"]: (fact["costs"]["dpsgd-da"], fact["reductions_percent"]["spof"])
        for fact in facts
    }
    assert found["as printed"] == (1403, 74.06)
    assert found["n squarings are n multiplications"] == (1361, 73.25)
    assert found["and a = 0: A = 1/2 - x"] == (899, 59.51)


def test_the_crossover_near_127() -> None:
    report = compare.report(noise=["table"])
    in_n, in_l = report.facts["crossovers"]
    assert in_n["along"] == "n, l = n/2"
    (point,) = in_n["points"]
    assert (point["from"], point["to"], point["cheaper_below"]) == (126, 128, True)
    assert point["near"] == pytest.approx(126.47, abs=0.01)  # (n/2) = 61 + 283/n
    assert in_l["along"] == "l, n = 14"
    assert in_l["points"] == []
    (mark,) = next(f for f in report.figures if f.name == "cost-against-n").marks
    assert mark.x == point["near"]
    assert 10332 < mark.y < 10624
    (mark,) = next(f for f in report.figures if f.name == "cost-against-l").marks
    assert mark.x == pytest.approx(61 + 283 / 128, abs=0.01)
    assert mark.y == 10523


def test_figures_show_the_numbers() -> None:
    report = compare.report(noise=["table"])
    figures = {figure.name: figure for figure in report.figures}
    assert list(figures) == [
        *("operations", "cost", "noise-price", "cost-against-n", "cost-against-l"),
        *("processors", "prices-spof"),
    ]
    cost = figures["cost"]
    assert cost.kind == "stacked"
    stacked = [sum(series.y[i] or 0 for series in cost.series) for i in range(2)]
    assert stacked == [364, 1403]
    for series in figures["cost-against-n"].series:
        price = dict(zip(series.x, series.y, strict=True))
        assert price[14] == {"SPOF": 364, "DP-SGD for DA": 1403}[series.label]
    (bars,) = figures["processors"].series
    assert dict(zip(bars.x, bars.y, strict=True))["AMD K7"] == 74.06
    assert len(bars.x) >= 5
    halved, doubled = figures["prices-spof"].series
    at = list(halved.x).index("DIV")
    free_of = {f["operation"]: f for f in report.facts["sensitivity"]}["DIV"]
    assert 74.06 + halved.y[at] == pytest.approx(free_of["reduction_if_halved"], abs=0.011)
    assert 74.06 + doubled.y[at] == pytest.approx(free_of["reduction_if_doubled"], abs=0.011)


def test_sizes_processors_and_options() -> None:
    names = processors.available()
    report = compare.report(
        ["spof", "fm", "dpsgd-da"],
        sizes=[(14, 7), (128, 64)],
        processors=names,
        options=CORRECTED,
        noise=["table"],
    )
    whole(report)
    assert len(report.facts["costs"]) == 3 * 2 * len(names)
    assert len(report.facts["reductions"]) == 2 * 2 * len(names)
    first = report.facts["costs"][0]
    assert first["cost"] == 440
    unpriced = [f for f in report.facts["costs"] if f["unpriced"]]
    assert {f["processor"] for f in unpriced} == {"cmos45"}
    assert any("no price for NOT" in note for note in report.notes)


@pytest.mark.parametrize("name", processors.available())
def test_slopes_are_derivatives(name: str) -> None:
    machine = processors.load(name)
    mine, base = (op_count(s, 14, 7).counts for s in ("spof", "dpsgd-da"))
    for found in sensitivities(mine, base, machine):
        step = 1e-6

        def saved(factor: float, operation: str = found.operation) -> float:
            costs = {**machine.costs, operation: machine.costs[operation] * factor}
            other = replace(machine, costs=costs)
            value = reduction(other.price(mine), other.price(base))
            assert value is not None
            return value

        slope = (saved(1 + step) - saved(1 - step)) / (2 * step) / 100
        assert found.slope == pytest.approx(slope, rel=1e-4, abs=1e-7)
        assert found.halved == pytest.approx(saved(0.5))
        assert found.doubled == pytest.approx(saved(2.0))
        assert found.free == pytest.approx(saved(0.0))


@pytest.mark.parametrize(
    ("roots", "expected"),
    [((7.5,), [(7, 8, 7.5)]), ((7,), [(6, 7, 7)]), ((), []), ((3.5, 40.25), [(3, 4), (40, 41)])],
)
def test_crossovers_are_neighbours(roots: tuple[float, ...], expected: list[tuple[float]]) -> None:
    def difference(size: int) -> float:
        value = 1.0
        for root in roots:
            value *= root - size
        return value

    found = crossovers([1, 10, 100], difference)
    assert [(c.low, c.high) for c in found] == [e[:2] for e in expected]
    if len(roots) == 1:
        assert found[0].near == roots[0]
        assert not found[0].cheaper_below


@pytest.mark.parametrize("mechanism", SYSTEMS)
def test_a_count_is_reported_line_by_line(mechanism: str) -> None:
    report = count.report(mechanism, size=(14, 7), processor="k7")
    whole(report)
    facts = report.facts
    assert facts["cost"] == sum(item["cost"] for item in facts["items"])
    assert facts["cost"] == sum(weight["cost"] for weight in facts["weights"])
    assert sum(weight["share_percent"] for weight in facts["weights"]) == pytest.approx(
        100, abs=0.1
    )
    total = report.tables[0].rows[-1]
    assert total[0] == "total"
    assert total[2] == facts["cost"]
    if SYSTEMS[mechanism].traced:
        assert facts["execution"]["agrees"]
        assert "agrees" in report.summary


def test_an_execution_that_differs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    read = TableReader.read
    monkeypatch.setattr(TableReader, "read", lambda self: read(self) + 0.0)
    report = count.report("spof")
    assert not report.facts["execution"]["agrees"]
    assert "DIFFERS" in report.summary


def test_options_reach_the_count() -> None:
    report = count.report("dpsgd-da", options=CountOptions(squarings=1, a_zero_shortcut=True))
    assert report.facts["cost"] == 899
    assert report.facts["options"]["a_zero_shortcut"] is True


def test_what_cannot_be_compared_is_refused() -> None:
    for names in ([], ["spof"], ["spof", "spof"]):
        with pytest.raises(InvalidInput, match="two or more different names"):
            compare.report(names)
    with pytest.raises(InvalidInput, match="mechanisms: expected one of 'spof'"):
        compare.report(["spof", "sgd"])
    with pytest.raises(InvalidInput, match="sizes: expected at least one"):
        compare.report(sizes=[])
    with pytest.raises(InvalidInput, match="processors: expected at least one"):
        compare.report(processors=[])
    for question in (compare.report, lambda sizes: count.report("dpsgd", size=sizes[0])):
        with pytest.raises(InvalidInput, match="l: expected an int >= 1 and <= 7"):
            question(sizes=[(7, 14)])
    with pytest.raises(InvalidInput, match="processors: expected different names"):
        compare.report(processors=["k7", "zen4", "k7"])
    for question in (compare.report, lambda names, options: count.report("gredp", options=options)):
        with pytest.raises(InvalidInput, match="options: expected the printed ones"):
            question(["gredp", "dpsgd"], options=CountOptions(squarings=1))
    with pytest.raises(InvalidInput, match="mechanism: expected one of 'spof'"):
        count.report("sgd")


def test_whole_steps_compare_and_other_work_is_said() -> None:
    report = compare.report(["laplace_sgd", "dpsgd"], sizes=[(6, 3)], processors=["zen4"])
    whole(report)
    assert {fact["scope"] for fact in report.facts["mechanisms"]} == {SYSTEMS["dpsgd"].scope}
    assert report.facts["corrections"] == report.facts["execution"] == []
    assert [fact["up_to"] for fact in report.facts["crossovers"]] == [128, 6]


@pytest.mark.parametrize(
    ("names", "got"),
    [
        (["spof", "dpsgd"], "DP-SGD: 27 parameters of a dense layer"),
        (["randomized_response", "dpsgd"], "Randomized response: 0 parameters|27 parameters"),
    ],
)
def test_mechanisms_of_unequal_work_are_refused(names: list[str], got: str) -> None:
    with pytest.raises(InvalidInput, match=f"mechanisms: expected equal work.*({got})"):
        compare.report(names, sizes=[(6, 3)])


def test_layers_of_unequal_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A circulant layer has fewer parameters than a dense one of its outer sizes."""
    monkeypatch.setattr(comparison, "_layer", lambda systems, layer: None)
    with pytest.raises(InvalidInput, match=r"1,536 parameters of a circulant.*263,168 parameters"):
        compare.report(["gredp", "dpsgd"], sizes=[(512, 512)])


def test_norms_grow_with_the_batch_and_noise_does_not() -> None:
    report = compare.report(["dpsgd-automatic", "dpsgd"], sizes=[(6, 3)], batches=[1, 64])
    whole(report)
    one, many = (f for f in report.facts["costs"] if f["mechanism"] == "dpsgd")
    assert (one["batch"], many["batch"]) == (1, 64)
    assert one["parameters"] == 27
    for part in ("noise", "update", "maps and learning"):
        assert one["parts"][part] == many["parts"][part]
    grown = many["parts"]["norms and sums"] / one["parts"]["norms and sums"]
    assert grown == pytest.approx(64, rel=0.1)
    for fact in (one, many):
        assert sum(fact["parts"].values()) == pytest.approx(fact["cost"])
        assert fact["per_sample"] == pytest.approx(fact["cost"] / fact["batch"], rel=1e-5)
        assert fact["per_parameter"] == pytest.approx(fact["cost"] / 27, rel=1e-5)
    assert "27 parameters of a dense layer each, 1 sample" in report.summary
    with pytest.raises(InvalidInput, match="batch: expected 1 with SPOF, got 2"):
        compare.report(batches=[2])
    with pytest.raises(InvalidInput, match="batch: expected an int >= 1"):
        compare.report(["gredp", "dpsgd"], batches=[0])


def test_a_tile_of_draws_is_no_crossover() -> None:
    """The kernel's tile decides between n = 32 and 34; the mechanisms do not."""
    report = compare.report(["pruned", "dpsgd"], sizes=[(32, 16)], processors=["zen4"])
    assert all(fact["points"] == [] for fact in report.facts["crossovers"])
    assert "from n" not in report.summary
    assert not any(table.title == "Crossovers" for table in report.tables)
    assert any("No crossover against DP-SGD" in note for note in report.notes)
