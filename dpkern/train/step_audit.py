"""The interface to the audit of a run's step; the caller passes an auditor in."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from ..base.errors import InvalidInput
from ..privacy.mechanisms.base import Mechanism
from ..step.step import DPStep

NOT_AUDITED: dict[str, Any] = {"epsilon_audited": None, "audit": "not audited"}


class AuditedStep(Protocol):
    """The findings of an audit of one step, and what follows for a run."""

    def facts(self, step: DPStep, *, steps_per_epoch: int, delta: float) -> dict[str, Any]:
        """Return what the report says of the steps so far."""


class Auditor(Protocol):
    """An auditor of a step; ``dpkern.commands.audited`` is one."""

    def subject_of(
        self,
        mechanism: Mechanism,
        model: nn.Module,
        *,
        row_shape: tuple[int, ...],
        classes: int,
        backend: str | None,
    ) -> Any:
        """Return the step of a run as a subject of audits."""

    def audit(self, subject: Any, runs: int, delta: float) -> AuditedStep:
        """Audit the step; refuse one that does not keep its certificate."""


def required(auditor: Auditor | None, runs: int) -> Auditor:
    """Return the auditor of a run that requested an audit.

    Raises:
        InvalidInput: the session was made without one.
    """
    if auditor is None:
        raise InvalidInput(
            "audit",
            expected="no audit in a session without an auditor",
            got=runs,
            remedy="Pass auditor=dpkern.commands.audited, as `dpkern train --audit` does.",
        )
    return auditor
