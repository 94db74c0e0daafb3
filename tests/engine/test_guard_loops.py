"""Every loop of the table: covered by its certificate, or refused before it releases anything."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dpkern.base.errors import DPKernError
from dpkern.engine import occasions
from tests.engine.guards.catalogue import LOOPS, TABLES
from tests.engine.guards.kit import Loop, Refused, World, judge, run

RIGHT = [loop for loop in LOOPS if loop.expected == "right"]
REFUSED = [loop for loop in LOOPS if isinstance(loop.expected, Refused)]
FAMILIES = [table.family for table in TABLES]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Torch's word on models that branch on their activations.
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
]


def name_of(loop: Loop) -> str:
    return f"{loop.family}: {loop.name}".replace(" ", "-")


def test_there_are_enough_of_every_class() -> None:
    names = Counter(name_of(loop) for loop in LOOPS)
    assert max(names.values()) == 1
    assert len(LOOPS) >= 300
    assert len(REFUSED) >= 150
    assert len(RIGHT) >= 100
    assert all(len(table.loops) >= 12 for table in TABLES)


@pytest.mark.parametrize("loop", RIGHT, ids=name_of)
def test_a_record_moves_a_step_by_its_bound_at_most(loop: Loop) -> None:
    verdict = judge(loop)
    if verdict.error is not None:
        raise verdict.error
    assert verdict.right(), verdict
    assert verdict.steps > 0
    assert verdict.moved > 0.05, "the target is not used: the loop shows nothing"


@pytest.mark.filterwarnings("ignore::dpkern.base.errors.LossWarning")  # before they are refused
@pytest.mark.parametrize("loop", REFUSED, ids=name_of)
def test_what_is_not_covered_is_refused_in_time(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(occasions, "MEAN_GAP", 1 << 60)  # no secret probe speaks first
    expected = loop.expected
    assert isinstance(expected, Refused)
    world = refused(loop)
    assert isinstance(world.error, expected.error), world.error
    assert expected.says in str(world.error)
    assert len(world.sums) == expected.after, world.error
    for neighbour in ({"present": False}, *({"target": n} for n in range(len(loop.kind.hostile)))):
        assert len(refused(loop, **neighbour).sums) <= expected.after


def refused(loop: Loop, **neighbour: Any) -> World:
    """A run that ended with a typed error, whatever the records are."""
    world = run(loop, **neighbour)
    if not isinstance(world.error, DPKernError):
        raise world.error or AssertionError(f"it trained: {neighbour}")
    return world
