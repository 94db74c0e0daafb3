"""What a run tells about itself: privacy claimed and certified, noise provenance, arithmetic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from . import accounting

if TYPE_CHECKING:
    from .step import DPStep


def json_number(number: float) -> float | str:
    """Infinity as the string ``"inf"``, which JSON can hold."""
    return "inf" if math.isinf(number) else number


def step_report(step: DPStep, delta: float) -> dict[str, Any]:
    """The privacy report of a ``DPStep`` as JSON values.

    ``epsilon_claimed`` is the source's number, ``epsilon_certified`` the proved bound. Nothing in
    the report depends on the data: diagnostics that do are the caller's to label.
    """
    certificate = step.certify(delta)
    claimed = accounting.claimed_epsilon(
        step.mechanism, steps=step.steps, delta=delta, **step.sampling
    )
    report: dict[str, Any] = {
        "mechanism": step.plan.mechanism,
        "mode": step.plan.mode,
        "clipping": step.plan.clipping,
        "arithmetic": step.plan.arithmetic,
        "epsilon_claimed": json_number(claimed),
        "epsilon_certified": json_number(certificate.epsilon),
        "certificate": certificate.to_dict(),
        "steps": step.steps,
        "dimension": step.plan.dimension,
        "expected_batch_size": step.expected_batch_size,
        "noise": {
            "distribution": step.plan.distribution,
            "noise_multiplier": step.mechanism.noise_multiplier,
            "certified_noise_multiplier": step.plan.noise_multiplier,
            "cipher": f"ChaCha{step.key.rounds}",
            "key": "seed" if step.key.seeded else "operating system",
            "words": dict(step.words),
        },
        **step.sampling,
    }
    if step.key.seeded:
        report["epsilon_if_seed_secret"] = json_number(step.epsilon_if_seed_secret(delta))
    return report
