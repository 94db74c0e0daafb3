"""Save and load the state of the private parts: plain values, without any key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError, brief
from ..step.state import CheckedState, apply, check_state
from .make_parts import Parts

STATE_VERSION = 1


def state_of(parts: Parts) -> dict[str, Any]:
    """Return the state of the step and of the loader.

    Raises:
        PrivacyError: between a batch and its step, where nothing may be saved.
    """
    _refuse_pending(parts, "state_dict", "a finished step", "Save after optimizer.step().")
    return {
        "version": STATE_VERSION,
        "step": parts.step.state_dict(),
        "loader": None if parts.loader is None else parts.loader.state_dict(),
    }


def load_state(parts: Parts, state: Mapping[str, Any]) -> None:
    """Continue the run that ``state_of`` saved.

    Raises:
        InvalidInput: the state of another run; nothing has been changed.
        PrivacyError: the parts have samples or steps of their own; nothing has been changed.
    """
    checked = checked_state(parts, state)
    apply(parts.step, checked)
    if parts.loader is not None:
        parts.loader.load_state_dict(state["loader"])
    parts.adapter.show()


def checked_state(parts: Parts, state: Mapping[str, Any]) -> CheckedState:
    """Return the step's part of a state that ``load_state`` accepts; changes nothing.

    Raises:
        InvalidInput, PrivacyError: it would refuse the state.
    """
    _refuse_pending(
        parts,
        "load_state_dict",
        "an engine without samples of its own",
        "Load right after make_private, before the first batch.",
    )
    check.plain_values("state", state, tensors=("optimizer", "memory"))
    same = isinstance(state, Mapping) and state.keys() == {"version", "step", "loader"}
    same = same and (state["loader"] is None) == (parts.loader is None)
    if not same or state["version"] != STATE_VERSION:
        raise InvalidInput(
            "state",
            expected=f"the state of an engine like this one, version {STATE_VERSION}",
            got=brief(state),
            remedy="Pass what PrivacyEngine.state_dict() returned.",
        )
    if parts.loader is not None:
        parts.loader.check_state(state["loader"])
    return check_state(parts.step, state["step"])


def _refuse_pending(parts: Parts, name: str, expected: str, remedy: str) -> None:
    if parts.capture.captured:
        got = "gradients of samples that wait for optimizer.step()"
        raise PrivacyError(name, expected=expected, got=got, remedy=remedy)
