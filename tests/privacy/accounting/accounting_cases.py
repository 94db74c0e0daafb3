"""What the tests of accounting and of the ledger share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dpkern.privacy import accounting
from dpkern.privacy.accounting import events
from dpkern.privacy.accounting.events import EventSpec
from dpkern.privacy.mechanisms import DPSGD

RUN: dict[str, Any] = {"sample_rate": 0.01, "steps": 10_000, "delta": 1e-5}


def dpsgd(noise_multiplier: float = 1.1, **options: Any) -> DPSGD:
    return DPSGD(noise_multiplier=noise_multiplier, max_grad_norm=1.0, **options)


@dataclass(frozen=True)
class Event:
    """Any event as a mechanism."""

    spec: EventSpec
    neighbouring: str = "add_remove"
    certified_for: str = "released bits"
    dimension: int | None = 1000
    unsampled: EventSpec = field(default_factory=events.no_op)
    remarks: tuple[str, ...] = ()

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        return self.spec


def certify(mechanism: Any, **changes: Any) -> accounting.Certificate:
    return accounting.certify(mechanism, **{**RUN, **changes})
