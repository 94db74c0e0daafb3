"""A snapshot that shares an earlier one's copies: every change between the two must show."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpkern.engine.snapshot import Snapshot

CACHE: Any = None


class Plain:
    """An object that a module holds."""

    kept: Any = None

    def __init__(self) -> None:
        self.value: Any = None


def with_default(x: Tensor, *, memory: Any = None) -> Any:
    return memory, CACHE


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("unset", "value")

    def __init__(self) -> None:
        self.value: Any = None


SHARED = Plain()


def helper() -> Any:
    return SHARED.value, LOCAL


LOCAL = threading.local()


class Model(nn.Module):
    """Holds state in every place that is walked."""

    shared: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.plain = Plain()
        self.listed: list[Any] = [None]
        self.named: dict[str, Any] = {"a": None}
        self.known: set[Any] = {1}
        self.partial = functools.partial(with_default, memory=None)
        self.function = with_default
        self.helper = lambda: helper()
        self.slotted = Slotted()
        self.weak = weakref.ref(SHARED)
        closed: Any = None

        def closure(value: Any = None) -> Any:
            nonlocal closed
            closed = value if value is not None else closed
            return closed

        self.closure = closure

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


ONE = torch.ones(2)


def set_global(model: Model) -> None:
    global CACHE
    CACHE = ONE


def set_cell(model: Model) -> None:
    model.closure(ONE)


def set_default(model: Model) -> None:
    model.function.__kwdefaults__["memory"] = ONE  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[Model], Any]] = {
    "attribute": lambda m: setattr(m, "scale", 1.5),
    "attribute of an object": lambda m: setattr(m.plain, "value", ONE),
    "attributes of an object": lambda m: setattr(m.plain, "__dict__", {"value": None}),
    "slot": lambda m: setattr(m.slotted, "value", ONE),
    "new slot": lambda m: setattr(m.slotted, "unset", ONE),
    "object that a helper names": lambda m: setattr(SHARED, "value", ONE),
    "class of an object": lambda m: setattr(Plain, "kept", ONE),
    "attribute of a helper": lambda m: setattr(helper, "mean", ONE),
    "attribute of a thread": lambda m: setattr(LOCAL, "mean", ONE),
    "class": lambda m: setattr(Model, "shared", ONE),
    "new name in a class": lambda m: setattr(Model, "late", ONE),
    "list": lambda m: m.listed.append(ONE),
    "entry of a list": lambda m: m.listed.__setitem__(0, ONE),
    "entry of a dict": lambda m: m.named.__setitem__("a", ONE),
    "key of a dict": lambda m: m.named.__setitem__("b", None),
    "set": lambda m: m.known.add(2),
    "partial": lambda m: m.partial.keywords.__setitem__("memory", ONE),
    "default": set_default,
    "global": set_global,
    "closure": set_cell,
    "buffer": lambda m: m.mean.add_(1),
    "buffer past its version": lambda m: m.mean.data.add_(1),
    "another buffer": lambda m: setattr(m, "mean", torch.zeros(2)),
    "memory of a buffer": lambda m: setattr(m.mean, "data", torch.ones(2)),
    "parameter": lambda m: m.layer.weight.data.add_(1),
    "gradient": lambda m: setattr(m.layer.weight, "grad", torch.zeros(2, 2)),
    "mode": lambda m: m.eval(),
    "hook": lambda m: m.layer.register_forward_hook(lambda *_: None),
    "module": lambda m: m.add_module("more", nn.Identity()),
    "late buffer": lambda m: m.register_buffer("late", ONE),
}


NOT_PUT_BACK = ("attributes of an object", "default", "partial")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    yield Model()
    global CACHE
    CACHE = Model.shared = Plain.kept = SHARED.value = None
    vars(helper).clear()
    vars(LOCAL).clear()
    with_default.__kwdefaults__["memory"] = None  # type: ignore[index]
    if "late" in vars(Model):
        del Model.late  # type: ignore[attr-defined]


def test_without_a_change_there_is_no_second_walk(model: Model) -> None:
    before = Snapshot(model)
    model(torch.ones(3, 2))
    after = Snapshot(model, earlier=before)
    assert before.tells
    assert after.is_same(before)
    assert before.changes(after) == set()
    assert before.restore(after) == []


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_leads_to_a_walk(change: str, model: Model) -> None:
    before = Snapshot(model)
    CHANGES[change](model)
    after = Snapshot(model, earlier=before)
    assert not after.is_same(before)
    apart = Snapshot(model)
    assert before.changes(after) == before.changes(apart)
    before.restore(after)
    if change not in NOT_PUT_BACK:
        assert before.changes(Snapshot(model)) == set()


def register(model: Model, index: int) -> None:
    """Register a hook that remembers a number."""
    model.layer.register_forward_hook(lambda *_: print(index))


def test_hooks_that_passes_register_are_removed_and_compared_by_place(model: Model) -> None:
    before = Snapshot(model)
    left = []
    for _ in range(2):
        register(model, 1)
        left.append(Snapshot(model, earlier=before))
        before.restore(left[-1])
        assert not model.layer._forward_hooks
    first, second = left
    assert first.changes(second) == set()
    assert before.changes(first)
    register(model, 2)
    assert first.changes(Snapshot(model, earlier=before))


@pytest.mark.parametrize("held", ["generator", "state"])
def test_what_does_not_show_a_change_is_walked_every_time(held: str, model: Model) -> None:
    if held == "generator":
        model.generator = torch.Generator()
    else:
        type(model).get_extra_state = lambda self: 0  # type: ignore[method-assign]
    try:
        before = Snapshot(model)
        assert not before.tells
        assert not Snapshot(model, earlier=before).is_same(before)
    finally:
        if held == "state":
            del type(model).get_extra_state  # type: ignore[misc]


def test_a_cache_that_was_filled_is_emptied(model: Model) -> None:
    seen = [1]

    @functools.lru_cache
    def first(width: int) -> int:
        return seen[0]

    model.first = first
    before = Snapshot(model)
    assert not before.tells
    assert first(3) == 1
    before.restore(Snapshot(model, earlier=before))
    seen[0] = 2
    assert first(3) == 2


def test_a_generator_that_went_on_cannot_be_put_back(model: Model) -> None:
    model.counts = (n for n in range(9))
    next(model.counts)
    before = Snapshot(model)
    assert before.restore(Snapshot(model, earlier=before)) == []
    next(model.counts)
    assert before.restore(Snapshot(model, earlier=before)) == ["counts"]


@pytest.mark.parametrize(
    "array",
    [
        np.array([None, 1], dtype=object),
        np.zeros(2, dtype=[("ready", "?"), ("mean", "f4")]),
        np.zeros(2, dtype="datetime64[s]"),
        np.zeros(2, dtype=">f4"),
    ],
    ids=lambda a: str(a.dtype),
)
def test_arrays_that_are_no_tensors_are_put_back(array: Any, model: Model) -> None:
    model.array, was = array, array.copy()
    before = Snapshot(model)
    array[0] = array[1] if array.dtype.kind == "O" else np.ones(1, array.dtype)[0]
    assert before.changes(Snapshot(model, earlier=before))
    before.restore(Snapshot(model))
    assert array.tolist() == was.tolist()


def test_helpers_of_installed_packages_are_not_followed(model: Model) -> None:
    function = types.FunctionType(
        helper.__code__.replace(co_filename="/x/site-packages/y.py"), globals()
    )
    model.helper = function
    SHARED.value = 0.5
    assert not any("SHARED" in path for path in Snapshot(model).values)


class Maker(OrderedDict[str, Any]):
    """A table whose [] makes what it names, as in transformers."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def test_a_table_that_makes_what_it_names_keeps_the_names(model: Model) -> None:
    model.table = Maker(relu=nn.ReLU)
    before = Snapshot(model)
    model.scale = 1.5
    after = Snapshot(model)
    assert before.changes(after) == {"scale"}
    model.table["more"] = nn.Tanh
    before.restore(Snapshot(model))
    assert list(model.table.items()) == [("relu", nn.ReLU)]


class Lazy(OrderedDict[str, Any]):
    """A table whose methods make what it names, or fail, as transformers' tables of models do."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, Any] = {}

    def __len__(self) -> int:
        return 1

    def items(self) -> Any:
        raise ValueError("a model of a package that is not installed")

    keys = values = items


def test_what_a_table_holds_is_read_and_not_asked_for(model: Model) -> None:
    table = model.kept = Lazy()
    OrderedDict.__setitem__(table, "known", 1)
    before = Snapshot(model)
    assert Snapshot(model, earlier=before).is_same(before)
    OrderedDict.__setitem__(table, "more", 2)
    table.made["x"] = 3
    after = Snapshot(model, earlier=before)
    changed = {name.rpartition("kept")[2] for name in before.changes(after)}
    assert changed >= {"['more']", ".made['x']"}
    before.restore()
    assert [*OrderedDict.items(table)] == [("known", 1)]
    assert not table.made
