"""One look tells whether tables hold the same objects, compiled or not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from dpkern.engine import table_entries
from dpkern.engine.table_entries import TableEntries
from dpkern.ops import direct

Tables = list[dict[str, Any]]

WAYS = ["compiled", "python"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(table_entries, "same_entries", table_entries.entries_agree)
    elif direct.look("same_entries") is None:
        pytest.skip("no compiled module")
    return str(request.param)


def tables() -> Tables:
    ordered = OrderedDict(e=1000.5, f=[2])
    ordered.move_to_end("e")
    return [{"a": [1], "b": 1000.5}, {}, {"c": None}, ordered, OrderedDict()]


def replaced(made: Tables) -> None:
    made[0]["a"] = [1]  # equal, and another object


def added(made: Tables) -> None:
    made[1]["d"] = 0


def deleted(made: Tables) -> None:
    del made[2]["c"]


def renamed(made: Tables) -> None:
    made[2]["d"] = made[2].pop("c")


def exchanged(made: Tables) -> None:
    made[0]["a"], made[0]["b"] = made[0]["b"], made[0]["a"]


def moved(made: Tables) -> None:
    made[0]["a"] = made[0].pop("a")  # to the end


def turned(made: Tables) -> None:
    made[3].move_to_end("f")  # type: ignore[attr-defined]


CHANGES = (replaced, added, deleted, renamed, exchanged, moved, turned)


def test_what_stayed_is_the_same(way: str) -> None:
    made = tables()
    entries = TableEntries(made)
    assert entries.same()
    made[0]["a"].append(2)  # the same list
    assert entries.same()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_seen(change: Callable[[Tables], None], way: str) -> None:
    made = tables()
    entries = TableEntries(made)
    change(made)
    assert not entries.same()
    assert TableEntries(made).same()


def test_an_object_that_is_held_is_no_other_one(way: str) -> None:
    made: Tables = [{"a": object()}]
    entries = TableEntries(made)
    for _ in range(100):  # a freed object's address would come back soon
        made[0]["a"] = object()
        assert not entries.same()


def test_the_compiled_look_takes_lists_of_dicts_alone() -> None:
    look = direct.look("same_entries")
    if look is None:
        pytest.skip("no compiled module")
    assert not look([{"a": 1}], [])
    assert not look([{"a": 1}], [["a", 1]])
    assert not look(["a"], [("a", 1)])
    with pytest.raises(TypeError):
        look({"a": 1}, [])
    with pytest.raises(TypeError):
        look([])
