"""Marks of phases: who hears them, and that they cost nothing where nobody listens."""

from __future__ import annotations

import threading

import pytest

from dpkern.base.phase import CLIP, MAP, NOISE, listening, phase


def test_the_innermost_mark_runs() -> None:
    with listening() as running:
        assert running() is None
        with phase(CLIP):
            with phase(MAP):
                assert running() == MAP
            assert running() == CLIP
        assert running() is None


def test_an_error_ends_its_phases() -> None:
    with listening() as running:
        with pytest.raises(KeyError), phase(CLIP), phase(NOISE):
            raise KeyError
        assert running() is None


def test_where_nobody_listens_all_marks_are_one_object() -> None:
    assert phase(CLIP) is phase(NOISE)
    with listening():
        assert phase(CLIP) is not phase(NOISE)
    assert phase(CLIP) is phase(NOISE)


def test_who_listens_later_does_not_hear_what_began_before() -> None:
    with phase(CLIP), listening() as running:
        assert running() is None
        with listening() as inner, phase(MAP):
            assert (running(), inner()) == (None, MAP)
        with phase(NOISE):
            assert (running(), inner()) == (NOISE, None)


def test_another_thread_is_not_heard() -> None:
    heard: list[str | None] = []

    def other() -> None:
        with phase(NOISE):
            heard.append(running())

    with listening() as running, phase(CLIP):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert heard == [CLIP]
