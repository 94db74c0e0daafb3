"""What a ``DPStep`` saves, and how another one goes on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import _validate as check
from ._step_checks import check_saved, scheduled_values
from .accounting import Ledger
from .errors import InvalidInput, PrivacyError

if TYPE_CHECKING:
    from .step import DPStep

STATE_VERSION = 2
"""Version 1 had no memory."""


def state_of(step: DPStep) -> dict[str, Any]:
    """The state of a step, as ``DPStep.state_dict`` returns it.

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
        "fingerprint": _fingerprint(step),
        "steps": step.steps,
        "words": dict(step.words),
        "ledger": step.ledger.state_dict(),
        "mechanism": scheduled_values(step.mechanism),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "memory": None if memory is None else memory.state_dict(),
    }


def load(step: DPStep, state: Mapping[str, Any]) -> None:
    """Continue from ``state``; see ``DPStep.load_state_dict``."""
    if step.steps or step.unfinished:
        raise PrivacyError(
            "load_state_dict",
            expected="a DPStep without steps",
            got=f"one with {step.steps} steps" + (" and open sums" if step.unfinished else ""),
            remedy="Make a new DPStep and load into that: releases cannot be taken back.",
        )
    state = _as_now(state)
    check_saved(state, state_of(step))
    # Everything is checked before anything changes.
    steps = check.integer(**{"state.steps": state["steps"]})
    saved = state["words"]
    words = {k: check.integer(**{f"state.words.{k}": saved.get(k)}) for k in step.words}
    if step.optimizer_state is not None:
        step.optimizer_state.check(state["optimizer"])
    if step.memory is not None:
        step.memory.check(state["memory"])
    mechanism = replace(step._first_mechanism, **state["mechanism"])  # type: ignore[type-var]
    mechanism.plan([block.shape for block in step.plan.blocks])
    ledger = Ledger(seeded=step.key.seeded, batched=step.ledger.batched)
    ledger.load_state_dict(state["ledger"])
    if ledger.steps != steps:
        raise InvalidInput(
            "state.ledger",
            expected=f"a history of {steps} steps",
            got=f"one of {ledger.steps}",
            remedy="Pass what DPStep.state_dict() returned.",
        )
    if step.optimizer_state is not None:
        step.optimizer_state.load_state_dict(state["optimizer"])
    if step.memory is not None:
        step.memory.load_state_dict(state["memory"])
    step.ledger, step.steps, step.words = ledger, steps, words
    step._mechanism, step.plan = mechanism, step._planned(mechanism)


def _as_now(state: Any) -> Any:
    """A state of version 1 in the form of today."""
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
