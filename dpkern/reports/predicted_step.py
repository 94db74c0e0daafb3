"""Predict the seconds and the memory of a private and an ordinary step on a processor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..base.counts import Item, Itemised
from ..cost._step_flow import CountSetting, adding, finishing
from ..cost.op_time import CoresAtWork, OpTime, op_time, total
from ..cost.parts import MAPS, SAMPLES, part_of
from ..cost.phases import NOISE, UPDATE
from ..ops import update
from ..privacy.mechanisms import Mechanism
from .fake_step import FakeStep, TorchCall
from .private_calls import private_calls

BETWEEN = MAPS
PARTS = ("forward", "backward", "norms", "factors", "sums", BETWEEN, NOISE, UPDATE)
_NORMALISATIONS = ("native_layer_norm_backward", "native_group_norm_backward")
_TRANSCENDENTAL = ("gelu", "gelu_backward", "tanh", "_log_softmax", "_softmax", "exp", "sigmoid")
_POLYNOMIAL = 15
"""Products, and as many sums, of an entry of a transcendental function."""


@dataclass(frozen=True, kw_only=True)
class PredictedCall:
    """Predicted work.

    Attributes:
        name: op of dpkern, or operation of torch.
        part: one of ``PARTS``.
        time: predicted limits and seconds.
        host: seconds that the host takes to call it.
    """

    name: str
    part: str
    time: OpTime
    host: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """A predicted step.

    Attributes:
        calls: what it does.
        memory: bytes at its peak, by what they hold.
        missing: what is in no count, in words; the time is a lower bound where there is some.
        overlapped: whether the host calls kernels ahead of a device.
    """

    calls: list[PredictedCall]
    memory: dict[str, int]
    missing: list[str]
    overlapped: bool

    @property
    def working(self) -> float:
        """Seconds of the processor's work."""
        return sum(call.time.seconds for call in self.calls)

    @property
    def calling(self) -> float:
        """Seconds in which the host calls."""
        return sum(call.host for call in self.calls)

    @property
    def seconds(self) -> float:
        """Seconds of the step: a host works beside its device, and before its own kernels."""
        if self.overlapped:
            return max(self.working, self.calling)
        return self.working + self.calling

    def by_part(self) -> dict[str, float]:
        """Return the seconds of each part; they add up to ``working`` and a CPU's calls."""
        found: dict[str, float] = {}
        for call in self.calls:
            each = call.time.seconds + (0.0 if self.overlapped else call.host)
            found[call.part] = found.get(call.part, 0.0) + each
        return {part: found[part] for part in PARTS if part in found}

    @property
    def unpriced(self) -> dict[str, int]:
        """Primitives without a price on this processor."""
        return dict(total(call.time for call in self.calls).unpriced)

    @property
    def lower_bound(self) -> bool:
        """Whether something is in no price or count."""
        return bool(self.unpriced or self.missing)


def ordinary(step: FakeStep, place: CoresAtWork, *, rule: update.Rule) -> PredictedStep:
    """Predict an ordinary step: torch's operations and one fused pass of the optimizer."""
    calls = [_torch_call(call, place) for call in step.calls]
    n, size = _parameters(step), step.dtype.itemsize
    kept = 1 + len(rule.buffer_names())
    moved = op_time("torch.optimizer", Itemised(), place, dtype=step.dtype)
    seconds = place.traffic(size * n * (kept + 1), size * n * kept)
    moved = replace(moved, traffic=seconds, seconds=seconds + moved.launch)
    calls.append(PredictedCall(name="optimizer", part=UPDATE, time=moved, host=_host(place, 1, "")))
    memory = _held(step, rule) | {"gradients": size * n, "activations": step.saved}
    missing = _without_price(step.calls)
    return PredictedStep(calls=calls, memory=memory, missing=missing, overlapped=_is_gpu(place))


def private(
    step: FakeStep, place: CoresAtWork, mechanism: Mechanism, *, rule: update.Rule
) -> PredictedStep:
    """Predict a private step of a mechanism.

    Norms and sums are those of the gradient. A mechanism that clips something else has work that
    is not counted here: its step is a lower bound.
    """
    made = private_calls(step, device=place.machine.kind)
    calls = [
        _torch_call(call, place)
        for call in step.without_weights
        if call.name not in _NORMALISATIONS
    ]
    for one in made.calls:
        time = op_time(one.op, one.items, _own(place, one.op), dtype=one.dtype)
        calls.append(
            PredictedCall(name=one.op, part=one.phase, time=time, host=_host(place, 1, one.op))
        )
    ended, missing = _finish(step, place, mechanism, rule)
    n, operands = _parameters(step), _operands(step)
    memory = _held(step, rule) | {
        "sums": 4 * n,
        "activations": step.saved,
        "output gradients": max(0, operands),
        "per-sample gradients": made.written,
    }
    return PredictedStep(
        calls=calls + ended,
        memory=memory,
        missing=[*made.missing, *missing, *_without_price(step.without_weights)],
        overlapped=_is_gpu(place),
    )


def _finish(
    step: FakeStep, place: CoresAtWork, mechanism: Mechanism, rule: update.Rule
) -> tuple[list[PredictedCall], list[str]]:
    """Predict maps, noise, update and learning, which one kernel fuses where nothing is mapped."""
    shapes = tuple(step.shapes.values())
    plan = mechanism.plan_at(mechanism.plan(shapes), 2)
    setting = CountSetting(
        mechanism=mechanism,
        shapes=shapes,
        batch=step.batch,
        dtype=torch.float32,
        rule=rule,
        clipped=(step.batch,) * len(plan.groups),
        number=2,
        samples="sum",
    )
    items = adding(setting, plan) + finishing(setting, plan)
    parts: dict[str, list[Item]] = {}
    for item in items:
        part = part_of(item.name)
        parts.setdefault(BETWEEN if part == SAMPLES else part, []).append(item)

    def time(lines: list[Item]) -> OpTime:
        return op_time("update.step", Itemised(tuple(lines)), place, dtype=torch.float32)

    fused = [i for part in (NOISE, UPDATE) for i in parts.get(part, [])]
    whole, noise = time(fused), time(parts.get(NOISE, []))
    noise = replace(noise, seconds=min(noise.seconds - noise.launch, whole.seconds), launch=0.0)
    rest = replace(time(parts.get(UPDATE, [])), seconds=whole.seconds - noise.seconds)
    host = _host(place, 1, "update.step")
    found = [
        PredictedCall(name="noise in the update", part=NOISE, time=noise),
        PredictedCall(name="update.step", part=UPDATE, time=rest, host=host),
    ]
    mapped = parts.get(BETWEEN, [])
    if mapped:
        found.append(PredictedCall(name=MAPS, part=BETWEEN, time=time(mapped)))
    clipped = {b.release.norm for b in plan.blocks if b.release is not None} - {"gradient"}
    missing = [f"norms of the {', '.join(sorted(clipped))}"] if clipped else []
    if plan.p == 1:
        missing.append("L1 norms")
    return found, missing


def _torch_call(call: TorchCall, place: CoresAtWork) -> PredictedCall:
    machine = place.machine.machine
    traffic, compute = place.traffic(call.bytes, 0), 0.0
    if call.flops:
        peak = place.peak(call.dtype)
        if call.name.startswith("convolution"):
            peak *= _of_convolutions(machine, call.dtype)
        compute = call.flops / peak
    elif call.name in _TRANSCENDENTAL:
        entries = call.bytes // (2 * call.dtype.itemsize)
        compute = place.seconds({"ADD": _POLYNOMIAL * entries, "MUL": _POLYNOMIAL * entries})
    launch = 1e-6 * machine.get("launch_us", 0.0)
    time = OpTime(
        compute=compute, traffic=traffic, launch=launch, seconds=max(compute, traffic) + launch
    )
    return PredictedCall(name=call.name, part=call.phase, time=time, host=_host(place, 1, ""))


def _of_convolutions(machine: Mapping[str, float], dtype: torch.dtype) -> float:
    """Return a convolution's rate over that of a product: libraries use TF32, or reach less."""
    share = machine.get("product_share", 1.0)
    slower = machine.get("convolution_share", share) / share
    if dtype is not torch.float32:
        return slower
    return slower * machine.get("peak_tf32_gflops", machine["peak_gflops"]) / machine["peak_gflops"]


def _own(place: CoresAtWork, op: str) -> CoresAtWork:
    """Return the place with the share of the peak that dpkern's own products reach on it."""
    machine = place.machine
    share = machine.machine.get("own_product_share")
    if share is None or not op.startswith("ghost."):
        return place
    figures = {**machine.machine, "product_share": share}
    return replace(place, machine=replace(machine, machine=figures))


def _host(place: CoresAtWork, calls: int, op: str) -> float:
    """Return the host's seconds for so many calls of torch, or of an op of dpkern."""
    name = "own_call_us" if op else "call_us"
    return 1e-6 * calls * place.machine.machine.get(name, 0.0)


def _held(step: FakeStep, rule: update.Rule) -> dict[str, int]:
    each = step.dtype.itemsize * _parameters(step)
    return {"parameters": each, "optimizer": len(rule.buffer_names()) * each}


def _parameters(step: FakeStep) -> int:
    return sum(math.prod(shape) for shape in step.shapes.values())


def _operands(step: FakeStep) -> int:
    kinds = ("linear", "conv")
    entries = sum(math.prod(use.y) for use in step.uses if use.kind in kinds)
    return entries * step.dtype.itemsize


def _without_price(calls: Sequence[TorchCall]) -> list[str]:
    """Return the operations that are charged for their bytes alone, and do more with them."""
    names = sorted({call.name for call in calls if not call.priced})
    return [f"what torch computes in {', '.join(names)}"] if names else []


def _is_gpu(place: CoresAtWork) -> bool:
    return place.machine.kind == "gpu"


__all__ = ["PARTS", "PredictedCall", "PredictedStep", "ordinary", "private"]
