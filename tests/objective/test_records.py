"""Tables of records: what is chosen, scaled, dealt and drawn, and every refusal before training."""

from pathlib import Path

import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.objective.records import MAXIMA, PUBLIC, generated, load

TRACKER = "Id,Date,Steps,Distance,Calories\n"


def tracker(path: Path, rows: int = 20, persons: int = 3) -> Path:
    """Rows whose features tell the row: steps = row + 1, distance = 2 (row + 1)."""
    lines = [f"{i % persons},4/{i}/2016,{i + 1},{2 * (i + 1)},{100 + i}\n" for i in range(rows)]
    path.write_text(TRACKER + "".join(lines))
    return path


def test_numeric_columns_are_chosen_in_order_and_the_rest_is_padded(tmp_path):
    found = load(tracker(tmp_path / "days.csv"), features=5)
    assert found.columns == ("Steps", "Distance", "Calories", "padding1", "padding2")
    assert found.train.shape == (2, 8, 5)
    assert found.test.shape == (2, 2, 5)
    assert found.train.dtype == torch.float32
    assert not found.train[..., 3:].any()
    notes = " | ".join(found.notes)
    for said in ("Id left out: it names a person", "Date left out: it holds text", "padded"):
        assert said in notes


def test_columns_beyond_those_wanted_are_left_out_and_said_so(tmp_path):
    found = load(tracker(tmp_path / "days.csv"), features=2)
    assert found.columns == ("Steps", "Distance")
    assert "column Calories left out: 2 features were wanted" in found.notes
    named = load(tmp_path / "days.csv", features=2, columns=("Calories", "Id"))
    assert named.columns == ("Calories", "Id")


def test_maxima_of_the_data_are_recorded_and_public_bounds_take_their_place(tmp_path):
    path = tracker(tmp_path / "days.csv")
    found = load(path, features=3)
    assert found.bounds == MAXIMA
    assert "maxima" in found.unproved
    both = torch.cat([found.train, found.test], 1).reshape(-1, 3)
    assert torch.equal(both.max(0).values, torch.ones(3))
    public = load(path, features=3, bounds={"Steps": 40, "Distance": 40, "Calories": 200})
    assert public.bounds == PUBLIC
    assert not public.unproved
    torch.testing.assert_close(public.train[..., 0] * 2, public.train[..., 1])
    torch.testing.assert_close(public.train[..., 0] * 2, found.train[..., 0])  # 40 against 20
    same = load(path, features=3, bounds=(40, 40, 200))
    assert torch.equal(public.train, same.train)


def test_rows_are_dealt_once_and_none_is_both_held_out_and_trained_on(tmp_path):
    found = load(tracker(tmp_path / "days.csv"), features=3, bounds=1000)
    steps = (torch.cat([found.train, found.test], 1)[..., 0] * 1000).round()
    assert sorted(steps.flatten().tolist()) == list(range(1, 21))
    assert found.copies == 1


def test_a_user_column_keeps_a_persons_rows_with_one_user(tmp_path):
    path = tracker(tmp_path / "days.csv", rows=18, persons=3)
    found = load(path, features=3, bounds=1000, user_column="Id")
    rows = (torch.cat([found.train, found.test], 1)[..., 0] * 1000).round() - 1
    assert {int(row) % 3 for row in rows[0]} <= {0, 2}  # persons 0, 1, 2 to users 0, 1, 0
    assert {int(row) % 3 for row in rows[1]} == {1}
    assert found.train.shape[1] == 5  # of 6 rows of the user with the fewest
    assert any("values of Id dealt to 2 users in turn: the user of a row" in n for n in found.notes)


def test_samples_are_drawn_with_replacement_from_training_rows_only(tmp_path):
    found = load(tracker(tmp_path / "days.csv"), features=3, bounds=1000, samples=100)
    assert found.train.shape == (2, 100, 3)
    held = {round(1000 * float(x)) for x in found.test[..., 0].flatten()}
    drawn = {round(1000 * float(x)) for x in found.train[..., 0].flatten()}
    assert not held & drawn
    for user in range(2):  # rows tells which samples are one record
        for row in range(8):
            same = found.train[user][found.rows[user] == row]
            assert torch.equal(same, same[:1].expand_as(same))
        assert len(found.train[user].unique(dim=0)) == len(found.rows[user].unique())
    counts = [torch.bincount(found.rows[user]).max() for user in range(2)]
    assert found.copies == max(counts) > 1
    for user, firsts in enumerate(found.firsts):
        assert torch.equal(found.train[user][firsts], found.train[user])
        assert len(firsts.unique()) == len(found.rows[user].unique())
        assert (firsts <= torch.arange(100)).all()
    again = load(tmp_path / "days.csv", features=3, bounds=1000, samples=100)
    assert torch.equal(found.train, again.train)
    other = load(tmp_path / "days.csv", features=3, bounds=1000, samples=100, seed=1)
    assert not torch.equal(found.train, other.train)


def test_a_file_without_header_and_a_column_of_zeros(tmp_path):
    path = tmp_path / "plain.csv"
    path.write_text("".join(f"{i},0\n" for i in range(10)))
    found = load(path, users=1, features=2)
    assert found.columns == ("column1", "column2")
    assert not found.train[..., 1].any()


REFUSED = {
    "negative": ("1,a,-5,2,3\n", {}, "data", "-5 in .* line 22"),
    "nan": ("1,a,nan,2,3\n", {}, "data", "blank or NaN"),
    "blank": ("1,a,,2,3\n", {}, "data", "blank or NaN"),
    "infinite": ("1,a,inf,2,3\n", {}, "data", "inf in"),
    "above the bound": ("1,a,50,2,3\n", {"bounds": (49, 40, 119)}, "data", "bound .*Steps, got 50"),
    "ragged": ("1,a,5\n", {}, "data", "3 in .* line 22"),
    "missing column": ("", {"columns": ("Steps", "Pulse")}, "columns", "Pulse"),
    "text column": ("", {"columns": ("Steps", "Date")}, "data", "'4/0/2016'"),
    "missing user column": ("", {"user_column": "Person"}, "user_column", "Person"),
    "empty user": ("", {"user_column": "Id", "users": 4}, "user_column", "no rows"),
    "blank user": (",a,1,2,3\n", {"user_column": "Id"}, "user_column", "a blank one"),
    "one row a user": ("", {"users": 20}, "data", "one training and one held-out row"),
    "user without rows": ("", {"users": 50}, "data", "one training and one held-out row"),
    "column twice": ("", {"columns": ("Steps", "Steps")}, "columns", "different"),
    "more than wanted": ("", {"columns": ("Steps", "Distance"), "features": 1}, "features", "2"),
    "bound missing": ("", {"bounds": {"Steps": 9}}, "bounds", "missing"),
    "bounds too few": ("", {"bounds": (9,)}, "bounds", "1 numbers"),
    "bound of zero": ("", {"bounds": 0}, r"bounds\[Steps\]", "> 0"),
    "no share held out": ("", {"held_out": 0.0}, "held_out", "0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_tables_are_refused_with_what_is_wrong(tmp_path, case):
    line, options, name, said = REFUSED[case]
    path = tracker(tmp_path / "days.csv")
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(InvalidInput, match=f"^{name}: .*{said}"):
        load(path, **options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Id,Steps\n1,2\n1,3\n2,4\n", "at least two numeric columns"),
        ("Steps,Distance\n", "at least one row"),
        ("", "at least one row"),
        ("Steps,Steps\n1,2\n", "every heading once"),
        (None, "a readable CSV file"),
    ],
)
def test_files_without_a_table_of_numbers_are_refused(tmp_path, text, said):
    path = tmp_path / "bad.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidInput, match=said):
        load(path)


def test_generated_records_are_as_described():
    found = generated(users=3, records=400, features=14, seed=5)
    assert found.synthetic
    assert found.bounds == PUBLIC
    assert found.train.shape == (3, 400, 14)
    assert found.test.shape == (3, 100, 14)
    assert found.train.min() == 0
    assert found.train.max() == 1
    means = found.train.mean((1, 2))
    assert (means.diff() > 0.02).all()  # distinct users
    dense = found.train[0][:, [0, 1, 3, 4]]
    assert (torch.corrcoef(dense.T) > 0.05).all()  # correlated
    inside = dense[dense < 1]
    assert inside.mean() > 1.1 * inside.median()  # heavy-tailed
    again = generated(users=3, records=400, features=14, seed=5)
    assert torch.equal(found.train, again.train)
