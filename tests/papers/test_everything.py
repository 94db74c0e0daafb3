"""reproduce all: checked before the first training, resumed, one page for each paper."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern import cli
from dpkern.base.errors import InvalidInput
from dpkern.base.threads import torch_threads
from dpkern.papers import (
    ComparisonRow,
    ItemRequest,
    Result,
    catalogue,
    everything,
    page,
    runner,
    show,
)
from dpkern.papers.pieces import CachedRun
from dpkern.papers.sources import PARTS
from dpkern.papers.verdict import exact

ROW = ComparisonRow(item="one", setting="<b>s</b>", quantity="q", ours=1.0, stopped=0, collapsed=1)


def result(item: str, **more: Any) -> Result:
    return Result(
        paper="p", item=item, title="t", rows=[ROW], settings={}, verdicts=[CLAIM], **more
    )


CLAIM = exact("a & b <claim>", False, reason="because")


def test_whole_numbers_are_shown_with_all_their_digits() -> None:
    rows = [replace(ROW, ours=value) for value in (131072.0, 1.2345678, "text", math.inf, -3, 1e13)]
    shown = show.columns(rows)["ours"]
    assert shown == ["131072", "1.2346", "text", "inf", "-3", "1e+13"]


class Items:
    """A paper of a formula, a training, and an item that cannot be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.formulas = self.trained = 0
        self.broken = False
        papers = {"p": {"formula": self.formula, "training": self.training, "last": self.last}}
        monkeypatch.setattr(catalogue, "PAPERS", papers)
        monkeypatch.setattr(catalogue, "DATA", {("p", "training"): frozenset({"mnist"})})

    def formula(self, request: ItemRequest) -> Result:
        del request
        self.formulas += 1
        return result("formula")

    def training(self, request: ItemRequest) -> Result:
        def compute(on_step: Any) -> dict[str, Any]:
            self.trained += 1
            on_step(1)
            return {}

        request.through([CachedRun(label="x", key={"x": 1}, compute=compute)])
        return result("training")

    def last(self, request: ItemRequest) -> Result:
        del request
        if self.broken:
            raise InvalidInput("data", expected="a file", got="none", remedy="Give one.")
        return result("last")


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> Items:
    return Items(monkeypatch)


def test_nothing_is_trained_before_everything_was_checked(
    items: Items, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items.broken = True
    call = ["reproduce", "p", "all", "--no-figure", "--out", str(tmp_path / "out")]
    assert cli.main(call) == cli.REFUSED
    assert (items.trained, items.formulas) == (0, 1)
    assert not (tmp_path / "out").exists()
    items.broken = False
    assert cli.main(call) == 0
    assert items.trained == 1
    assert items.formulas == 2, "a formula is computed once, by the plan"
    assert cli.main([*call, "--resume"]) == 0
    assert items.trained == 1


@pytest.mark.parametrize("quick", [True, False])
def test_quick_runs_use_one_thread(
    items: Items, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    seen: list[int] = []

    def formula(request: ItemRequest) -> Result:
        del request
        seen.append(torch.get_num_threads())
        return result("formula")

    monkeypatch.setitem(catalogue.PAPERS["p"], "formula", formula)
    call = ["reproduce", "p", "all", "--no-figure", "--out", str(tmp_path)]
    with torch_threads(2):
        assert cli.main([*call, "--quick"] if quick else call) == 0
        assert torch.get_num_threads() == 2
    assert seen == [1 if quick else 2]


def test_a_page_says_everything_and_refers_to_nothing(items: Items, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["reproduce", "all", "--quick", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "p.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text)
    assert text.count("data:image/png;base64,") == 3
    assert "a &amp; b &lt;claim&gt;" in text
    assert "&lt;b&gt;s&lt;/b&gt;" in text
    assert "<b>s" not in text
    assert "3 claims: 0 hold, 3 fail, 0 not decidable here." in text
    assert "guard: of 0 runs 0 were stopped, 1 collapsed" in text


def test_data_that_an_item_does_not_use_is_refused_or_said(
    items: Items, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, data in (("formula", "folder"), ("training", "svhn=folder")):
        with pytest.raises(InvalidInput, match=r"^data: expected"):
            catalogue.reproduce("p", name, ItemRequest(data=data))
    pairs = everything.wanted("p")
    for data in ("svhn=folder", "mnist=a,svhn=b"):
        with pytest.raises(InvalidInput, match=r"^data: expected data sets that an item takes"):
            everything.check_data(pairs, data)
    unused = everything.check_data(pairs, "mnist=folder")
    assert unused == [("p", "formula"), ("p", "last")]
    out = ["--out", str(tmp_path), "--no-figure"]
    assert cli.main(["reproduce", "p", "all", "--data", "mnist=folder", *out]) == 0
    assert "--data is not used by p formula, p last" in capsys.readouterr().out


def test_one_folder_is_not_the_data_of_several_papers() -> None:
    pairs = [("gredp", "table1"), ("spof", "fig3")]
    with pytest.raises(InvalidInput, match="folders by data set"):
        everything.check_data(pairs, "folder")


def test_every_item_has_a_place_in_a_source_and_every_place_an_item() -> None:
    listed = [(part.paper, part.item) for part in PARTS]
    assert sorted(listed) == sorted((p, i) for p, own in catalogue.PAPERS.items() for i in own)
    assert len(set(listed)) == len(listed)


def test_every_item_that_trains_says_whose_data_it_takes() -> None:
    known = {(paper, item) for paper, own in catalogue.PAPERS.items() for item in own}
    assert set(catalogue.DATA) <= known
    for pairs in catalogue.SIZED.values():
        assert pairs <= known


@pytest.mark.parametrize("item", ["fig3", "fig5", "table2"])
def test_directional_items_are_planned_without_training(
    item: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dp_accounting")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(runner, "once", never)
    (planned,) = everything.plan([("directional", item)], lambda *_: ItemRequest(quick=True))
    assert planned.result is None
    assert len(planned.pieces) >= 6
    names = {piece.label for piece in planned.pieces}
    assert len(names) == len(planned.pieces)


def test_a_page_without_pictures_has_none(tmp_path: Path) -> None:
    text = page.render("p", [result("one")], tmp_path, quick=False)
    assert "data:image" not in text
    assert "decide nothing" not in text
