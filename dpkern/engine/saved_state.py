"""Make and check the state of an engine, which a resumed run continues from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError, brief
from ..step import state as step_state
from ..step.step import DPStep
from .capture import Capture
from .loader import PrivateLoader

STATE_VERSION = 1


def check_saveable(capture: Capture) -> None:
    """Refuse to save while gradients are pending; both ways to save ask this first.

    Raises:
        PrivacyError: they are.
    """
    if capture.captured:
        raise PrivacyError(
            "state_dict",
            expected="a finished step",
            got="gradients of samples that wait for optimizer.step()",
            remedy="Save after optimizer.step().",
        )


def state_of(step: DPStep, loader: PrivateLoader | None) -> dict[str, Any]:
    """Return the state of an engine with these parts, as plain values."""
    return {
        "version": STATE_VERSION,
        "step": step.state_dict(),
        "loader": None if loader is None else loader.state_dict(),
    }


def check_state(
    capture: Capture, step: DPStep, loader: PrivateLoader | None, state: Mapping[str, Any]
) -> step_state.CheckedState:
    """Return the step's part of a state that these parts may continue from; changes nothing.

    Raises:
        InvalidInput: the state of another run.
        PrivacyError: samples or steps of their own.
    """
    if capture.captured:
        raise PrivacyError(
            "load_state_dict",
            expected="an engine without samples of its own",
            got="gradients of samples that wait for optimizer.step()",
            remedy="Load right after make_private, before the first batch.",
        )
    check.plain_values("state", state, tensors=("optimizer", "memory"))
    same = isinstance(state, Mapping) and state.keys() == {"version", "step", "loader"}
    same = same and (state["loader"] is None) == (loader is None)
    if not same or state["version"] != STATE_VERSION:
        raise InvalidInput(
            "state",
            expected=f"the state of an engine like this one, version {STATE_VERSION}",
            got=brief(state),
            remedy="Pass what PrivacyEngine.state_dict() returned.",
        )
    if loader is not None:
        loader.check_state(state["loader"])
    return step_state.check_state(step, state["step"])


__all__ = ["STATE_VERSION", "check_saveable", "check_state", "state_of"]
