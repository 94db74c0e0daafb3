"""Settings of a long item: computed once, kept, continued, and refused when they are not ours."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from dpkern import cli
from dpkern.base.errors import InvalidInput
from dpkern.papers import (
    PAPERS,
    CachedRun,
    ComparisonRow,
    ItemRequest,
    Result,
    ResultCache,
    names,
    show,
)
from dpkern.papers import catalogue as catalogue_module
from dpkern.papers import cli as cli_reproduce
from dpkern.papers.pieces import FOLDER, OnStep

NUMBERS = {"accuracy": [1.5, math.nan, math.inf], "diverged": [False, True], "nested": {"a": 2}}


class Counting:
    """Numbers of a piece, and how often they were asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, on_step: OnStep) -> dict[str, object]:
        self.calls += 1
        on_step(1)
        on_step(2)
        return dict(NUMBERS)


class Seen:
    """A watch that remembers."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.shares: list[float] = []

    def piece(self, label: str, number: int, count: int) -> None:
        self.pieces.append(f"{label} {number}/{count}")

    def progress(self, share: float) -> None:
        self.shares.append(share)


def piece(compute: Counting, **key: object) -> CachedRun:
    return CachedRun(
        label="x", key={"epsilon": 1.0, "seeds": (0, 1), **key}, compute=compute, steps=2
    )


def same(found: object) -> bool:
    return repr(found) == repr(NUMBERS)


def test_a_setting_is_computed_once(tmp_path: Path) -> None:
    compute, watch = Counting(), Seen()
    finished = ResultCache(folder=tmp_path)
    request = ItemRequest(finished=finished, watch=watch)
    first = request.through([piece(compute), piece(compute, c=2.5)])
    assert compute.calls == 2
    assert all(same(found) for found in first)
    assert watch.pieces == ["x 1/2", "x 2/2"]
    assert watch.shares == [0.25, 0.5, 0.5, 0.75, 1.0, 1.0]
    again = request.through([piece(compute, c=2.5)])
    assert compute.calls == 2
    assert same(again[0])


def test_another_process_uses_it_only_if_asked(tmp_path: Path) -> None:
    compute = Counting()
    ItemRequest(finished=ResultCache(folder=tmp_path)).through([piece(compute)])
    ItemRequest(finished=ResultCache(folder=tmp_path)).through([piece(compute)])
    assert compute.calls == 2
    found = ItemRequest(finished=ResultCache(folder=tmp_path, resume=True)).through(
        [piece(compute)]
    )
    assert compute.calls == 2
    assert same(found[0])
    ItemRequest(finished=ResultCache(folder=tmp_path, resume=True)).through([piece(compute, c=0.0)])
    assert compute.calls == 3


def test_an_interrupted_item_keeps_what_came_before(tmp_path: Path) -> None:
    compute = Counting()

    def interrupted(on_step: OnStep) -> dict[str, object]:
        raise KeyboardInterrupt

    pieces = [piece(compute), CachedRun(label="y", key={"y": 1}, compute=interrupted)]
    with pytest.raises(KeyboardInterrupt):
        ItemRequest(finished=ResultCache(folder=tmp_path)).through(pieces)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["{", "[]", '{"dpkern": "0", "key": {}, "numbers": {}}'])
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, damage: str) -> None:
    compute = Counting()
    ItemRequest(finished=ResultCache(folder=tmp_path)).through([piece(compute)])
    next(tmp_path.iterdir()).write_text(damage)
    with pytest.raises(InvalidInput, match="Delete this file"):
        ItemRequest(finished=ResultCache(folder=tmp_path, resume=True)).through([piece(compute)])
    assert compute.calls == 1


def test_the_bar_shows_pieces_only() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    with show.watching("p one", console):
        pass
    assert not shown.getvalue()
    with show.watching("p one", console) as bar:
        ItemRequest(watch=bar).through([piece(Counting())])
    assert "p one, x (1 of 1)" in shown.getvalue()


def test_all_names_every_item_that_can_be_had() -> None:
    assert names("pnsgd", "all") == tuple(PAPERS["pnsgd"])
    assert "table7" not in names("gredp", "all")
    assert names("pnsgd", "table") == ("table",)
    with pytest.raises(InvalidInput, match="or all"):
        names("pnsgd", "nothing")
    with pytest.raises(InvalidInput, match="is one table"):
        names("claims", "all")


def test_the_command_resumes_and_takes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = Counting()

    def item(name: str, fails: list[bool]) -> object:
        def made(request: ItemRequest) -> Result:
            request.through([piece(compute, runs=request.seeds)])
            if fails and fails.pop():
                raise KeyboardInterrupt
            row = ComparisonRow(item=name, setting="s", quantity="q", ours=1.0)
            return Result(paper="p", item=name, title="t", rows=[row], settings={})

        return made

    papers = {"p": {"one": item("one", []), "two": item("two", [True])}}
    monkeypatch.setattr(catalogue_module, "PAPERS", papers)
    call = ["reproduce", "p", "all", "--runs", "3", "--no-figure", "--json", "--out", str(tmp_path)]
    assert cli.main(call) == cli_reproduce.INTERRUPTED
    assert json.loads(capsys.readouterr().out)["interrupted"]
    assert {path.name for path in tmp_path.iterdir()} == {FOLDER, "p-one.json", "p-one.csv"}
    assert cli.main([*call, "--resume"]) == 0
    assert [found["item"] for found in json.loads(capsys.readouterr().out)["items"]] == [
        "one",
        "two",
    ]
    assert compute.calls == 1
