"""Private projected SGD in the training loop: step sizes before a step, projection after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import InvalidInput
from ..mechanisms import ProjectedSGD
from ..ops.update import SGD
from ..step import DPStep


def check(rule: object, *, sampling: str, batch_size: int) -> None:
    """Refuse a run that is not the notes' algorithm: one uniform record a step, plain SGD.

    Raises:
        InvalidInput: other batches or another optimizer.
    """
    plain = isinstance(rule, SGD) and rule == SGD(lr=rule.lr)
    if not plain or (sampling, batch_size) != ("fixed", 1):
        raise InvalidInput(
            "sampling, batch_size, optimizer",
            expected="fixed, 1 and sgd with the mechanism projected_sgd",
            got=f"{sampling}, {batch_size}, {rule}",
            remedy="Pass --sampling fixed --batch-size 1 --optimizer sgd.",
        )


def hooks(
    mechanism: ProjectedSGD,
) -> tuple[Callable[[DPStep], None], Callable[[DPStep], None]]:
    """What to do before and after every step.

    The sum of one clipped gradient stands for ``n grad l / n``, so the rate is ``n eta_t``.
    """

    def before(step: DPStep) -> None:
        rate = mechanism.n * mechanism.step_size(step.steps + 1, step.plan.dimension)
        assert isinstance(step.optimizer, SGD)
        step.optimizer = replace(step.optimizer, lr=rate)

    def after(step: DPStep) -> None:
        mechanism.project(step.params)

    return before, after
