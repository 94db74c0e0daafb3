"""Hooks of a mechanism around the steps of a training loop: rates before, projections after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..base.errors import InvalidInput
from ..ops.update import SGD
from ..privacy.mechanisms import Mechanism
from ..step.step import DPStep

Hook = Callable[[DPStep], None]


def check(mechanism: Mechanism, rule: object, *, sampling: str, batch_size: int) -> None:
    """Refuse a run that is not the algorithm of a mechanism which sets rates and batches.

    Raises:
        InvalidInput: other batches than the mechanism is meant for, or another optimizer than
            plain SGD.
    """
    wanted = mechanism.sampling
    if not wanted:
        return
    plain = isinstance(rule, SGD) and rule == SGD(lr=rule.lr)
    kind, size = wanted["sampling"], round(wanted["sample_rate"] * wanted["dataset_size"])
    if not plain or (sampling, batch_size) != (kind, size):
        raise InvalidInput(
            "sampling, batch_size, optimizer",
            expected=f"{kind}, {size} and sgd with the mechanism {mechanism.name}",
            got=f"{sampling}, {batch_size}, {rule}",
            remedy=f"Pass --sampling {kind} --batch-size {size} --optimizer sgd.",
        )


def around(mechanism: Mechanism) -> tuple[Hook, Hook]:
    """Return the hooks before and after every step."""

    def before(step: DPStep) -> None:
        rate = mechanism.rate(step.steps + 1, step.plan.dimension)
        if rate is not None:
            assert isinstance(step.optimizer, SGD)
            step.optimizer = replace(step.optimizer, lr=rate)

    def after(step: DPStep) -> None:
        mechanism.project(step.params)

    return before, after
