"""Objects of ordinary programs that a walk meets: none stops it, and all are left as they were."""

from __future__ import annotations

import collections
import os
import random
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpkern.engine.snapshot import Snapshot

scale: Any = None
LATE = "_late_global"


class Something:
    """What proxies stand for."""


class Raises:
    """An object without the attributes that are asked for, which says so in its own way."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Counts:
    """An object that notices questions."""

    asked = 0

    def __getattr__(self, name: str) -> Any:
        Counts.asked += 1
        raise AttributeError(name)


class NoTable:
    """An object whose table of attributes cannot be read."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError


class NoClass:
    """An object that does not tell its class, as a proxy without an object does."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError


class NoText:
    """A key without a text."""

    def __repr__(self) -> str:
        raise RuntimeError


def dead_proxy() -> Any:
    return weakref.proxy(Something())


OBJECTS: dict[str, Callable[[], Any]] = {
    "proxy of what is gone": dead_proxy,
    "attributes that raise": Raises,
    "no table": NoTable,
    "no class": NoClass,
    "key without a text": lambda: {NoText(): 1},
    "generator of the system": random.SystemRandom,
    "wide floats": lambda: np.zeros(3, np.longdouble),
    "wide complex": lambda: np.zeros(3, np.clongdouble),
    "environment": lambda: os.environ,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "lazy": lambda: nn.LazyLinear(3),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
}


class Model(nn.Module):
    """Holds something in an attribute and reads something of a global variable."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        vars(self)["thing"] = thing  # modules would be found among its parts

    def forward(self, x: Tensor) -> Tensor:
        return x if scale is None else x + 1


@pytest.fixture(params=["attribute", "global"])
def holder(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Model]]:
    def hold(thing: Any) -> Model:
        if request.param == "attribute":
            return Model(thing)
        globals()["scale"] = thing
        return Model(None)

    yield hold
    globals()["scale"] = None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OBJECTS)
def test_a_walk_passes(name: str, holder: Callable[[Any], Model]) -> None:
    model = holder(OBJECTS[name]())
    before = Snapshot(model)
    model.register_buffer("late", torch.ones(2))
    assert before.changes(Snapshot(model, earlier=before)) == {"late"}
    assert before.restore() == []
    assert before.changes(Snapshot(model)) == set()


def test_a_walk_asks_objects_for_nothing() -> None:
    Counts.asked = 0
    Snapshot(Model(Counts()))
    assert Counts.asked == 0


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (np.random.RandomState(0), lambda g: g.normal()),  # an odd number: one is kept inside
        (np.random.PCG64(0), lambda g: g.random_raw()),
        (np.random.default_rng(0), lambda g: g.random()),
        (random.Random(0), lambda g: g.random()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_generators_draw_the_same_again(generator: Any, draw: Callable[[Any], float]) -> None:
    before = Snapshot(Model(generator))
    first = draw(generator)
    before.restore()
    assert draw(generator) == first


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore")
def test_sparse_tensors_are_compared_and_put_back(layout: torch.layout) -> None:
    tensor = torch.eye(3).to_sparse(layout=layout)
    values = tensor._values() if layout is torch.sparse_coo else tensor.values()
    model = Model(tensor)
    before = Snapshot(model)
    values.mul_(2)
    after = Snapshot(model, earlier=before)
    assert before.changes(after)
    before.restore(after)
    assert torch.equal(tensor.to_dense(), torch.eye(3))


def test_a_global_does_not_hide_a_buffer_of_its_name(holder: Callable[[Any], Model]) -> None:
    model = holder(torch.zeros(2))
    before = Snapshot(model)
    assert before.kinds["scale"] == "buffer"
    model.scale.add_(1)
    assert before.changes(Snapshot(model, earlier=before)) == {"scale"}


def test_buffers_of_an_empty_list_of_modules_are_seen() -> None:
    model = nn.Sequential()
    model.add_module("parts", nn.ModuleList())
    model.parts.register_buffer("mean", torch.zeros(2))
    before = Snapshot(model)
    model.parts.mean.add_(1)  # type: ignore[operator, union-attr]
    assert before.changes(Snapshot(model, earlier=before)) == {"parts.mean"}


class Stored(MutableMapping[str, Any]):
    """A table in a file: every look reads new objects, and an empty file is lost data."""

    def __init__(self) -> None:
        self.cleared = False

    def __getitem__(self, key: str) -> Any:
        return [key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.cleared = True

    def __delitem__(self, key: str) -> None:
        self.cleared = True

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


def test_a_table_that_is_a_file_is_not_emptied(holder: Callable[[Any], Model]) -> None:
    stored = Stored()
    model = holder(stored)
    before = Snapshot(model)
    model.thing = 1
    before.restore()
    assert not stored.cleared


def test_tables_in_memory_are_put_back() -> None:
    table = collections.UserDict(a=[1])
    before = Snapshot(Model(table))
    table["b"] = 2
    before.restore()
    assert dict(table) == {"a": [1]}


def test_a_global_that_a_pass_makes_is_removed() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            global _late_global
            _late_global = x.sum()
            return x

    model = Late()
    before = Snapshot(model)
    model(torch.ones(2))
    assert LATE in globals()
    before.restore(Snapshot(model, earlier=before))
    assert LATE not in globals()


@pytest.mark.parametrize("name", ["append", "extend", "__iadd__"])
def test_methods_of_tables_lead_to_the_table(name: str, holder: Callable[[Any], Model]) -> None:
    table: list[Any] = [1]
    model = holder(getattr(table, name))
    before = Snapshot(model)
    table.append(2)
    assert before.changes(Snapshot(model, earlier=before))
    before.restore()
    assert table == [1]
