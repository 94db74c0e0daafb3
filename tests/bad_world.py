"""The objects that bad calls act on: everything that one of them could change, and helpers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import dpkern
from dpkern import DPStep
from dpkern.base.errors import BackendError, DPKernError, InvalidInput, PrivacyError
from dpkern.base.rng import Key, Purpose, Stream
from dpkern.ops import clip, noise, update
from dpkern.privacy import accounting
from dpkern.privacy.mechanisms import DPSGD

NAN, INF = math.nan, math.inf
SHAPES = ((4, 3), (5,))
BATCH = 3
UNIT = 2.0**-20


@dataclass
class World:
    """Everything that a call could change, made anew for each row of the table."""

    key: Key = field(default_factory=lambda: Key.from_unsafe_seed(1))
    ints: torch.Tensor = field(default_factory=lambda: torch.arange(12, dtype=torch.int32))
    floats: torch.Tensor = field(default_factory=lambda: torch.linspace(-1, 1, 12))
    params: list[torch.Tensor] = field(default_factory=lambda: [torch.ones(s) for s in SHAPES])
    sums: list[torch.Tensor] = field(default_factory=lambda: [torch.ones(s) for s in SHAPES])
    grads: list[torch.Tensor] = field(
        default_factory=lambda: [torch.full((BATCH, *s), 0.3) for s in SHAPES]
    )
    out: list[torch.Tensor] = field(
        default_factory=lambda: [torch.ones(s, dtype=torch.int32) for s in SHAPES]
    )
    rule: update.Rule = field(default_factory=lambda: update.SGD(lr=0.1, momentum=0.9))
    mechanism: DPSGD = field(default_factory=lambda: DPSGD(noise_multiplier=1, max_grad_norm=1))

    def __post_init__(self) -> None:
        self.state = self.rule.init(self.params)
        self.step = self.make()
        self.step.finish()
        self.open = self.make()
        self.open.add(self.grads)

    @property
    def stream(self) -> Stream:
        return self.key.stream(Purpose.NOISE, 1)

    @property
    def rounding(self) -> Stream:
        return self.key.stream(Purpose.ROUNDING, 1)

    def make(self, mechanism: object = None, params: object = None, **more: Any) -> DPStep:
        given = {"expected_batch_size": 8, "sample_rate": 0.1, "optimizer": self.rule, **more}
        given.setdefault("unsafe_seed", 1)
        params = [p.clone() for p in self.params] if params is None else params
        return DPStep(mechanism or self.mechanism, params, **given)  # type: ignore[arg-type]

    def add(self, x: object, **changes: Any) -> object:
        """``add_noise`` on floats with one argument changed."""
        given = {"stream": self.stream, "scale": 1.0, "rounding": self.rounding} | changes
        return noise.add_noise(x, **given)  # type: ignore[arg-type]

    def clip(self, grads: object = None, bound: Any = 1.0, **changes: Any) -> object:
        return clip.clip_sum(self.grads if grads is None else grads, bound, **changes)  # type: ignore[arg-type]

    def exact(self, grads: object = None, bound: Any = 1.0, **changes: Any) -> clip.ClipResult:
        given = {"arithmetic": "exact", "unit": UNIT} | changes
        return clip.clip_sum(self.grads if grads is None else grads, bound, **given)  # type: ignore[arg-type]

    def noise(self, **changes: Any) -> update.Noise:
        plain = update.Noise(
            distribution="gaussian",
            scales=(1.0, 1.0),
            stream=self.stream,
            positions=(0, 512),
            rounding=self.rounding,
        )
        return replace(plain, **changes)

    def update(self, **changes: Any) -> object:
        given = {
            "params": self.params,
            "sums": self.sums,
            "rule": self.rule,
            "state": self.state,
            "noise": self.noise(),
        } | changes
        return update.step(given.pop("params"), given.pop("sums"), **given)

    def saved(self, **changes: Any) -> dict[str, Any]:
        return self.step.state_dict() | changes

    def snapshot(self) -> list[Any]:
        """The bits of every tensor and the values of every counter."""
        tensors = [self.ints, self.floats, *self.params, *self.sums, *self.grads, *self.out]
        tensors += self.state.buffers["momentum_buffer"]
        values: list[Any] = [self.state.steps]
        for step in (self.step, self.open):
            assert step.optimizer_state is not None
            tensors += [*step.params, *(step._sums or ())]
            tensors += step.optimizer_state.buffers["momentum_buffer"]
            values += [step.steps, step.nonfinite, step._added, step._sums is None]
            values += [step.ledger.state_dict(), dict(step.words), step.optimizer, step.key]
        return [t.numpy().tobytes() for t in tensors] + copy.copy(values)


@dataclass(frozen=True)
class Bad:
    """One row: what is called, and what must come of it."""

    id: str
    name: str
    call: Callable[[World], object]
    error: type[DPKernError] = InvalidInput
    says: str = ""


P, B = PrivacyError, BackendError
MOMENTUM = update.SGD(lr=0.1, momentum=0.9)


def column(t: torch.Tensor) -> torch.Tensor:
    """The same numbers with other strides."""
    return t.t().contiguous().t()


def overlapping(world: World) -> object:
    return world.update(noise=world.noise(positions=(0, 11)))


def shared(world: World) -> object:
    return world.update(noise=world.noise(rounding=world.stream))


def used(world: World) -> object:
    return world.step.load_state_dict(world.make().state_dict())


def forgotten(world: World) -> object:
    """A history shorter than the number of steps."""
    empty = accounting.Ledger(seeded=True).state_dict()
    return world.make().load_state_dict(world.saved(ledger=empty))


def widened(world: World) -> object:
    """A sum clipped to more than the plan's bound."""
    result = world.exact(unit=world.open.plan.units[0])
    return world.open.add(sum=replace(result, max_norms=(1.5,)))


def of_one_parameter(world: World) -> object:
    return world.open.add(sum=world.exact(world.grads[0], unit=world.open.plan.units[0]))


def as_floats(world: World) -> object:
    result = world.exact(unit=world.open.plan.units[0])
    return world.open.add(sum=replace(result, sums=tuple(s.float() for s in result.sums)))


def poisoned(world: World) -> object:
    step = world.make(replace(world.mechanism, arithmetic="float"))
    result = clip.clip_sum(world.grads, 1.0)
    result.sums[1][2] = NAN
    return step.add(sum=result)


def unclipped_automatic(world: World) -> object:
    mechanism = DPSGD(noise_multiplier=0, max_grad_norm=INF, clipping="automatic")
    return world.make(mechanism).add(world.grads)


def wiped(world: World) -> object:
    key = Key.fresh()
    key.wipe()
    return key.stream(Purpose.NOISE, 0)


def entered(backend: str) -> None:
    with dpkern.use(backend):
        raise AssertionError("entered")


def cpu_backend() -> Any:
    from dpkern.ops.backends import cpu

    return cpu
