"""Noise from tables: the certified law up to an exact distance, and unprotecting samples."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch

from dpkern import DPStep, InvalidInput, PrivacyEngine, PrivacyError
from dpkern.base.counts import Counts
from dpkern.base.laws import LAWS
from dpkern.base.rng import Key, Purpose
from dpkern.cost.noise_tables import cdt_report, sample_report
from dpkern.ops import noise, testing, update
from dpkern.ops._draws import CdtDraws
from dpkern.privacy.accounting import Ledger
from dpkern.privacy.mechanisms import DPSGD
from dpkern.step.noise_tables import CdtTable, Layout, SampleTable, TableShape, curves
from dpkern.step.noise_tables._cdt_law import CdtLaw, magnitudes
from dpkern.step.noise_tables._table import counted_reads
from dpkern.step.noise_tables.sample import table_of
from tests.engine.engine_run import Run

DELTA = 1e-5
FLOAT = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="float")
EXACT = replace(FLOAT, arithmetic="exact")


def step_of(mechanism: DPSGD, source: Any, size: int = 64, **more: Any) -> DPStep:
    given: dict[str, Any] = {"expected_batch_size": 1.0, "sample_rate": 0.5} | more
    return DPStep(mechanism, [torch.zeros(size)], noise_source=source, **given)


# the table of the certified law


@pytest.mark.parametrize("law", LAWS)
def test_the_distance_to_the_certified_law_is_exact(law: str) -> None:
    made = CdtLaw(law, 16)
    masses, total = magnitudes(law)
    apart = Fraction(0)
    for k, mass in enumerate(masses):
        mine = made.masses[k] if k < len(made.masses) else 0
        apart += abs(Fraction(mine, 1 << 16) - Fraction(mass, total))
    assert made.variation == apart / 2
    assert Fraction(made.variation_bound) >= made.variation
    assert sum(made.masses) == 1 << 16
    assert min(made.masses) >= 0
    distances = [CdtLaw(law, bits).variation for bits in (16, 24, 32, 64, 124)]
    assert all(b < a / 100 for a, b in pairwise(distances))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("word_bits", [12, 33, 80])
def test_draws_follow_the_law_by_position(law: str, word_bits: int) -> None:
    def drawn(first: int, count: int) -> torch.Tensor:
        table = CdtTable(word_bits=word_bits)
        table.bind(testing.KEY, Layout.of(law, (first,), (count,), "cpu", rounding=False))
        return table.take(3).at(first, count)

    whole = drawn(7, 40_000)
    assert torch.equal(whole[700:800], drawn(707, 100))
    x = whole.double() / 2**20
    sd = 1.0 if law == "gaussian" else math.sqrt(2)
    assert abs(float(x.mean())) < 5 * sd / 200
    assert abs(float(x.std()) / sd - 1) < 0.05
    # The first uniform: uniform below the cell, so that sums round as the certificate says.
    cells = (whole.double() % 2**14) / 2**14
    assert abs(float(cells.mean()) - 0.5) < 0.01
    inline = noise.lattice_draws(
        testing.KEY.stream(Purpose.NOISE, 3), position=7, count=40_000, distribution=law
    )
    assert not torch.equal(whole, inline)


def test_every_word_of_an_index_serves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    honest = CdtTable._made

    def watched(self: CdtTable, step: int) -> update.Draws:
        draws = honest(self, step)
        assert isinstance(draws, CdtDraws)
        assert draws.stream is not None
        seen.append((draws.stream.n0, draws.stream.n1))
        return draws

    monkeypatch.setattr(CdtTable, "_made", watched)
    table = CdtTable(word_bits=32)
    step = step_of(EXACT, table, 500)
    for _ in range(3):
        step.finish()
    assert len(set(seen)) == len(seen) == 3
    words = table.provenance()["words"]
    assert step.words == {"produced": 3 * 2 * 512, "consumed": 3 * 2 * 500}
    assert (words["produced"], words["consumed"], words["discarded"]) == (3072, 3000, 72)


@pytest.mark.parametrize("mechanism", [FLOAT, EXACT], ids=["float", "exact"])
def test_the_certificate_pays_for_the_table(mechanism: DPSGD) -> None:
    plain, table = step_of(mechanism, None), step_of(mechanism, CdtTable(word_bits=36))
    for step in (plain, table):
        step.finish()
    without, mine = plain.certify(DELTA), table.certify(DELTA)
    slack = 64 * CdtLaw("gaussian", 36).variation_bound
    assert without.epsilon < mine.epsilon < math.inf
    # What is left of delta after the slack is what the plain release certifies.
    left = DELTA - (1 + math.exp(mine.epsilon)) * slack
    assert plain.epsilon(left) == pytest.approx(mine.epsilon, rel=1e-4)
    assert any("36-bit words" in note for note in mine.notes)


def test_calibration_pays_for_the_table() -> None:
    """(1 + e^epsilon) N TV of the whole run comes out of the target's delta."""
    words = 34
    found = []
    for source in (None, CdtTable(word_bits=words)):
        run = Run(private=False)
        engine = PrivacyEngine(accountant="rdp")
        engine.make_private_with_epsilon(
            module=run.module,
            optimizer=run.optimizer,
            data_loader=run.loader,
            target_epsilon=4.0,
            target_delta=DELTA,
            epochs=1,
            max_grad_norm=1.0,
            noise_source=source,
        )
        assert engine.step.calibrated_to == "certified"
        steps = round(1 / engine.step.sampling["sample_rate"])
        engine.step._record(steps)
        assert engine.get_epsilon(DELTA) <= 4.0
        found.append(engine.step.mechanism.noise_multiplier)
    assert found[0] < found[1]


def test_nothing_is_calibrated_to_a_table_of_samples() -> None:
    run = Run(private=False)
    with pytest.raises(PrivacyError, match="no DP guarantee"):
        PrivacyEngine().make_private_with_epsilon(
            module=run.module,
            optimizer=run.optimizer,
            data_loader=run.loader,
            target_epsilon=4.0,
            target_delta=DELTA,
            epochs=1,
            max_grad_norm=1.0,
            noise_source=SampleTable(),
        )


def test_processes_compare_more_than_the_name_of_a_table() -> None:
    assert CdtTable(word_bits=16).settings != CdtTable(word_bits=17).settings
    one, other = (SampleTable(TableShape(stride=s)).settings for s in (1, 3))
    assert one != other


def test_short_words_certify_nothing_at_a_small_delta() -> None:
    step = step_of(FLOAT, CdtTable(word_bits=16))
    step.finish()
    certificate = step.certify(DELTA)
    assert certificate.epsilon == math.inf
    assert "total variation" in certificate.notes[-1]
    assert step.epsilon(0.5) < math.inf


def test_a_ledger_keeps_the_distance() -> None:
    step = step_of(FLOAT, CdtTable(word_bits=40))
    step.finish()
    state = json.loads(json.dumps(step.ledger.state_dict()))
    again = Ledger()
    again.load_state_dict(state)
    assert again.epsilon(DELTA) == step.epsilon(DELTA)
    plain = step_of(FLOAT, None)
    plain.finish()
    entry = plain.ledger.state_dict()["entries"][0]
    assert "variation" not in entry  # as states were before
    state["entries"][0]["variation"] = 2.0
    with pytest.raises(InvalidInput, match="variation"):
        again.load_state_dict(state)


# curves of one coordinate


PUBLISHED = {  # word bits: delta at epsilon 4.377 and floor
    16: (1.16e-3, 1.16e-3),
    20: (1.29e-4, 1.21e-4),
    24: (1.52e-5, 1.19e-5),
    32: (9.91e-6, 1.21e-7),
    53: (9.92e-6, 2.01e-13),
}


@pytest.mark.parametrize(("word_bits", "wanted"), PUBLISHED.items())
def test_short_words_of_a_gaussian(word_bits: int, wanted: tuple[float, float]) -> None:
    masses = curves.rounded_gaussian(word_bits)
    found = masses.delta(16, 4.377), masses.floor(16)
    assert found == pytest.approx(wanted, rel=5e-3)


def test_quantiles_leave_cells_that_only_one_neighbour_reaches() -> None:
    assert curves.quantiles(4096).floor(16) == pytest.approx(0.0115, rel=5e-3)


def test_long_words_have_the_curve_of_the_certified_law() -> None:
    ideal = curves.certified("gaussian")
    mine = curves.table(CdtLaw("gaussian", 64))
    assert mine.delta(64, 4.377) == pytest.approx(ideal.delta(64, 4.377), rel=1e-9)
    assert ideal.delta(64, 4.377) < 1e-5  # dominated by its Gaussian
    assert ideal.floor(64) < 1e-30 < 1e-18 < mine.floor(64) < 1e-15
    laplace = curves.certified("laplace")
    assert laplace.delta(64, 1.0) == pytest.approx(0, abs=1e-12)  # pure up to its cut
    assert laplace.delta(64, 0.9) > 1e-3


def test_a_law_against_itself_leaks_nothing() -> None:
    masses = curves.Masses.of([(0, 1), (1, 2), (1, 1), (2, 0)])
    assert (masses.total, masses.mass) == (4, {0: 1, 1: 3})
    assert masses.delta(0, 0.0) == 0 == masses.floor(0)
    assert (masses.delta(1, 0.0), masses.floor(1)) == (0.75, 0.75)
    assert masses.worst_ratio(1) == (math.inf, 3.0)
    assert masses.moments() == (0.75, 0.1875)


# the table of samples


SHAPES = {
    "plain": TableShape(entries=256),
    "stride": TableShape(entries=64, stride=37, base=5, distribution="gaussian"),
    "even": TableShape(entries=128, stride=96, base=127),
    "more": TableShape(entries=32, stride=3, scrambled=True, prescaled=False),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_read_costs_six_operations_and_fetches_what_the_formula_says(shape: TableShape) -> None:
    table, mask = table_of(testing.KEY, shape), 9 if shape.scrambled else 0
    got, pointer, counts = counted_reads(shape, table.tolist(), 11, 300, mask)
    indices, after = shape.indices(11, 300, mask)
    assert (got, pointer) == (table[indices].tolist(), after)
    assert counts == 300 * shape.per_read
    six = Counts(ADD=2, NOT=1, AND=2, OR=1)
    assert shape.per_read - six == Counts(XOR=int(shape.scrambled), MUL=int(not shape.prescaled))
    assert sum(six.values()) == 6
    assert shape.indices(0, 1)[0].item() == (shape.stride + shape.base) % shape.entries
    whole = shape.indices(0, 2 * shape.period)[0]
    assert torch.equal(whole[: shape.period], whole[shape.period :])
    assert len(whole.unique()) == shape.period


def test_samples_are_those_of_the_law_quantised() -> None:
    for law, variance in (("laplace", 2.0), ("gaussian", 1.0)):
        shape = TableShape(distribution=law, word_bits=12, fraction_bits=6)
        table = table_of(testing.KEY, shape).double() / 64
        assert float(table.var()) == pytest.approx(variance, rel=0.05)
        assert float(table.abs().max()) <= (2**11 - 1) / 64
    tight = TableShape(word_bits=8, fraction_bits=6)
    assert table_of(testing.KEY, tight).abs().max() == 127


@pytest.mark.parametrize("mechanism", [FLOAT, EXACT], ids=["float", "exact"])
def test_two_lines_tell_neighbours_apart(mechanism: DPSGD) -> None:
    shape = TableShape(entries=4096, distribution="gaussian")
    right = 0
    for trial in range(8):
        member = trial % 2 == 1
        step = step_of(mechanism, SampleTable(shape), unsafe_seed=trial)
        step.add([torch.full((1, 64), member / 8)])
        released = step.finish()
        assert released is not None
        table = table_of(step.key, shape) / 2**shape.fraction_bits
        # The attack: which of the 4096 windows, if any, is the release without the record?
        windows = table[(torch.arange(4096)[:, None] + torch.arange(64)) % 4096]
        guess = (windows - released[0]).abs().amax(1).min() > 1 / 64 + 1e-6
        right += bool(guess) == member
    assert right == 8


def test_s15_reuse_cancels_without_knowing_the_table_and_fresh_noise_does_not() -> None:
    left = []
    for source in (SampleTable(TableShape(entries=64)), None):
        step = step_of(FLOAT, source)
        step.add([torch.full((1, 64), 1 / 8)])
        first, second = step.finish(), step.finish()
        assert first is not None
        assert second is not None
        left.append(float((first[0] - second[0] - 1 / 8).abs().max()))
    # Two releases read the same 64 entries: their difference is the record, to a cell of 1/64.
    assert left[0] <= 1 / 64
    # 64 differences of fresh noise this small: less than 2^-200.
    assert left[1] > 1 / 64


def test_the_record_says_not_private() -> None:
    step = step_of(FLOAT, SampleTable(), unsafe_seed=3)
    step.add([torch.ones(1, 64)])
    step.finish()
    assert step.epsilon(DELTA) == math.inf == step.epsilon_if_seed_secret(DELTA)
    assert step.ledger.state_dict()["entries"][0]["event"] == {"event": "NonPrivateDpEvent"}
    report = step.report(DELTA)
    assert report["epsilon_certified"] == "inf"
    assert report["certificate"]["certified_for"] == "nothing"
    secret = step_of(FLOAT, SampleTable())
    secret.finish()
    found = secret.report(DELTA)
    for text in (
        report["non_private"],
        found["non_private"],
        found["noise"]["provenance"]["text"],
    ):
        assert "no DP guarantee" in text
    assert "worst_case_float_sensitivity" not in found


def test_reads_and_reuse_are_counted() -> None:
    table = SampleTable(TableShape(entries=128, stride=2))
    step = step_of(FLOAT, table, 96)
    step.finish()
    assert table.provenance()["words"]["reused"] == 96 - 64
    step.finish()
    words = table.provenance()["words"]
    assert (words["consumed"], words["reused"]) == (192, 192 - 64)
    assert step.words["consumed"] == 2 * noise.rounding_words(96)
    table.close()


BAD_SHAPES: dict[str, dict[str, Any]] = {
    "entries": {"entries": 100},
    "stride": {"entries": 8, "stride": 8},
    "base": {"base": -1},
    "word_bits": {"word_bits": 22},
    "fraction_bits": {"fraction_bits": 21},
    "distribution": {"distribution": "uniform"},
}


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_bad_shapes_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        TableShape(**BAD_SHAPES[name])
    with pytest.raises(InvalidInput, match="word_bits"):
        CdtTable(word_bits=7)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_tables_serve_updates_of_ones_own(backend: str) -> None:
    rule, params, sums = update.SGD(lr=1.0), [torch.zeros(600)], [torch.zeros(600)]
    results = {}
    for source in (SampleTable(), CdtTable(word_bits=48)):
        layout = Layout.of("gaussian", (0,), (600,), "cpu", rounding=False)
        source.bind(Key.from_unsafe_seed(1), layout)
        drawn = update.Noise(
            distribution="gaussian",
            scales=(1.0,),
            stream=testing.KEY.stream(Purpose.NOISE, 1),
            positions=(0,),
            rounding=testing.KEY.stream(Purpose.ROUNDING, 1),
            draws=source.take(1),
        )
        mine = [p.clone() for p in params]
        state = rule.init(mine)
        update.step(mine, sums, rule=rule, state=state, noise=drawn, backend=backend)
        assert drawn.draws is not None
        cells = torch.div(drawn.draws.at(0, 600), 2**14, rounding_mode="floor")
        assert torch.equal(mine[0], -cells / 64)
        results[source.name] = mine[0]
    assert not torch.equal(*results.values())


# reports


def test_reports_state_what_the_tables_leak() -> None:
    cdt = cdt_report(word_bits=24)
    assert cdt.facts["delta"] > 1.3e-5 > 1e-5 > cdt.facts["delta_certified_law"]
    assert cdt.facts["quantiles_4096_floor"] == pytest.approx(0.0115, rel=5e-3)
    samples = sample_report(TableShape(entries=1024), coordinates=4096)
    assert samples.facts["macro_operations_per_read"] == 6
    assert samples.facts["release_entropy_bits"] == 10
    assert samples.facts["worst_probability_ratio"] == "inf"
    assert "No DP guarantee" in samples.summary
    assert (samples.facts["period_reads"], samples.facts["period_releases"]) == (1024, 1)
    for report in (cdt, samples):
        assert json.loads(json.dumps(report.facts)) == report.facts
        for table in report.tables:
            assert all(len(row) == len(table.columns) for row in table.rows)
        for figure in report.figures:
            assert all(len(s.x) == len(s.y) for s in figure.series)
