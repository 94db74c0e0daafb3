"""What ``DPStep`` refuses: each check raises before anything has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from . import _validate as check
from .errors import InvalidInput, PrivacyError
from .mechanisms.base import Mechanism, Plan
from .ops import clip, noise, update


def checked_mechanism(mechanism: object) -> Mechanism:
    """A mechanism."""
    if not isinstance(mechanism, Mechanism):
        raise InvalidInput(
            "mechanism",
            expected="a dpkern mechanism",
            got=type(mechanism).__name__,
            remedy="Pass a configuration such as dpkern.mechanisms.DPSGD(...).",
        )
    return mechanism


def checked_params(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """At least one parameter, each once, contiguous, of one floating dtype and device."""
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise InvalidInput(
            "params",
            expected="a list of tensors",
            got=type(params).__name__,
            remedy="Wrap a single tensor in a list.",
        )
    tensors = list(params)
    if not tensors:
        raise InvalidInput(
            "params",
            expected="at least one parameter",
            got="none",
            remedy="Pass [p for p in model.parameters() if p.requires_grad].",
        )
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        dtypes = noise.FLOATS if i == 0 else (first.dtype,)
        device = None if i == 0 else first.device
        check.tensor_at(f"params[{i}]", tensor, dtypes=dtypes, device=device, contiguous=True)
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise InvalidInput(
            "params",
            expected="every parameter once",
            got="one that is listed twice",
            remedy="Tied weights are one parameter: model.parameters() lists it once.",
        )
    return tensors


def check_optimizer(optimizer: object) -> None:
    """A rule or None."""
    if optimizer is not None and not isinstance(optimizer, (update.SGD, update.Adam)):
        raise InvalidInput(
            "optimizer",
            expected="an ops.update rule (SGD, Adam, AdamW) or None",
            got=type(optimizer).__name__,
            remedy="Leave it out to get the noisy gradients back for an optimizer of your own.",
        )


def check_per_sample(per_sample: object, params: list[torch.Tensor], plan: Plan) -> None:
    """Gradients ``[B, *shape]``, one tensor per parameter."""
    if not isinstance(per_sample, (list, tuple)) or len(per_sample) != len(params):
        length = f" of {len(per_sample)}" if isinstance(per_sample, (list, tuple)) else ""
        raise InvalidInput(
            "per_sample",
            expected=f"a list of {len(params)} tensors, one per parameter",
            got=type(per_sample).__name__ + length,
            remedy="Pass gradients [B, *shape] in the order of params.",
        )
    wide = clip.sum_dtype(params[0].dtype)
    dtypes = [
        d for d in clip.GRAD_DTYPES if plan.arithmetic == "exact" or clip.sum_dtype(d) is wide
    ]
    batch: int | None = None
    for i, (param, gradient) in enumerate(zip(params, per_sample, strict=True)):
        name, shape = f"per_sample[{i}]", (batch, *param.shape)
        check.tensor_at(name, gradient, shape=shape, dtypes=dtypes, device=param.device)
        batch = gradient.shape[0]


def check_sum(result: object, params: list[torch.Tensor], plan: Plan) -> None:
    """A clipped sum whose proved bound is the plan's."""
    if not isinstance(result, clip.ClipResult):
        raise InvalidInput(
            "sum",
            expected="an ops.clip.ClipResult, which carries its proved bound",
            got=type(result).__name__,
            remedy="Clip with ops.clip.clip_sum, or pass per_sample= gradients.",
        )
    exact = plan.arithmetic == "exact"
    group_bounds = plan.bounds if plan.clipping == "per_layer" else plan.bounds[:1]
    units = tuple(unit for unit in plan.units if unit is not None) if exact else None
    fits = (
        result.arithmetic == plan.arithmetic
        and result.p == 2
        and result.unit == units
        and len(result.max_norms) == len(group_bounds)
        and all(a <= b for a, b in zip(result.max_norms, group_bounds, strict=True))
    )
    if not fits:
        raise PrivacyError(
            "sum",
            expected=f"{plan.arithmetic} sums clipped to at most {group_bounds}",
            got=f"{result.arithmetic} sums clipped to {result.max_norms}",
            remedy="Clip with the plan's bounds, units and arithmetic (see DPStep.plan).",
        )
    if len(result.sums) != len(params):
        raise InvalidInput(
            "sum",
            expected=f"{len(params)} sums, one per parameter",
            got=str(len(result.sums)),
            remedy="Clip the gradients of all parameters together, in the order of params.",
        )
    dtypes = noise.INTEGERS if exact else (clip.sum_dtype(params[0].dtype),)
    for i, (param, total) in enumerate(zip(params, result.sums, strict=True)):
        name = f"sum.sums[{i}]"
        check.tensor_at(name, total, shape=param.shape, dtypes=dtypes, device=param.device)
        if not exact and not bool(torch.isfinite(total).all()):
            raise InvalidInput(
                name,
                expected="finite sums",
                got="NaN or infinity",
                remedy="ops.clip.clip_sum drops samples that are not finite.",
            )


def check_saved(state: object, mine: Mapping[str, Any]) -> None:
    """A saved state of the same version and configuration as ``mine``."""
    if not isinstance(state, Mapping) or state.get("version") != mine["version"]:
        raise InvalidInput(
            "state",
            expected=f"a DPStep state of version {mine['version']}",
            got=str(state.get("version")) if isinstance(state, Mapping) else type(state).__name__,
            remedy="Pass what DPStep.state_dict() returned.",
        )
    missing = sorted(mine.keys() - state.keys())
    missing += [k for k in ("fingerprint", "words") if not isinstance(state.get(k), Mapping)]
    if missing:
        raise InvalidInput(
            "state",
            expected="what DPStep.state_dict() returned",
            got=f"a state without {', '.join(missing)}",
            remedy="Pass the whole state.",
        )
    ours, theirs = mine["fingerprint"], state["fingerprint"]
    changed = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
    if changed:
        raise InvalidInput(
            "state",
            expected="the configuration that this DPStep was made with",
            got=f"another {', '.join(changed)}",
            remedy="Resume with the arguments of the run that wrote the state.",
        )
