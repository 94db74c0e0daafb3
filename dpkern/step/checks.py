"""Check the arguments of ``DPStep``: each check raises before anything has changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError, brief
from ..base.rng import Key
from ..ops import clip, noise, update
from ..privacy.mechanisms.base import Mechanism
from ..privacy.mechanisms.plan import Plan
from .release_checks import check_kinds, check_norms, check_raw


def checked_mechanism(mechanism: object) -> Mechanism:
    """Check that this is a mechanism, and return it."""
    if not isinstance(mechanism, Mechanism):
        raise InvalidInput(
            "mechanism",
            expected="a dpkern mechanism",
            got=type(mechanism).__name__,
            remedy="Pass a configuration such as dpkern.mechanisms.DPSGD(...).",
        )
    return mechanism


SCHEDULED = ("noise_multiplier", "max_grad_norm")
"""Fields that may change between steps."""

_DTYPES = (*noise.FLOATS, torch.bfloat16, torch.float16)


def scheduled_values(mechanism: Mechanism) -> dict[str, Any]:
    """Return the values that a schedule may change, as plain ones."""
    given = {name: getattr(mechanism, name) for name in SCHEDULED if hasattr(mechanism, name)}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in given.items()}


def check_schedule(old: Mechanism, new: object) -> None:
    """Check that a configuration differs from the old one by its noise and bounds only."""
    same = type(new) is type(old) and old.mode != "published"
    if same:
        changed = {name: getattr(new, name) for name in scheduled_values(old)}
        same = replace(old, **changed) == new  # type: ignore[type-var]
    if not same:
        raise InvalidInput(
            "mechanism",
            expected=f"the one in use with another {' or '.join(SCHEDULED)}",
            got=repr(new),
            remedy="Make it with dataclasses.replace(step.mechanism, noise_multiplier=...). A "
            "mechanism as published keeps its numbers; other changes need a new DPStep.",
        )


def checked_key(key: object, unsafe_seed: int | None, rounds: int) -> Key:
    """Return the key that was given, or a new one."""
    if key is None:
        return (
            Key.fresh(rounds) if unsafe_seed is None else Key.from_unsafe_seed(unsafe_seed, rounds)
        )
    if not isinstance(key, Key) or unsafe_seed is not None:
        raise InvalidInput(
            "key",
            expected="a dpkern.rng.Key, without unsafe_seed",
            got=type(key).__name__ if unsafe_seed is None else "both",
            remedy="Pass one of them: Key.from_unsafe_seed(seed) makes a seeded key.",
        )
    return key


def check_updates(
    updates: object, params: list[torch.Tensor], optimizer: object
) -> list[tuple[tuple[int, ...], update.Rule, update.State]]:
    """Check groups ``(indices, rule, state)`` in which every index occurs at most once."""
    if updates is None:
        return []
    if optimizer is not None or not isinstance(updates, (list, tuple)):
        raise InvalidInput(
            "updates",
            expected="a list of (indices, rule, state), for a DPStep without an optimizer",
            got=type(updates).__name__ if optimizer is None else "a DPStep with an optimizer",
            remedy="Make the DPStep without optimizer=, or call finish() alone.",
        )
    groups = []
    seen: set[int] = set()
    for k, group in enumerate(updates):
        fits = isinstance(group, (list, tuple)) and len(group) == 3
        if not fits or not isinstance(group[1], (update.SGD, update.Adam)):
            raise InvalidInput(
                f"updates[{k}]",
                expected="(indices, an ops.update rule, its State)",
                got=brief(group),
                remedy="Leave parameters out to get their noisy gradients back.",
            )
        indices = tuple(group[0])
        for i in indices:
            if type(i) is not int or not 0 <= i < len(params):
                check.integer(0, len(params) - 1, **{f"updates[{k}]": i})
        names = group[1].buffer_names()
        state = group[2]
        if not isinstance(state, update.State) or any(
            len(state.buffers.get(name, ())) != len(indices) for name in names
        ):
            raise InvalidInput(
                f"updates[{k}]",
                expected=f"a State with buffers {list(names)}, one tensor per index",
                got=type(state).__name__,
                remedy="Make it with rule.init(parameters of the group).",
            )
        chosen = [params[i] for i in indices]
        _check_params(chosen, indices, fused=True)
        if len(set(indices)) < len(indices) or seen & set(indices):
            raise PrivacyError(
                f"updates[{k}]",
                expected="every parameter once",
                got="one that is named twice",
                remedy="Name it once: its noise is drawn once per step, for one update.",
            )
        seen.update(indices)
        groups.append((indices, group[1], state))
    return groups


def checked_params(params: Iterable[torch.Tensor], *, fused: bool) -> list[torch.Tensor]:
    """Check at least one parameter, each once, floating, on one device.

    A fused step needs one dtype and contiguous tensors.
    """
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
    _check_params(tensors, range(len(tensors)), fused=fused)
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise InvalidInput(
            "params",
            expected="every parameter once",
            got="one that is listed twice",
            remedy="Pass model.parameters(), which lists a tied weight once.",
        )
    return tensors


def _check_params(tensors: Sequence[torch.Tensor], numbers: Sequence[int], *, fused: bool) -> None:
    """Check floating tensors on one device; ``fused`` needs contiguous ones of one dtype.

    ``numbers`` name them.
    """
    if not tensors:
        return
    dtypes = noise.FLOATS if fused else _DTYPES
    first = check.tensor_at(f"params[{numbers[0]}]", tensors[0], dtypes=dtypes, contiguous=fused)
    wanted: dict[str, Any] = {"device": first.device, "contiguous": fused}
    wanted["dtypes"] = (first.dtype,) if fused else dtypes
    if not check.alike(tensors, **wanted):
        for i, tensor in zip(numbers, tensors, strict=True):
            check.tensor_at(f"params[{i}]", tensor, **wanted)


def check_optimizer(optimizer: object) -> None:
    """Check that this is a rule or None."""
    if optimizer is not None and not isinstance(optimizer, (update.SGD, update.Adam)):
        raise InvalidInput(
            "optimizer",
            expected="an ops.update rule (SGD, Adam, AdamW) or None",
            got=type(optimizer).__name__,
            remedy="Leave it out to get the noisy gradients back for an optimizer of your own.",
        )


def check_per_sample(
    per_sample: object, params: list[torch.Tensor], plan: Plan, *, released: bool
) -> None:
    """Check gradients ``[B, *shape]``, one tensor per parameter; or release coordinates."""
    check_kinds(plan, released=released)
    if not isinstance(per_sample, (list, tuple)) or len(per_sample) != len(params):
        length = f" of {len(per_sample)}" if isinstance(per_sample, (list, tuple)) else ""
        raise InvalidInput(
            "per_sample",
            expected=f"a list of {len(params)} tensors, one per parameter",
            got=type(per_sample).__name__ + length,
            remedy="Pass gradients [B, *shape] in the order of params.",
        )
    exact = plan.arithmetic == "exact"
    batch: int | None = None
    for i, (param, gradient) in enumerate(zip(params, per_sample, strict=True)):
        shape = (batch, *(plan.blocks[i].signal_shape if released else param.shape))
        name = f"per_sample[{i}]"
        wide = clip.sum_dtype(param.dtype)
        dtypes = [d for d in clip.GRAD_DTYPES if exact or clip.sum_dtype(d) is wide]
        dtypes += [torch.float16] if param.dtype is torch.float16 else []
        check.tensor_at(name, gradient, shape=shape, dtypes=dtypes, device=param.device)
        batch = gradient.shape[0]


def check_sum(result: object, params: list[torch.Tensor], plan: Plan) -> None:
    """Check a clipped sum whose proved bound is the plan's."""
    if not isinstance(result, clip.ClipResult):
        raise InvalidInput(
            "sum",
            expected="an ops.clip.ClipResult, which carries its proved bound",
            got=type(result).__name__,
            remedy="Clip with ops.clip.clip_sum, or pass per_sample= gradients.",
        )
    exact = plan.arithmetic == "exact"
    group_bounds = plan.group_bounds
    units = tuple(unit for unit in plan.units if unit is not None) if exact else None
    fits = (
        result.arithmetic == plan.arithmetic
        and result.p == plan.p
        and result.unit == units
        and len(result.max_norms) == len(group_bounds)
        and all(a <= b for a, b in zip(result.max_norms, group_bounds, strict=True))
    )
    if not fits:
        raise PrivacyError(
            "sum",
            expected=f"{plan.arithmetic} sums clipped to at most {group_bounds} in norm {plan.p}",
            got=f"{result.arithmetic} sums clipped to {result.max_norms} in norm {result.p}",
            remedy="Clip with the plan's bounds, units and arithmetic (see DPStep.plan).",
        )
    if len(result.sums) != len(params):
        raise InvalidInput(
            "sum",
            expected=f"{len(params)} sums, one per parameter",
            got=str(len(result.sums)),
            remedy="Clip the gradients of all parameters together, in the order of params.",
        )
    shapes = [block.signal_shape if exact else block.shape for block in plan.blocks]
    _check_sums(result.sums, params, shapes, exact)
    if not exact:
        check_norms(result.clipped_as, plan)
        _check_finite(result.sums)
    if plan.needs_raw:
        check_raw(result.raw, params)


def _check_sums(
    sums: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    exact: bool,
) -> None:
    """Check sums of these shapes, in the dtype of sums, each on its parameter's device."""
    kinds = {(clip.sum_dtype(p.dtype), p.device) for p in params}
    if len(kinds) == 1:
        ((dtype, device),) = kinds
        dtypes = noise.INTEGERS if exact else (dtype,)
        if check.alike(sums, dtypes=dtypes, device=device, shapes=shapes):
            return
    for i, (param, total) in enumerate(zip(params, sums, strict=True)):
        check.tensor_at(
            f"sum.sums[{i}]",
            total,
            shape=shapes[i],
            dtypes=noise.INTEGERS if exact else (clip.sum_dtype(param.dtype),),
            device=param.device,
        )


def _check_finite(sums: Sequence[torch.Tensor]) -> None:
    if not all(total.is_cpu for total in sums):
        return  # nothing waits for a device: the update counts a sum that is not finite as zero
    # Sums often share memory, and a sum over entries is fast and not finite if an entry is not.
    pieces = {id(t._base): t._base for t in sums if t._base is not None}
    pieces |= {id(t): t for t in sums if t._base is None}
    if all(math.isfinite(float(piece.sum())) for piece in pieces.values()):
        return
    for i, total in enumerate(sums):
        if not bool(torch.isfinite(total).all()):
            raise InvalidInput(
                f"sum.sums[{i}]",
                expected="finite sums",
                got="NaN or infinity",
                remedy="Sum with ops.clip.clip_sum, which drops samples that are not finite.",
            )


def check_saved(state: object, mine: Mapping[str, Any]) -> None:
    """Check a saved state of the same version and configuration as ``mine``."""
    if not isinstance(state, Mapping) or state.get("version") != mine["version"]:
        raise InvalidInput(
            "state",
            expected=f"a DPStep state of version {mine['version']}",
            got=str(state.get("version")) if isinstance(state, Mapping) else type(state).__name__,
            remedy="Pass what DPStep.state_dict() returned.",
        )
    missing = sorted(mine.keys() - state.keys())
    tables = ("fingerprint", "mechanism", "words")
    missing += [k for k in tables if not isinstance(state.get(k), Mapping)]
    if missing:
        raise InvalidInput(
            "state",
            expected="what DPStep.state_dict() returned",
            got=f"a state without {', '.join(missing)}",
            remedy="Pass the whole state.",
        )
    if state["mechanism"].keys() != mine["mechanism"].keys():
        raise InvalidInput(
            "state.mechanism",
            expected=f"the values of {sorted(mine['mechanism'])}",
            got=str(sorted(state["mechanism"])),
            remedy="Pass what DPStep.state_dict() returned.",
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
