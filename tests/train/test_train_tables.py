"""Tables as people have them: roles of columns, public ranges, categories, blanks, headings."""

from __future__ import annotations

import csv
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base import csv_reader
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.train import Session, load
from dpkern.train.data import Dataset
from dpkern.train.encoding import CLASSES_FROM_DATA, TableOptions

PEOPLE = """id;age;job;"blood pressure";ill
7;17;clerk;120;no
8;90;farmer;;yes
9;200;none;40;no
10;53.5;astronaut;250;yes
"""
RANGES = """
age = [17, 90]
job = ["farmer", "clerk", "none"]
"blood pressure" = [40, 250]
ill = ["no", "yes"]
"""
ENCODED = [
    [-1.0, 0, 1, 0, 2 * 80 / 210 - 1],
    [1.0, 1, 0, 0, 0.0],  # a blank is the middle
    [1.0, 0, 0, 1, -1.0],  # cut off
    [0.0, 0, 0, 0, 1.0],  # a category that nobody declared
]


@pytest.fixture
def people(tmp_path: Path) -> Path:
    path = tmp_path / "people.csv"
    path.write_text(PEOPLE)
    (tmp_path / "ranges.toml").write_text(RANGES)
    return path


def options(path: Path, **changes: Any) -> TableOptions:
    given: dict[str, Any] = {
        "label": "ill",
        "drop": ("id",),
        "ranges": str(path.parent / "ranges.toml"),
    }
    return TableOptions(**given | changes)


def rows(data: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows in an order of their own, held-out rows among them."""
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    order = np.lexsort(x.T.numpy())
    return x[order], y[order]


def expected(features: Any, labels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor(features, dtype=torch.float64).float()
    order = np.lexsort(x.T.numpy())
    return x[order], torch.tensor(labels)[order]


def test_ranges_categories_and_blanks(people: Path) -> None:
    data = load(str(people), table=options(people), split_seed=1)
    for found, wanted in zip(rows(data), expected(ENCODED, [0, 1, 0, 1]), strict=True):
        assert torch.equal(found, wanted)
    assert data.classes == 2
    assert data.warnings == ()
    assert data.encoding is not None
    assert data.encoding.in_words() == (
        "label ill (no, yes); features: 2 with a public range, 1 with categories; left out: id"
    )


def test_other_rows_change_nothing_of_a_row(people: Path) -> None:
    """Nothing is scaled by a statistic: a record that joins moves no other record's features."""
    few = load(str(people), table=options(people), split_seed=1)
    with people.open("a") as file:
        file.write("11;1000000;clerk;-5;no\n")
    more = load(str(people), table=options(people), split_seed=1)
    known = {tuple(row.tolist()) for row in rows(few)[0]}
    assert known <= {tuple(row.tolist()) for row in rows(more)[0]}


def test_columns_are_named_by_heading_or_number(people: Path) -> None:
    by_name = load(str(people), table=options(people))
    by_number = load(str(people), table=options(people, label="5", drop=("1",)))
    assert torch.equal(by_name.x_train, by_number.x_train)
    assert torch.equal(by_name.y_train, by_number.y_train)


def test_names_of_classes_from_the_data_count_as_public(people: Path) -> None:
    text = RANGES.replace('ill = ["no", "yes"]', "")
    (people.parent / "ranges.toml").write_text(text)
    data = load(str(people), table=options(people))
    assert data.warnings == (CLASSES_FROM_DATA,)
    assert data.public_facts()["columns"]["classes"] == ["no", "yes"]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiters(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["a,b;c\td|e", "label"], *([i, i % 2] for i in range(8))])
    data = load(str(path))
    assert data.row_shape == (1,)
    assert data.encoding is not None
    assert data.encoding.label == "label"


@pytest.mark.parametrize(
    ("first", "header", "records"),
    [("0,1", "yes", 4), ("0,1", "no", 5), ("x,y", "auto", 4), ("5,1", "auto", 5)],
)
def test_headings(tmp_path: Path, first: str, header: str, records: int) -> None:
    path = tmp_path / "a.csv"
    path.write_text(first + "\n3,0\n4,1\n5,0\n6,1\n")
    data = load(str(path), table=TableOptions(header=header))
    assert len(rows(data)[1]) == records


@pytest.mark.parametrize(
    "first",
    ["0,1,2", "1,2,3", "country,2019,2020"],
    ids=["counted from 0", "counted from 1", "years"],
)
def test_a_first_line_that_may_be_either_is_refused(tmp_path: Path, first: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(first + "\n3,0,1\n4,1,0\n")
    with pytest.raises(InvalidInput, match="--header yes or --header no"):
        csv_reader.read(path)


def test_parquet_gives_the_rows_of_the_csv(people: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = list(csv.reader(PEOPLE.splitlines(), delimiter=";"))
    columns = dict(zip(lines[0], zip(*lines[1:], strict=True), strict=True))
    typed = {
        "id": [int(v) for v in columns["id"]],
        "age": [float(v) for v in columns["age"]],
        "job": list(columns["job"]),
        "blood pressure": [int(v) if v else None for v in columns["blood pressure"]],
        "ill": list(columns["ill"]),
    }
    other = people.with_suffix(".parquet")
    parquet.write_table(arrow.table(typed), other)
    first, second = (load(str(path), table=options(people)) for path in (people, other))
    assert torch.equal(first.x_train, second.x_train)
    assert torch.equal(first.y_test, second.y_test)


def test_dates_of_a_parquet_file_can_be_left_out_and_decimals_are_numbers(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    typed = {
        "joined": [date(2020, 1, day) for day in (1, 2, 3, 4)],
        "height": [Decimal("1.5"), None, Decimal(2), Decimal("2.5")],
        "label": [0, 1, 0, 1],
    }
    parquet.write_table(arrow.table(typed), path)
    ranges = tmp_path / "ranges.toml"
    ranges.write_text("height = [1, 3]")
    known = TableOptions(label="label", ranges=str(ranges), drop=("joined",))
    x, _ = rows(load(str(path), table=known))
    assert sorted(x.flatten().tolist()) == [-0.5, 0.0, 0.0, 0.5]
    with pytest.raises(InvalidInput, match=r"'2020-01-01'.*--drop 'joined'"):
        load(str(path), table=TableOptions(label="label", drop=("height",)))


@pytest.mark.parametrize("missing", ["", "NA", "n/a", "NaN", "null", "?"])
def test_missing_numbers_are_the_middle_of_their_range(people: Path, missing: str) -> None:
    people.write_text(PEOPLE.replace(";17;", f";{missing};"))
    holed = rows(load(str(people), table=options(people)))[0]
    assert (holed[:, 0] == 0).sum() == 2  # 53.5 is the middle too
    with pytest.raises(InvalidInput, match="a blank or NA"):
        load(str(people), table=options(people, ranges=None, drop=("id", "job", "blood pressure")))


def test_a_decimal_comma_is_named(people: Path) -> None:
    people.write_text(PEOPLE.replace("53.5", "53,5"))
    with pytest.raises(InvalidInput, match=r"'53,5'.*decimal points, not commas"):
        load(str(people), table=options(people))


def test_a_table_without_a_heading_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for first, said in (("2019,1\n", True), ("x,y\n", False)):
        path.write_text(first + "3.5,0\n4.5,1\n5.5,0\n6.5,1\n")
        encoding = load(str(path)).encoding
        assert encoding is not None
        assert ("no heading (--header yes" in encoding.in_words()) == said


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such label": ({"label": "sick"}, "label", "Name one of: id, age"),
    "no such column": ({"drop": ("id", "9")}, "drop", "from 1"),
    "the label left out": ({"drop": ("ill",)}, "drop", "--label"),
    "no range for a column": ({"drop": ()}, "ranges", "none for id"),
    "text without categories": ({"ranges": None}, "data", "--ranges file"),
    "no range file": ({"ranges": "none.toml"}, "ranges", "TOML"),
    "header of another kind": ({"header": "maybe"}, "header", "auto"),
}


@pytest.mark.parametrize(("changes", "name", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_options_that_do_not_fit_are_refused(
    people: Path, changes: dict[str, Any], name: str, said: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(str(people), table=options(people, **changes))
    assert caught.value.name == name
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "age = [90, 17]",
        "age = [17, inf]",
        "age = [17]",
        'age = "old"',
        'age = ["a", "a"]',
        "age = [true, 2]",
        "height = [0, 3]",
        "ill = [0, 1]",
        "age = [",
    ],
)
def test_range_files_that_do_not_fit_are_refused(people: Path, line: str) -> None:
    name = line.split(" ")[0]
    kept = [old for old in RANGES.splitlines() if not old.startswith(name)]
    (people.parent / "ranges.toml").write_text("\n".join([*kept, line]))
    with pytest.raises(InvalidInput) as caught:
        load(str(people), table=options(people))
    assert caught.value.name == "ranges"


def test_a_category_that_is_no_class_is_refused(people: Path) -> None:
    with people.open("a") as file:
        file.write("11;30;clerk;100;maybe\n")
    with pytest.raises(InvalidInput, match=r"'maybe' in .* line 6"):
        load(str(people), table=options(people))


def test_a_blank_label_is_no_class(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,label\n1,yes\n2,no\n3,\n4,yes\n")
    with pytest.raises(InvalidInput, match=r"got '' in .* line 4"):
        load(str(path))


def test_options_of_tables_are_refused_elsewhere() -> None:
    with pytest.raises(InvalidInput, match="no table"):
        load("digits", table=TableOptions(label="x"))


def test_a_resumed_run_keeps_its_columns(tmp_path: Path) -> None:
    path, ranges = tmp_path / "a.csv", tmp_path / "ranges.toml"
    path.write_text("a,b,label\n" + "".join(f"{i},{i * i},{i % 2}\n" for i in range(40)))
    ranges.write_text("a = [0, 40]\n")
    given = {
        "data": str(path), "drop": ("b",), "ranges": str(ranges), "noise_multiplier": 1.0,
        "epochs": 2, "batch_size": 8, "out": tmp_path / "out", "figure": False,
    }  # fmt: skip
    Session(given).save()
    again = {"out": tmp_path / "out", "resume": True, "figure": False}
    assert Session(again | {"drop": ("b",)}).data.row_shape == (1,)
    with pytest.raises(PrivacyError, match="drop"):
        Session(again | {"drop": ("a",)})
    ranges.write_text("a = [0, 80]\n")  # the same option, other features
    with pytest.raises(PrivacyError):
        Session(again)


def test_one_class_of_text_is_refused(people: Path) -> None:
    people.write_text(PEOPLE.replace(";yes", ";no"))
    (people.parent / "ranges.toml").write_text(RANGES.replace('ill = ["no", "yes"]', ""))
    with pytest.raises(InvalidInput, match="only 'no' in column 'ill'"):
        load(str(people), table=options(people))


def test_breast_cancer_at_epsilon_3(tmp_path: Path) -> None:
    """A table as people have it: public ranges make private training work."""
    bunch = pytest.importorskip("sklearn.datasets").load_breast_cancer()
    path, ranges = tmp_path / "cells.csv", tmp_path / "ranges.toml"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", *bunch.feature_names, "diagnosis"])
        for i, (x, y) in enumerate(zip(bunch.data, bunch.target, strict=True)):
            writer.writerow([i, *x, bunch.target_names[y]])
    # Round numbers above what is measured: what a physician would write down.
    tops = [
        50, 50, 200, 5000, 0.2, 0.5, 0.5, 0.5, 0.5, 0.1, 5, 5, 50, 1000, 0.05, 0.2, 0.5, 0.1,
        0.1, 0.05, 50, 50, 500, 5000, 0.5, 2, 2, 0.5, 1, 0.5,
    ]  # fmt: skip
    lines = [f'"{n}" = [0, {top}]' for n, top in zip(bunch.feature_names, tops, strict=True)]
    ranges.write_text("\n".join([*lines, 'diagnosis = ["malignant", "benign"]']))
    accuracies = []
    for seed in range(5):
        session = Session(
            {
                "data": str(path), "ranges": str(ranges), "drop": ("id",), "label": "diagnosis",
                "epsilon": 3.0, "delta": 1e-4, "epochs": 60,
                "unsafe_seed": seed, "split_seed": seed, "out": tmp_path / str(seed),
                "figure": False,
            }
        )  # fmt: skip
        summary = session.run()
        assert summary["majority_accuracy"] < 0.75
        accuracies.append(summary["test_accuracy"])
    assert np.median(accuracies) >= 0.94
