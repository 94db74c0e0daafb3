"""Report on a run: privacy claimed and certified, noise provenance, arithmetic."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from ..base.laws import SCALE_UNITS
from ..privacy import accounting
from ..privacy.mechanisms.certify import why_not
from ..privacy.mechanisms.plan import Plan

if TYPE_CHECKING:
    from .step import DPStep


def json_number(number: float) -> float | str:
    """Return infinity as the string ``"inf"``, which JSON can hold."""
    return "inf" if math.isinf(number) else number


def _float_sensitivity(step: DPStep) -> float:
    """Return the worst effect of rounding on float32 sums, as a multiple of the clipping bound.

    With B samples of norm at most C, every addition and the scaling to the lattice err by at most
    ``2^-24`` of a partial sum of norm at most ``B C``; two neighbouring sums are off by
    ``2 gamma_(B+1) B C`` together, ``gamma_n = n 2^-24 / (1 - n 2^-24)`` (Higham 2002, 3.1).
    Taken at the expected batch size; far above 1 it certifies nothing.
    """
    batch = math.ceil(step.expected_batch_size)
    wide = all(p.dtype is torch.float64 for p in step.params)
    roundoff = (batch + 1) * (2.0**-53 if wide else 2.0**-24)
    return 1 + 2 * batch * roundoff / (1 - roundoff) if roundoff < 1 else math.inf


def _batch_sensitivities(step: DPStep) -> dict[str, float | str]:
    """Return the worst effect on exact sums of a record that moves its whole batch's gradients.

    As multiples of what one record is accounted for, at the expected batch size B. Contributions
    keep their bound C whatever moves them, so B others add at most ``2 B C``: that is proved, and
    certifies nothing. If no coordinate of theirs moves by more than k units of ``sd / 2^20``, they
    add at most ``k B d^(1/p) / 2^20`` in units of the noise (p = 1 for Laplace noise), which is
    ``k`` times the second number beside the 1 of the record itself.
    """
    batch, plan = math.ceil(step.expected_batch_size), step.plan
    coordinates = sum(block.size for block in plan.blocks)
    length = coordinates if plan.distribution == "laplace" else math.sqrt(coordinates)
    multiplier = plan.noise_multiplier or math.inf  # unknown: an event of several parts
    return {
        "worst_case_batch_sensitivity": 1.0 + 2 * batch,
        "batch_sensitivity_per_unit": json_number(multiplier * batch * length / SCALE_UNITS),
    }


def non_private_reason(plan: Plan) -> str:
    """Return why no release of this plan is private; empty if every one is."""
    if plan.private:
        return ""
    if plan.noise_by_samples and plan.distribution is not None:
        return "the variance of the noise depends on the number of samples"
    found = why_not(plan.blocks)
    return found or "a noise multiplier below 2^-4, or a release that no event describes"


def _reason(step: DPStep, certificate: accounting.Certificate) -> str | None:
    """Return why epsilon is infinite; None where it is not."""
    if not math.isinf(certificate.epsilon):
        return None
    if step.ledger.taints:
        return step.ledger.taints[0]
    if step.watched:
        return certificate.notes[0]
    if step.noise_warning:
        return step.noise_warning
    if step.key.seeded:
        return "the noise comes from a known seed"
    return non_private_reason(step.plan) or certificate.notes[-1]


def _blocks(plan: Plan) -> list[dict[str, Any]]:
    """Return every block's numbers; ``multiplier`` is what it would certify alone."""
    rows = []
    for block in plan.blocks:
        release = block.release
        alone = block.noise_scale / (block.bound * block.sensitivity_factor)
        protected = release is None or release.covers_all_directions
        rows.append(
            {
                "parameter": block.index,
                "shape": list(block.shape),
                "release": "identity" if release is None else release.label,
                "coordinates": block.size,
                "norm": "gradient" if release is None else release.norm,
                "clip_group": block.clip_group,
                "bound": json_number(block.bound),
                "sd": block.noise_scale,
                "stretch": json_number(block.sensitivity_factor),
                "multiplier": alone if protected else 0.0,
            }
        )
    return rows


def _coverage(plan: Plan) -> dict[str, Any] | None:
    """Return what of the model is in the frequency domain; None where that is not asked."""
    covered = plan.coverage
    return None if covered is None else {**asdict(covered), "text": covered.text}


def _warnings(step: DPStep, delta: float) -> list[str]:
    """Return the facts that make the guarantee say less than its numbers seem to."""
    sampling = step.sampling
    found = accounting.delta_warning(
        delta, dataset_size=sampling["dataset_size"], sample_rate=sampling["sample_rate"]
    )
    return [] if found is None else [found]


def step_report(step: DPStep, delta: float) -> dict[str, Any]:
    """Return the privacy report of a ``DPStep`` as JSON values.

    ``epsilon_claimed`` is the source's number and ``claim`` says whose, ``epsilon_certified`` the
    proved bound, with ``non_private`` in words where there is none. Nothing in the report depends
    on the data except through what was released: ``realised`` holds numbers of the last step's
    released values and certifies nothing; other diagnostics are the caller's to label. Float sums
    carry ``worst_case_float_sensitivity`` beside their certificate, which does not cover it. Exact
    sums of a model's gradients carry ``worst_case_batch_sensitivity`` and
    ``batch_sensitivity_per_unit``: what it would be if a record moved the gradients of others.
    """
    plan = step.plan
    certificate = step.certify(delta)
    if step.noise_warning:
        claimed = math.inf  # whatever the source says of noise that is fresh
    elif plan.mode == "published":
        claimed = accounting.claimed_epsilon(
            step.mechanism,
            steps=step.steps,
            delta=delta,
            dimension=plan.dimension,
            **step.sampling,
        )
    else:  # claims what is certified, schedules included
        claimed = step.epsilon_if_seed_secret(delta)
    report: dict[str, Any] = {
        "mechanism": plan.mechanism,
        "mode": plan.mode,
        "clipping": plan.clipping,
        "arithmetic": plan.arithmetic,
        "epsilon_claimed": json_number(claimed),
        "claim": step.mechanism.claim_text,
        "epsilon_certified": json_number(certificate.epsilon),
        "non_private": _reason(step, certificate),
        "epsilon_audited": None,
        "calibrated_to": step.calibrated_to,
        "certificate": certificate.to_dict(),
        "notes": [{"id": note.id, "text": note.text} for note in plan.notes],
        "warnings": _warnings(step, delta),
        "steps": step.steps,
        "dimension": plan.dimension,
        "expected_batch_size": step.expected_batch_size,
        "noise": {
            "distribution": plan.distribution,
            "point": plan.noise_point,
            "noise_multiplier": step.mechanism.noise_multiplier,
            "certified_noise_multiplier": plan.noise_multiplier,
            "cipher": f"ChaCha{step.key.rounds}",
            "key": "seed" if step.key.seeded else "operating system",
            "words": dict(step.words),
            "provenance": step.provenance(),
        },
        "blocks": _blocks(plan),
        "frequency_domain": _coverage(plan),
        "realised": step.mechanism.realised(step.memory),
        **step.sampling,
    }
    if plan.arithmetic == "float" and plan.private and not step.noise_warning:
        report["worst_case_float_sensitivity"] = json_number(_float_sensitivity(step))
    if plan.arithmetic == "exact" and step.ledger.batched:
        report |= _batch_sensitivities(step)
    if step.key.seeded:
        report["epsilon_if_seed_secret"] = json_number(step.epsilon_if_seed_secret(delta))
    return report
