"""Private ranges of a table's columns: their privacy, what is paid, and columns of every kind."""

from __future__ import annotations

import csv
import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dpkern.base.errors import DPKernError, InvalidInput, PrivacyError
from dpkern.base.laws import GAUSSIAN, SCALE_CELLS, SCALE_UNITS, gaussian_tail
from dpkern.base.masses import gaussian_masses, idealise, path_cells
from dpkern.base.rng import Key
from dpkern.privacy import accounting
from dpkern.privacy.accounting.history import certify_uses
from dpkern.privacy.mechanisms.range_counts import BINS, ZERO, RangeCounts
from dpkern.step.step import DPStep
from dpkern.train import Session, private_ranges
from dpkern.train.private_ranges import bins, contributions, read, release

pytestmark = pytest.mark.usefixtures("one_thread")

CELL = SCALE_UNITS // SCALE_CELLS
HOSTILE = [
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, -1e-45, 1.0, -1.0, 0.5, 2.0**-41),
    *(math.nextafter(2.0**-41, 1), 2.0**63, 3.4e38, -3.4e38, 1e300, 1000.0, -7.25),
]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (0.0, 0), (2.0**-41, 0), (math.nextafter(2.0**-41, 1), 1), (2.0**-40, 1), (0.75, 41),
        (1.0, 41), (math.nextafter(1, 2), 42), (2.0, 42), (2.0**63, 104), (math.inf, 104),
    ],
)  # fmt: skip
def test_bins_end_at_powers_of_two(value: float, place: int) -> None:
    found = bins(torch.tensor([value, -value], dtype=torch.float64))
    assert found.tolist() == [ZERO + place, ZERO - place]
    assert bins(torch.tensor([math.nan])).tolist() == [-1]
    low, high = private_ranges._edges(ZERO + place)
    assert place == 0 or low < min(value, 2.0**63) <= high


@pytest.mark.parametrize("columns", [1, 2, 7])
def test_no_record_moves_the_sums_by_more_than_is_accounted(columns: int) -> None:
    """Every hostile record, added to hostile rows: integers, so the bound holds to the last bit."""
    counts = RangeCounts.for_epsilon(0.7, 1e-5, columns=columns)
    rows = torch.tensor(HOSTILE, dtype=torch.float64)[:, None].repeat(1, columns)
    allowed = (SCALE_UNITS / Fraction(counts.noise_multiplier)) ** 2
    before, worst = contributions(counts, rows), 0
    for value in itertools.product(HOSTILE, repeat=min(columns, 2)):
        record = torch.tensor([*value, *[value[0]] * (columns - len(value))], dtype=torch.float64)
        moved = contributions(counts, torch.cat([rows, record[None]])) - before
        worst = max(worst, int(moved.square().sum()))
        assert int((2 * moved).square().sum()) > allowed or bool(record.isnan().any())
    assert worst <= allowed
    assert worst == columns * counts.unit**2  # attained


def law(units: int) -> npt.NDArray[np.float64]:
    """Exact probabilities of the released cells -4000 .. 4000 of a sum of so many lattice units."""
    profile = idealise(gaussian_masses(GAUSSIAN.counts, gaussian_tail())).as_float()
    shift, phase = divmod(units, CELL)
    steps, rest = divmod(256 * phase, CELL)
    assert rest == 0
    masses = path_cells(profile, steps, 0)[0][2:] / 256**2
    found = np.zeros(8001)
    first = 4000 + shift - len(masses) // 2
    found[first : first + len(masses)] = masses
    return found


def delta_between(one: npt.NDArray[Any], other: npt.NDArray[Any], epsilon: float) -> float:
    """The smallest delta at which two discrete laws are (epsilon, delta)-close, both ways."""
    bounds = (
        np.maximum(p - math.exp(epsilon) * q, 0).sum() for p, q in ((one, other), (other, one))
    )
    return float(max(bounds))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-3), (1.0, 1e-5), (3.0, 1e-4)])
@pytest.mark.parametrize("columns", [1, 2])
def test_exact_probabilities_of_neighbours_stay_within_epsilon(
    columns: int, epsilon: float, delta: float
) -> None:
    """The laws of what is released with and without one record, summed over all outputs.

    A record that counted twice is the negative control: the same comparison must see it.
    """
    made = RangeCounts.for_epsilon(epsilon, delta, columns=columns)
    counts = RangeCounts(columns=columns, unit=made.unit // 64 * 64)  # whole steps of the law

    without, once, twice = (law(records * counts.unit) for records in (0, 1, 2))
    if columns == 2:  # one bin in each of two columns, independent noise
        keep = np.flatnonzero(without + once + twice > 1e-12)
        without, once, twice = (np.outer(p[keep], p[keep]) for p in (without, once, twice))
    found = delta_between(without, once, epsilon)
    assert found <= delta
    assert found > 0.5 * delta  # and no more noise than that takes
    assert delta_between(without, twice, epsilon) > 2 * delta


def test_noise_is_that_of_the_law() -> None:
    """Counts of no rows, many times: the noise has the declared deviation and no pattern."""
    counts = RangeCounts.for_epsilon(1.0, 1e-5, columns=20)
    noisy = []
    for seed in range(5):
        sums = contributions(counts, torch.empty(0, 20))
        cells = private_ranges.noise.add_noise(
            sums, stream=Key.from_unsafe_seed(seed).stream(private_ranges.Purpose.NOISE, 0, 1)
        )
        noisy.append(cells.double() * CELL / counts.unit)
    assert float(torch.stack(noisy).std()) == pytest.approx(counts.sd, rel=0.02)
    assert float(torch.stack(noisy).mean()) == pytest.approx(0, abs=0.05 * counts.sd)


def ranges_of(values: list[float], columns: int = 1) -> tuple[float, float]:
    counts = RangeCounts.for_epsilon(5.0, 1e-5, columns=columns)
    rows = torch.tensor(values).repeat(400 // len(values))[:, None].repeat(1, columns)
    found = release(counts, rows, Key.from_unsafe_seed(2))
    assert len(set(found)) == 1
    return found[0]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0.0], (-(2.0**-41), 2.0**-41)),
        ([0.0, 1.0], (0.0, 1.0)),
        ([1.0], (0.5, 1.0)),
        ([-3.0, 3.0], (-4.0, 4.0)),
        ([-100.0, -30.0], (-128.0, -16.0)),
        ([1e30, 1e-30], (0.0, 2.0**63)),
        ([math.inf, -math.inf], (-(2.0**63), 2.0**63)),
        ([1990.0, 2020.0], (1024.0, 2048.0)),
    ],
)
def test_ranges_of_known_columns(values: list[float], wanted: tuple[float, float]) -> None:
    assert ranges_of(values) == wanted


def test_no_count_that_stands_out_gives_some_range() -> None:
    counts = RangeCounts.for_epsilon(0.01, 1e-9, columns=3)
    found = release(counts, torch.full((4, 3), math.nan), Key.from_unsafe_seed(0))
    assert all(low < high for low, high in found)
    assert len(read(counts, torch.zeros(3, BINS))) == 3


# whole runs

COLUMNS = ["wage", "flag", "same", "blank", "years"]


def write(path: Path, count: int = 300, extra: str = "") -> Path:
    draw = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, "label"])
        for i in range(count):
            blank = "" if i % 2 else 3.0
            writer.writerow([draw.lognormal(8), i % 2, 7, blank, 1990 + i % 31, i % 3])
        file.write(extra)
    return path


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    return {
        "data": str(write(tmp_path / "people.csv")), "epsilon": 3.0, "delta": 1e-4,
        "private_ranges": 1.0, "epochs": 4, "batch_size": 60, "out": tmp_path / "out",
        "model": "linear", "figure": False,
    }  # fmt: skip


def test_a_run_pays_for_its_ranges_and_says_so(given: dict[str, Any]) -> None:
    session = Session(given)
    assert session.steps.step.ledger.preparations == ()  # nothing is released before it runs
    assert "ranges are released first, for epsilon 1, which is part" in session.data_in_words()
    summary = session.run()
    found = summary["private_ranges"]
    assert found["epsilon"] == 1.0
    assert list(found["columns"]) == COLUMNS
    assert all(low < high for low, high in found["columns"].values())
    assert session.data.x_train.isfinite().all()
    assert session.data.x_train.abs().max() <= 1
    assert session.data.x_test.abs().max() <= 1
    assert 2.9 < summary["epsilon_certified"] <= 3.0
    assert summary["epsilon_claimed"] == summary["epsilon_certified"]
    gaussian = {"event": "GaussianDpEvent", "noise_multiplier": found["noise_multiplier"]}
    assert gaussian in [event["event_of"] for event in summary["certificate"]["event"]["events"]]
    assert session.ranges is not None
    alone = certify_uses([session.ranges.entry], given["delta"])
    assert 0.9 < alone.epsilon <= 1.0
    assert alone.certified_for == "released bits"
    changes = {"private_ranges": None, "feature_scale": 1e4, "data": _whole(given)}
    free = Session(given | changes | {"out": given["out"].with_name("free")})
    assert session.noise_multiplier is not None
    assert free.noise_multiplier is not None
    assert session.noise_multiplier > free.noise_multiplier


def _whole(given: dict[str, Any]) -> str:
    """The same rows without blanks, which only ranges allow."""
    path = Path(given["data"])
    whole = path.with_name("whole.csv")
    whole.write_text(path.read_text().replace(",,", ",3.0,"))
    return str(whole)


def test_without_the_entry_the_total_would_be_less(given: dict[str, Any]) -> None:
    """The negative control of the composition: steps alone are below the target, by far."""
    session = Session(given | {"unsafe_seed": 3})
    session.run()
    step = session.steps.step
    steps = certify_uses(step.ledger._uses, given["delta"]).epsilon
    assert steps < 2.9 < step.epsilon_if_seed_secret(given["delta"]) <= 3.0


def test_held_out_rows_decide_nothing(given: dict[str, Any], tmp_path: Path) -> None:
    first = Session(given | {"unsafe_seed": 5})
    first.run()
    second = Session(given | {"unsafe_seed": 5, "out": tmp_path / "again"})
    second.data.x_test[:] = 1e20
    second.run()
    assert first.ranges is not None
    assert second.ranges is not None
    assert first.ranges.known == second.ranges.known


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "shuffled"])
def test_every_sampling_meets_the_target(given: dict[str, Any], sampling: str) -> None:
    summary = Session(given | {"sampling": sampling, "epsilon": 8.0}).run()
    assert 7.5 < summary["epsilon_certified"] <= 8.0
    relation = {"poisson": "add_remove", "fixed": "replace_one", "shuffled": "zero_out"}[sampling]
    assert summary["relation"] == relation
    multiplier = summary["private_ranges"]["noise_multiplier"]
    spent = {"event": "GaussianDpEvent", "noise_multiplier": multiplier}
    proved = accounting.accountants.upper_bounds(
        accounting.events.leaves(spent), relation, given["delta"], 1
    )
    assert 0.9 < min(proved.values()) <= 1.0


def test_a_resumed_run_keeps_its_ranges_and_pays_once(given: dict[str, Any]) -> None:
    seeded = given | {"unsafe_seed": 9}
    whole = Session(seeded | {"out": given["out"].with_name("whole")})
    wanted = whole.run()
    session = Session(seeded)
    take = session.steps.take

    def interrupted() -> Any:
        if session.steps_done == 5:
            raise KeyboardInterrupt
        return take()

    session.steps.take = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.run()
    session.steps.between_steps = True
    session.save()
    again = Session({"out": given["out"], "resume": True, "figure": False})
    assert "known from an earlier session" in again.data_in_words()
    found = again.run()
    assert len(again.steps.step.ledger.preparations) == 1
    assert found["private_ranges"] == wanted["private_ranges"]
    assert found["epsilon_if_seed_secret"] == wanted["epsilon_if_seed_secret"]
    for one, other in zip(
        whole.steps.model.parameters(), again.steps.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_an_interrupted_release_counts_as_one(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    session = Session(given)
    monkeypatch.setattr(private_ranges, "release", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.run()
    monkeypatch.undo()
    session.save()
    again = Session({"out": given["out"], "resume": True, "figure": False})
    summary = again.run()
    assert len(again.steps.step.ledger.preparations) == 2
    assert summary["epsilon_certified"] > given["epsilon"]  # said, though it is more than wanted


def test_a_ledger_keeps_preparations_and_a_step_does_not_forget_them(
    given: dict[str, Any],
) -> None:
    session = Session(given)
    session.run()
    step = session.steps.step
    state = step.ledger.state_dict()
    assert state["version"] == 3  # a reader that knows no preparations refuses it
    loaded = accounting.Ledger()
    loaded.load_state_dict(state)
    assert loaded.certify(1e-4).epsilon == step.ledger.certify(1e-4).epsilon
    assert loaded.state_dict() == state
    assert loaded.steps == step.steps
    without = {name: value for name, value in state.items() if name != "preparations"}
    with pytest.raises(InvalidInput):
        accounting.Ledger().load_state_dict(without)
    other = Session(given | {"out": given["out"].with_name("other")}).steps.step
    assert isinstance(other, DPStep)
    assert session.ranges is not None
    other.ledger.record_preparation(session.ranges.entry)
    with pytest.raises(PrivacyError, match="releases before them"):
        other.load_state_dict(step.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"private_ranges": 3.0}, "less than --epsilon 3"),
        ({"private_ranges": 7.0}, "less than --epsilon 3"),
        ({"private_ranges": -1.0}, "private_ranges"),
        ({"private_ranges": 0.001}, "at least 0.01"),
        ({"private_ranges": math.nan}, "private_ranges"),
        ({"feature_scale": 2.0}, "at most one of them"),
        ({"mode": "published"}, "a paper's claim covers its steps alone"),
        ({"mechanism": "randomized_response"}, "protects labels alone"),
        ({"data": "digits"}, "--private-ranges with digits"),
    ],
)
def test_refusals(given: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DPKernError, match=message):
        Session(given | changes)
    assert not given["out"].exists()


def test_a_range_file_may_leave_columns_out_but_speaks_of_no_others(
    given: dict[str, Any], tmp_path: Path
) -> None:
    ranges = tmp_path / "ranges.toml"
    ranges.write_text("years = [1990, 2020]\nflag = ['0', '1']\n")
    session = Session(given | {"ranges": str(ranges)})
    assert session.ranges is not None
    assert session.ranges.columns == ("wage", "same", "blank")
    assert list(session.ranges.places) == [0, 3, 4]  # the flag has two features
    words = session.data_in_words()
    assert "3 with a private range, 1 with categories, 1 with a public range" in words
    session.run()
    assert session.data.x_train.abs().max() <= 1
    given["out"] = tmp_path / "other"
    ranges.write_text("yeras = [1990, 2020]\n")
    with pytest.raises(InvalidInput, match="lines for yeras, which the data have not"):
        Session(given | {"ranges": str(ranges)})
    ranges.write_text("".join(f"{name} = [0, 1]\n" for name in COLUMNS))
    with pytest.raises(InvalidInput, match="without a public range"):
        Session(given | {"ranges": str(ranges)})


def test_text_in_a_column_is_refused_with_its_line(given: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "text.csv", extra="1,1,7,many,2000,1\n")
    with pytest.raises(InvalidInput, match="numbers in column 'blank'"):
        Session(given | {"data": str(path)})


def test_breast_cancer_with_nothing_declared(tmp_path: Path) -> None:
    bunch = pytest.importorskip("sklearn.datasets").load_breast_cancer()
    path = tmp_path / "cells.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*bunch.feature_names, "label"])
        writer.writerows([*x, y] for x, y in zip(bunch.data, bunch.target, strict=True))
    accuracies = []
    for seed in range(3):
        session = Session(
            {
                "data": str(path), "epsilon": 3.0, "private_ranges": 1.0, "delta": 1e-4,
                "epochs": 60, "unsafe_seed": seed, "split_seed": seed,
                "out": tmp_path / str(seed), "figure": False,
            }
        )  # fmt: skip
        accuracies.append(session.run()["test_accuracy"])
    assert np.median(accuracies) >= 0.92
