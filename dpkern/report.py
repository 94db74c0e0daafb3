"""What a run tells about itself: privacy claimed and certified, noise provenance, arithmetic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from . import accounting

if TYPE_CHECKING:
    from .step import DPStep


def json_number(number: float) -> float | str:
    """Infinity as the string ``"inf"``, which JSON can hold."""
    return "inf" if math.isinf(number) else number


def _float_sensitivity(step: DPStep) -> float:
    """What rounding may do at worst to float32 sums, as a multiple of the clipping bound.

    With B samples of norm at most C, every addition and the scaling to the lattice err by at most
    ``2^-24`` of a partial sum of norm at most ``B C``; two neighbouring sums are off by
    ``2 gamma_(B+1) B C`` together, ``gamma_n = n 2^-24 / (1 - n 2^-24)`` (Higham 2002, 3.1).
    Taken at the expected batch size; far above 1 it certifies nothing.
    """
    batch = math.ceil(step.expected_batch_size)
    wide = all(p.dtype is torch.float64 for p in step.params)
    roundoff = (batch + 1) * (2.0**-53 if wide else 2.0**-24)
    return 1 + 2 * batch * roundoff / (1 - roundoff) if roundoff < 1 else math.inf


def step_report(step: DPStep, delta: float) -> dict[str, Any]:
    """The privacy report of a ``DPStep`` as JSON values.

    ``epsilon_claimed`` is the source's number, ``epsilon_certified`` the proved bound. Nothing in
    the report depends on the data: diagnostics that do are the caller's to label. Float sums carry
    ``worst_case_float_sensitivity`` beside their certificate, which does not cover it.
    """
    certificate = step.certify(delta)
    if step.plan.mode == "published":
        claimed = accounting.claimed_epsilon(
            step.mechanism, steps=step.steps, delta=delta, **step.sampling
        )
    else:  # claims what is certified, schedules included
        claimed = step.epsilon_if_seed_secret(delta)
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
    if step.plan.arithmetic == "float" and step.plan.private:
        report["worst_case_float_sensitivity"] = json_number(_float_sensitivity(step))
    if step.key.seeded:
        report["epsilon_if_seed_secret"] = json_number(step.epsilon_if_seed_secret(delta))
    return report
