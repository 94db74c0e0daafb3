"""Save a ``DPStep``, and let another one go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError
from ..privacy.accounting import Ledger
from ..privacy.mechanisms.base import Mechanism
from ..privacy.mechanisms.memory import MechanismState
from .checks import check_saved, scheduled_values

if TYPE_CHECKING:
    from .step import DPStep

STATE_VERSION = 2
"""Version 1 had no memory."""

_MAX_STEPS = 1 << 32
_MAX_WORDS = 1 << 100


def state_of(step: DPStep) -> dict[str, Any]:
    """Return the state of a step, as ``DPStep.state_dict`` returns it.

    Raises:
        PrivacyError: sums without noise are held.
    """
    if step.unfinished:
        raise PrivacyError(
            "state_dict",
            expected="a finished step",
            got="sums of samples without noise",
            remedy="Call finish() before saving.",
        )
    optimizer, memory = step.optimizer_state, step.memory
    return {
        "version": STATE_VERSION,
        "fingerprint": check.plain_copy(_fingerprint(step)),
        "steps": step.steps,
        "words": dict(step.words),
        "ledger": check.plain_copy(step.ledger.state_dict()),
        "mechanism": check.plain_copy(scheduled_values(step.mechanism)),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "memory": None if memory is None else memory.state_dict(),
    }


@dataclass(frozen=True)
class CheckedState:
    """A saved state that fits a step, ready to be put into it."""

    steps: int
    words: dict[str, int]
    ledger: Ledger
    mechanism: Mechanism
    optimizer: Any
    memory: Any


def load(step: DPStep, state: Mapping[str, Any]) -> None:
    """Continue from ``state``; see ``DPStep.load_state_dict``."""
    apply(step, check_state(step, state))


def apply(step: DPStep, checked: CheckedState) -> None:
    """Put a state into the step that it was checked for."""
    if step.optimizer_state is not None:
        step.optimizer_state.load_state_dict(checked.optimizer)
    if step.memory is not None:
        step.memory.load_state_dict(checked.memory)
    step.ledger, step.steps, step.words = checked.ledger, checked.steps, checked.words
    step._mechanism, step.plan = checked.mechanism, step._planned(checked.mechanism)


def check_state(step: DPStep, state: Mapping[str, Any]) -> CheckedState:
    """Return what ``load`` would put into the step; changes nothing.

    Raises:
        DPKernError: ``load`` would refuse the state.
    """
    if step.steps or step.unfinished or step.ledger.preparations:
        more = (" and open sums" if step.unfinished else "") + (
            " and releases before them" if step.ledger.preparations else ""
        )
        raise PrivacyError(
            "load_state_dict",
            expected="a DPStep without steps",
            got=f"one with {step.steps} steps{more}",
            remedy="Make a new DPStep and load into that: releases cannot be taken back.",
        )
    check.plain_values("state", state, tensors=("optimizer", "memory"))
    state = _as_now(state)
    check_saved(state, state_of(step))
    steps = check.integer(0, _MAX_STEPS, **{"state.steps": state["steps"]})
    saved = state["words"]
    words = {
        k: check.integer(0, _MAX_WORDS, **{f"state.words.{k}": saved.get(k)}) for k in step.words
    }
    mine = {"optimizer": step.optimizer_state, "memory": step.memory}
    for name, held in mine.items():
        if held is not None:
            held.check(state[name])
        elif state[name] is not None:
            raise InvalidInput(
                f"state.{name}",
                expected="none, as this step has none",
                got=f"a {type(state[name]).__name__}",
                remedy="Pass what DPStep.state_dict() returned.",
            )
    mechanism = replace(step._first_mechanism, **state["mechanism"])  # type: ignore[type-var]
    mechanism.plan([tuple(p.shape) for p in step.params], _memory(step, state["memory"]))
    ledger = Ledger(seeded=step.key.seeded, batched=step.ledger.batched)
    ledger.load_state_dict(state["ledger"])
    if ledger.steps != steps:
        raise InvalidInput(
            "state.ledger",
            expected=f"a history of {steps} steps",
            got=f"one of {ledger.steps}",
            remedy="Pass what DPStep.state_dict() returned.",
        )
    return CheckedState(steps, words, ledger, mechanism, state["optimizer"], state["memory"])


def _memory(step: DPStep, saved: Any) -> MechanismState | None:
    """Return the step's memory as it will be, for the plan that follows from it."""
    if step.memory is None:
        return None
    device = step.params[0].device
    known = {name: [tensor.to(device) for tensor in tensors] for name, tensors in saved.items()}
    return MechanismState({**step.memory.tensors, **known}, step.memory.unsaved)


def _as_now(state: Any) -> Any:
    """Return a state of version 1 in the form of today."""
    if isinstance(state, Mapping) and state.get("version") == 1:
        return {**state, "version": STATE_VERSION, "memory": None}
    return state


def _fingerprint(step: DPStep) -> dict[str, Any]:
    rule = step.optimizer
    return {
        "mechanism": step._first_mechanism.fingerprint,
        "shapes": [list(p.shape) for p in step.params],
        "dtype": ", ".join(sorted({str(p.dtype) for p in step.params})),
        "expected_batch_size": step.expected_batch_size,
        "gradient_scale": step.gradient_scale,
        "optimizer": None if rule is None else type(rule).__name__,
        "unsafe_seed": step.key.unsafe_seed,
        "rounds": step.key.rounds,
        **step.sampling,
    }
