"""Bad calls: each raises its exact typed error, names the argument, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dpkern.base import dispatch
from dpkern.base.errors import DPKernError, InvalidInput
from tests.bad_runs import ACCOUNTING, FILES, MECHANISMS, STEP
from tests.bad_world import (
    Bad,
    World,
)
from tests.ops.bad_ops import CLIP, DISPATCH, NOISE, RNG, UPDATE

TABLE = {
    "noise": NOISE,
    "clip": CLIP,
    "update": UPDATE,
    "rng": RNG,
    "dispatch": DISPATCH,
    "mechanisms": MECHANISMS,
    "accounting": ACCOUNTING,
    "step": STEP,
    "files": FILES,
}
ROWS = [pytest.param(row, id=f"{area}-{row.id}") for area, rows in TABLE.items() for row in rows]


@pytest.mark.parametrize("row", ROWS)
def test_bad_call(row: Bad) -> None:
    world = World()
    before = world.snapshot()
    with pytest.raises(DPKernError) as caught:
        row.call(world)
    error = caught.value
    assert type(error) is row.error
    assert error.name == row.name
    assert str(error).startswith(f"{row.name}: expected ")
    assert row.says in str(error)
    assert error.remedy.endswith(".")
    assert world.snapshot() == before


def test_rows_are_many_and_named_apart() -> None:
    names = [row.id for row in ROWS]
    assert len(set(names)) == len(names) >= 45


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """``DPKERN_BACKEND`` can be set: it is read once per process."""
    dispatch.environment_choice.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    dispatch.environment_choice.cache_clear()


def test_unknown_backend_in_the_environment(environment: pytest.MonkeyPatch) -> None:
    world = World()
    before = world.snapshot()
    environment.setenv("DPKERN_BACKEND", "abacus")
    dispatch.environment_choice.cache_clear()
    for call in (lambda: world.add(world.floats), world.clip, world.update):
        with pytest.raises(InvalidInput, match=r"backend: expected one of .*, got abacus"):
            call()
    assert world.snapshot() == before


def test_a_refused_batch_leaves_the_step_usable() -> None:
    world = World()
    for step in (world.step, world.open):
        with pytest.raises(InvalidInput):
            step.add([world.grads[0], world.grads[0]])
    world.step.state_dict()
    world.open.finish()
    assert world.open.steps == world.open.ledger.steps == 1
