"""Refuse calls of ``DPStep`` because of release coordinates, importance or per-sample noise."""

from __future__ import annotations

import torch

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError
from ..privacy.mechanisms.plan import Plan


def check_kinds(plan: Plan, *, released: bool) -> None:
    """Check that samples of this kind, gradients or ``released`` coordinates, can be clipped."""
    if released and plan.needs_raw:
        raise InvalidInput(
            "released",
            expected="gradients, whose mean this mechanism releases too",
            got="release coordinates",
            remedy="Pass the gradients themselves, or use the engine.",
        )
    for block in plan.blocks:
        release = block.release
        if release is None:
            continue
        if released and release.norm != "release":
            raise InvalidInput(
                "released",
                expected="coordinates that the clip bound speaks of",
                got=f"parameter {block.index}, clipped by the norm of its {release.norm}",
                remedy="Let the engine clip, which has the layer's input and output gradient.",
            )
        if not released and release.needs_operands:
            raise InvalidInput(
                "per_sample",
                expected="what a gradient alone can tell",
                got=f"parameter {block.index}, whose {release.norm} norm or filter needs the "
                "layer's input and output gradient",
                remedy="Pass released=True with coordinates from ops.spectral.conv_release, or "
                "use the engine.",
            )


def check_norms(clipped_as: object, plan: Plan) -> None:
    """Check that the float sums' bound is on the same norm as the plan's.

    Raises:
        PrivacyError: a bound on another norm: a map could stretch the sum beyond the certificate.
    """
    taken = clipped_as if isinstance(clipped_as, tuple) else (None,) * len(plan.blocks)
    for block, seen in zip(plan.blocks, taken, strict=True):
        release = block.release
        if release is None or seen is release or seen == release:
            continue
        if release.norm != "gradient" or release.centre is not None:
            raise PrivacyError(
                "sum",
                expected=f"a sum clipped by the norm of its {release.norm}, in front of the "
                f"release of parameter {block.index}",
                got="one clipped by another norm",
                remedy="Let the engine clip, or pass per_sample=.",
            )


def check_raw(raw: object, params: list[torch.Tensor]) -> None:
    """Check sums without clipping, for a release that bounds them itself."""
    given = raw if isinstance(raw, tuple) else ()
    if len(given) != len(params):
        raise InvalidInput(
            "sum.raw",
            expected=f"{len(params)} sums without clipping: the mechanism releases their mean",
            got="none" if raw is None else str(len(given)),
            remedy="Pass per_sample= gradients, or let the engine sum.",
        )
    for i, (param, total) in enumerate(zip(params, given, strict=True)):
        check.tensor_at(f"sum.raw[{i}]", total, shape=param.shape, device=param.device)


def check_importance(means: object, params: list[torch.Tensor], plan: Plan) -> None:
    """Check mean gradients, for a plan that asks the caller for them."""
    if plan.importance is None or plan.importance.source != "full":
        raise InvalidInput(
            "set_importance",
            expected="a mechanism whose importance comes from the caller",
            got=plan.mechanism,
            remedy="Leave the call out, or choose w_source='full'.",
        )
    given = means if isinstance(means, (list, tuple)) else ()
    check.one_each("means", given, len(params))
    for i, (param, mean) in enumerate(zip(params, given, strict=True)):
        check.tensor_at(f"means[{i}]", mean, shape=param.shape, device=param.device)


def check_ready(plan: Plan, *, shards: bool, importance: object) -> None:
    """Check that ``finish`` can do what the plan says; asked before anything is recorded."""
    if shards and (plan.mapped or plan.importance is not None or plan.noise_point != "per_batch"):
        raise InvalidInput(
            "fully_shard",
            expected="a mechanism that noises the sum of gradients as it is",
            got=f"{plan.mechanism} with release coordinates or per-sample noise",
            remedy="Use DistributedDataParallel or one process.",
        )
    if plan.importance is not None and plan.importance.source == "full" and importance is None:
        raise InvalidInput(
            "set_importance",
            expected="the mean gradient of all records, before finish()",
            got="none",
            remedy="Call step.set_importance(means) in every step.",
        )


def check_samples(samples: int, wanted: int | None) -> None:
    """Check that there are as many samples as the certificate of per-sample noise is for."""
    if wanted is not None and samples != wanted:
        raise PrivacyError(
            "batch_size",
            expected=f"{wanted} samples in every step, for which the noise was certified",
            got=str(samples),
            remedy="Draw batches of that size (sampling='fixed' or 'shuffled'), or noise once "
            "per batch.",
        )
