"""Loops of Accelerate, Trainer and Lightning: the right certificate, or a refusal with a remedy."""

from __future__ import annotations

import warnings

import pytest

from tests.engine.guards.kit import Loop, Refused, judge, run
from tests.engine.guards.wrapped import PACKAGES, TABLES

LOOPS = [loop for table in TABLES for loop in table.loops]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def name_of(loop: Loop) -> str:
    return f"{loop.family}: {loop.name}".replace(" ", "-")


@pytest.fixture
def installed(request: pytest.FixtureRequest) -> None:
    """Skip where the package is missing; its own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(PACKAGES[request.getfixturevalue("loop").family])


def test_there_are_twenty() -> None:
    assert len(LOOPS) >= 20


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("loop", LOOPS, ids=name_of)
def test_a_wrapped_loop_is_covered_or_refused(loop: Loop) -> None:
    if isinstance(loop.expected, Refused):
        world = run(loop)
        assert isinstance(world.error, loop.expected.error), repr(world.error)
        assert loop.expected.says in str(world.error)
        assert len(world.sums) == loop.expected.after
        return
    verdict = judge(loop)
    if verdict.error is not None:
        raise verdict.error
    assert verdict.right(), verdict
    assert verdict.moved > 0.05
