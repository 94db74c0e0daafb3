"""dpkern reproduce spof: digits of the formulas, defects by their ids, small trained settings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dpkern import cli
from dpkern.base.errors import InvalidInput
from dpkern.papers import PAPERS, ItemRequest, Result, ResultCache, reproduce
from dpkern.papers.intervals import interval
from dpkern.papers.spof import environment as spof_environment
from dpkern.papers.spof import setting as training
from dpkern.papers.spof import training as spof_runs
from dpkern.papers.spof import training_verdicts
from dpkern.papers.spof.raw_results import TABLE
from dpkern.papers.spof.setting import (
    BASELINE,
    CORRECTED,
    FUNCTIONAL,
    NON_PRIVATE,
    OURS,
    Cell,
    Found,
)
from dpkern.papers.verdict import FAILS, UNDECIDED

pytestmark = pytest.mark.slow

QUICK = ItemRequest(quick=True)
FEW = (1.0, 10.0)


def numbers(result: Result, quantity: str | None = None) -> dict[str, float]:
    return {
        row.setting: float(row.ours)
        for row in result.rows
        if isinstance(row.ours, float) and quantity in (None, row.quantity)
    }


def told(result: Result) -> str:
    return " ".join([*result.notes, *(row.note for row in result.rows)])


def test_architecture() -> None:
    assert numbers(reproduce("spof", "fig1", QUICK)) == {
        "encoders W_j": 196.0,
        "shared decoder": 196.0,
    }


def test_sensitivity_curves_v2_v3_s11() -> None:
    result = reproduce("spof", "fig6", QUICK)
    values, places = numbers(result, "value"), numbers(result, "a")
    assert places["(58), minimum"] == pytest.approx(0.9056884, rel=1e-6)
    assert places["(57), minimum"] == pytest.approx(0.0, abs=1e-9)
    assert values["(58), minimum"] == pytest.approx(4.0347750, rel=1e-6)
    assert values["(58), a 0"] == pytest.approx(4.6931472, rel=1e-6)
    assert numbers(result, "%")["(58), a 0 above the minimum"] == pytest.approx(16.3174, rel=1e-5)
    found = [values[f"(57), a {a}"] for a in ("0", "+-0.5", "+-1")]
    assert found == pytest.approx([2.8862944, 3.6630801, 4.4818644], rel=1e-6)
    assert values["DP-SGD below C, a 0"] == 1.0
    assert "S11:" in told(result)


def test_largest_multiplier_v10_v11_s9_s10() -> None:
    densities = reproduce("spof", "fig4", QUICK)
    off = numbers(densities, "largest deviation from draws, %")
    printed, correct = (off[f"{form} density, h 0.3, s 1.5, over (0.05, 3.2)"] for form in FORMS)
    assert printed == pytest.approx(38, abs=1)
    assert correct < 3
    below = reproduce("spof", "fig5", QUICK)
    found = numbers(below)
    assert 10 ** found["correct, sigma 5: log10 of F_bmax(1)"] == pytest.approx(1.84e-31, rel=5e-3)
    single = found.pop("one copy, one code unit, any sigma")
    assert single == pytest.approx(math.log10(0.5))
    assert max(found.values()) < -100 * math.log10(2)
    assert {"S9:", "S10:"} <= set(told(densities).split()) & set(told(below).split())


FORMS = ("printed", "correct")


def test_multipliers_v12_s8_s10(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spof_environment, "SPREADS", (10.0,))
    monkeypatch.setattr(spof_environment, "SIGMAS", (5.0, 20.0))
    result = reproduce("spof", "multipliers", QUICK)
    found = numbers(result)
    assert found["b_j < 1, entries of W on +-10, sigma 20"] == pytest.approx(2**-7, abs=3e-3)
    assert all(row.ours < 0.05 for row in result.rows if row.published == ">= 0.5")  # type: ignore[operator]
    assert 0.1 < found["b_j < l, entries of W on +-10, sigma 5"] < 0.25
    assert {"S8:", "S10:"} <= set(told(result).split())


def test_losses_s1_s2_s3_s5() -> None:
    result = reproduce("spof", "losses", QUICK)
    points = numbers(result, "z")
    printed = [v for k, v in points.items() if k.startswith("printed")]
    assert printed == [1.0] * 4
    assert [v for k, v in points.items() if k.startswith("taylor")] == [-2.0, -1.0, 1.0, 2.0]
    losses = numbers(result, "loss")
    assert losses["printed polynomial at x 0, z 10; cross-entropy 10"] == pytest.approx(
        -19.3, abs=0.1
    )
    assert all(0.9 < share <= 1 for share in numbers(result, "error / corrected bound").values())
    (difference,) = numbers(result, "difference").values()
    assert abs(difference) > 1
    assert {"S1:", "S2:", "S3:", "S5:"} <= set(told(result).split())


def test_audit_v5_s4_s6_s7() -> None:
    result = reproduce("spof", "audit", QUICK)
    visits = [row for row in result.rows if row.setting.startswith("step 5, one visit")]
    expected = [1.414214, 0.530330, 0.220397, 0.037033, 0.011187]
    assert [row.ours for row in visits] == pytest.approx(expected, rel=1e-4)
    # A factor below 1 is no certificate: c_j depends on the record.
    assert [row.epsilon_certified for row in visits[1:]] == [math.inf] * 4
    assert visits[0].epsilon_certified == pytest.approx(math.sqrt(2))
    composed = [row.ours for row in result.rows if "fresh noise" in row.setting]
    assert composed == pytest.approx([20 * math.sqrt(2), 20 * 18_240 * math.sqrt(2)])
    ratios = list(numbers(result, "log ratio").values())
    assert ratios[2] > 8 * ratios[1] > 8
    (guesses,) = numbers(result, "right guesses").values()
    assert guesses == 1.0
    assert {"S4:", "S6:", "S7:"} <= set(told(result).split())


@pytest.fixture(scope="module")
def small() -> Iterator[ItemRequest]:
    """Few settings, few records, two runs; the items share what they compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "EPSILONS", FEW)
        patch.setattr(spof_runs, "CONSTANTS", (0.0, 2.5))
        patch.setattr(spof_runs, "RATES", (0.01, 0.05))
        yield ItemRequest(quick=True, rows=12, seeds=2, finished=ResultCache())


@pytest.fixture(scope="module")
def compared(small: ItemRequest) -> Result:
    return reproduce("spof", "comparison", small)


def test_comparison(compared: Result) -> None:
    printed = {row.quantity: row.published for row in compared.rows if row.published is not None}
    assert printed["training time saved, %"] == "57.2 on other data (fitbit)"
    gains = [row for row in compared.rows if row.quantity.startswith("mean gain")]
    said = ["2.9 on other data (fitbit)", "3.52 on other data (fitbit)"]
    assert [row.published for row in gains if row.published] == said
    assert {row.quantity for row in gains if row.published} == {"mean gain, % of DP-SGD's mean"}
    assert all(row.seeds == 2 * len(FEW) and row.spread for row in gains)
    (saved,) = numbers(compared, "operations saved, %").values()
    assert saved == pytest.approx(74.0556, abs=1e-4)
    assert {row.data for row in compared.rows if row.seeds} == {"synthetic: generated"}
    assert "S13:" in told(compared)
    claims = [one for one in compared.verdicts if "% more accurate" in one.claim]
    assert [one.published for one in claims] == [2.90, 3.52]
    assert {one.verdict for one in claims} == {UNDECIDED}, "generated records, two runs"


def test_accuracy_over_epsilon_shares_the_runs(
    small: ItemRequest, compared: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_compute", lambda *_: pytest.fail("computed again"))
    result = reproduce("spof", "fig3", small)
    accuracy = [row for row in result.rows if row.quantity == "accuracy %" and row.seeds]
    constants = [row.ours for row in result.rows if row.setting.startswith("a constant")]
    assert len(constants) == 2
    assert constants[1] > constants[0]  # type: ignore[operator]
    # Two conditions: once without privacy, six methods for each epsilon.
    assert len(accuracy) == 2 * (1 + 6 * len(FEW))
    for row in accuracy:
        if NON_PRIVATE in row.setting:
            assert row.epsilon_certified is None
        elif CORRECTED in row.setting:
            assert row.epsilon_certified == pytest.approx(row.epsilon_claimed, rel=1e-3)
        else:
            assert row.epsilon_certified == math.inf
    assert compared.settings["runs"] == 2


def test_sweeps_of_the_constant_and_the_rate(small: ItemRequest) -> None:
    result = reproduce("spof", "fig2", small)
    plateaus = [row for row in result.rows if row.quantity == "plateau begins at c"]
    assert len(plateaus) == 4
    assert {row.published for row in plateaus} == {"near 2.5 on other data (fitbit)"}
    flat = [row.ours for row in result.rows if "takes no constant" in row.setting]
    assert len(flat) == 2
    rates = reproduce("spof", "rates", small)
    assert len(rates.rows) == 10


def found(name: str, accuracy: tuple[float, ...], diverged: int = 0) -> Found:
    return Found(
        cell=Cell(name=name), accuracy=accuracy, mse=accuracy, bce=accuracy, diverged=diverged,
        collapsed=0, seconds=1.0, took=1.0, claimed=1.0, certified=math.inf, relation="",
    )  # fmt: skip


def test_a_table_of_the_authors_name_is_not_theirs(tmp_path: Path) -> None:
    path = tmp_path / TABLE
    path.write_text("steps,hours\n1,2\n3,4\n5,6\n7,8\n9,10\n")
    where = training.experiment(ItemRequest(quick=True, data=str(path), rows=5, seeds=2))
    assert not where.of_the_source
    assert where.beside(2.9) == "2.9 on other data (fitbit)"


def test_gains_are_taken_run_by_run() -> None:
    cells = {Cell(name=OURS, epsilon=e): found(OURS, (50.0 + e, 70.0 + e)) for e in FEW} | {
        Cell(name=BASELINE, epsilon=e): found(BASELINE, (49.0, 69.0)) for e in FEW
    }
    gains = training.gains(cells, OURS, BASELINE, 0.0, FEW)
    assert gains == pytest.approx([6.5, 6.5])
    assert interval(gains).half == 0.0


def test_a_gain_that_most_runs_did_not_live_to_see_is_no_gain(
    small: ItemRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = training.experiment(small)
    real = replace(where, records=replace(where.records, source=TABLE), runs=6)
    monkeypatch.setattr(training, "is_authors_table", lambda path: path.name == TABLE)
    short = training_verdicts.hindrance(real, {}, 0.0)
    assert short == "12 records of each user, 18240 in the source"
    monkeypatch.setattr(training_verdicts, "SOURCE_ROWS", 12)
    clipped = replace(real, clip=1.0)
    assert training_verdicts.hindrance(clipped, {}, 0.0) == "clip 1 instead of 4"
    assert training_verdicts.hindrance(real, {}, 0.0) == ""
    own = replace(where, records=replace(where.records, synthetic=False, source="own.csv"), runs=6)
    accuracy = (52.0, 52.1, 51.9, 52.0, 52.1, 51.9)
    other = (50.0, 50.0, 50.0, 50.0, 50.0, 50.0)
    for stopped, says, why in ((6, UNDECIDED, "stopped by the guard"), (0, FAILS, "")):
        cells = {
            Cell(name=name, sigma=sigma): found(name, values, stopped if name == OURS else 0)
            for sigma in (0.0, 5.0)
            for name, values in ((OURS, accuracy), (BASELINE, other))
        }
        first, _ = training_verdicts.of_gains(real, cells)
        assert first.ours == pytest.approx(4.0)
        assert first.verdict == says
        assert why in first.reason
        # A table of somebody else's decides nothing of the source's.
        assert training_verdicts.of_gains(own, cells)[0].verdict == UNDECIDED


@pytest.mark.parametrize(("stopped", "why"), [(1, "100 % of SPOF's runs"), (0, "S13")])
def test_a_note_says_what_explains_the_gain(stopped: int, why: str, small: ItemRequest) -> None:
    where = replace(training.experiment(small), epsilons=(1.0,))
    cells = {
        Cell(name=OURS): found(OURS, (50.0,), stopped),
        Cell(name=BASELINE): found(BASELINE, (50.0,)),
    }
    assert why in spof_runs._why(where, cells, 0.0)


@pytest.mark.parametrize(
    ("accuracy", "begins"),
    [
        ((50.0, 60.0, 60.05, 60.02), 0.25),
        ((50.0, 50.0, 50.0, 50.0), 0.0),
        ((50.0, 51.0, 52.0, 53.0), "none before 0.75"),
    ],
)
def test_plateau(
    accuracy: tuple[float, ...], begins: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spof_runs, "CONSTANTS", (0.0, 0.25, 0.5, 0.75))
    where = training.experiment(ItemRequest(quick=True, rows=5, seeds=2))
    row = spof_runs._plateau(where, found(OURS, (50.0, 50.0)), accuracy)
    assert row.ours == begins


def test_a_setting_is_known_by_everything_it_depends_on() -> None:
    where = training.experiment(ItemRequest(quick=True, rows=5, seeds=2))
    digest = training._digest(where.records)
    other = training.experiment(ItemRequest(quick=True, rows=6, seeds=2))
    cell = Cell(name=OURS)
    cells = [
        cell,
        replace(cell, epsilon=2.0),
        replace(cell, sigma=5.0),
        replace(cell, constant=1.0),
        replace(cell, rate=0.01),
        replace(cell, name=OURS + CORRECTED),
        replace(cell, name=BASELINE),
    ]
    keys = [training._piece(where, one, digest).key for one in cells]
    keys.append(training._piece(replace(where, runs=3), cell, digest).key)
    keys.append(training._piece(replace(where, epochs=2), cell, digest).key)
    keys.append(training._piece(replace(where, lr=0.02), cell, digest).key)
    keys.append(training._piece(other, cell, training._digest(other.records)).key)
    assert len({json.dumps(dict(key), sort_keys=True) for key in keys}) == len(keys)
    # What does not matter to a method shares its runs.
    same = [
        training._piece(where, replace(Cell(name=BASELINE), constant=c), digest).key
        for c in (0.0, 2.5)
    ]
    assert same[0] == same[1]


def test_the_users_table_and_what_is_certified_of_it(tmp_path: Path) -> None:
    path = tmp_path / "days.csv"
    lines = [f"{i % 7},{i % 5},{i}" for i in range(40)]
    path.write_text("\n".join(["steps,hours,calories", *lines]) + "\n")
    where = training.experiment(ItemRequest(quick=True, data=str(path), rows=30, seeds=2))
    assert where.rows == 30
    assert "maxima" in where.data
    cells = [Cell(name=OURS + CORRECTED)]
    made = training.train(ItemRequest(), where, cells)[cells[0]]
    assert made.certified == math.inf
    assert any("nothing is certified" in note for note in spof_runs.notes(where))
    public = replace(where, records=replace(where.records, bounds="public"))
    assert training.train(ItemRequest(), public, cells)[cells[0]].certified == 1.0
    # Every visit of every copy of a row costs where noise is added to gradients.
    sgd = [Cell(name=BASELINE + CORRECTED)]
    copies = where.records.copies
    assert copies > 1
    spent = training.train(ItemRequest(), public, sgd)[sgd[0]].certified
    assert spent == pytest.approx(copies, rel=1e-3)


def test_corrected_epsilon_is_that_of_all_epochs() -> None:
    where = training.experiment(ItemRequest(quick=True, rows=4, epochs=3, seeds=2))
    cells = [Cell(name=name + CORRECTED, epsilon=2.0) for name in (OURS, BASELINE, FUNCTIONAL)]
    made = training.train(ItemRequest(), where, cells)
    assert [made[cell].certified for cell in cells] == pytest.approx([2.0] * 3, rel=1e-3)
    assert [made[cell].claimed for cell in cells] == [2.0] * 3


def test_sizes_belong_to_spof_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="rows"):
        reproduce("pnsgd", "table", ItemRequest(rows=5))
    monkeypatch.chdir(tmp_path)
    for option in (("--rows", "0"), ("--epochs", "0")):
        assert cli.main(["reproduce", "spof", "fig3", *option]) == cli.REFUSED
    assert cli.main(["reproduce", "ldp", "channels", "--epochs", "2"]) == cli.REFUSED
    assert cli.main(["reproduce", "spof", "fig3", "--data", "nothing.csv"]) == cli.REFUSED
    assert list(tmp_path.iterdir()) == []


def test_every_item_of_the_paper_is_there() -> None:
    figures = {f"fig{number}" for number in range(1, 7)}
    assert figures | {"comparison", "multipliers"} <= set(PAPERS["spof"])
