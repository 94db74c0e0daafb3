"""SPOF's items on a table of one's own: columns, user column and public bounds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.papers import ItemRequest, reproduce
from dpkern.papers.spof.setting import experiment

pytestmark = pytest.mark.usefixtures("one_thread")

HEADINGS = ["Who", *(f"f{n}" for n in range(15))]


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Days of four persons, 15 features up to 100."""
    draw = torch.Generator().manual_seed(0)
    rows = [
        [f"p{n % 4}", *torch.randint(1, 101, (15,), generator=draw).tolist()] for n in range(80)
    ]
    file = tmp_path / "days.csv"
    lines = [",".join(map(str, row)) for row in (HEADINGS, *rows)]
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def test_the_sources_choices_are_the_defaults(table: str) -> None:
    found = experiment(ItemRequest(data=f"fitbit={table}", rows=10)).records
    assert found.columns == tuple(HEADINGS[1:15])
    assert found.bounds == "maxima of the data"
    assert found.unproved


def test_columns_persons_and_bounds_are_taken(table: str) -> None:
    chosen = ",".join(reversed(HEADINGS[2:16]))
    request = ItemRequest(data=table, rows=10, columns=chosen, user_column="Who", bounds="100")
    found = experiment(request).records
    assert ",".join(found.columns) == chosen
    assert found.bounds == "public"
    assert not found.unproved
    assert float(found.train.max()) <= 1
    assert any("Who" in note or "person" in note for note in found.notes)


def test_public_bounds_certify_the_corrected_runs(table: str) -> None:
    rows = {}
    for bounds in (None, "100"):
        request = ItemRequest(quick=True, data=table, rows=4, seeds=1, bounds=bounds)
        result = reproduce("spof", "fig3", request)
        rows[bounds] = [
            row.epsilon_certified
            for row in result.rows
            if row.setting.startswith("SPOF, corrected, epsilon 1,")
        ]
    assert rows[None]
    assert all(math.isinf(epsilon or 0.0) for epsilon in rows[None])
    assert all(epsilon == pytest.approx(1.0) for epsilon in rows["100"])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bounds": "a lot"}, r"^bounds: expected a number"),
        ({"bounds": "50"}, r"^data: expected values up to the public bound"),
        ({"user_column": "Whom"}, r"^user_column"),
        ({"columns": "f1,f99"}, r"^columns"),
    ],
)
def test_what_does_not_fit_is_refused(table: str, changes: dict[str, str], match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        experiment(ItemRequest(data=table, rows=10, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["columns", "user_column", "bounds"])
def test_without_a_table_and_elsewhere_they_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^{name}: expected none without a table"):
        reproduce("spof", "fig3", ItemRequest(**{name: "1"}))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=rf"^{name}: expected none, except for spof"):
        reproduce("spof", "released", ItemRequest(**{name: "1"}))  # type: ignore[arg-type]
