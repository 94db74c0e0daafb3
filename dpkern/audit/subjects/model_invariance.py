"""Check whether an engine's gradients depend on their records alone, as certificates suppose."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...base.errors import UnsupportedModule
from ...base.threads import torch_threads
from ...engine import PrivacyEngine
from ...engine.exact_sums import sums_in_place
from ...privacy.accounting.history import scope_for_batched_gradients
from ..findings import Check


def batch_invariance(
    engine: PrivacyEngine, batch: tuple[Tensor, Tensor], loss: Callable[..., Tensor]
) -> Check:
    """Let a new engine test its model with one thread, and say what it is certified for then.

    A model that does not pass keeps the condition in its certificate, which contradicts nothing.
    """
    plan, x = engine.step.plan, batch[0]

    def found(passed: bool | None, why: str) -> Check:
        scope = scope_for_batched_gradients(plan.certified_for, tested=bool(passed))
        text = f"certified for {scope}: {why}"
        return Check(layer="sensitivity", name="batch invariance", passed=passed, text=text)

    if not sums_in_place(plan, engine.capture.slots):
        return found(None, "tested for exact sums of gradients that are made in place")
    with torch_threads(1):
        try:
            outcome = engine.validate(None, x, targets=batch[1], loss=loss)
        except UnsupportedModule as error:
            return found(None, str(error))
    assert outcome is not None
    return found(outcome.word != "not invariant" or None, "; ".join(outcome.remarks))
