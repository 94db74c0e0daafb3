"""A mechanism whose releases are given one by one, for the tests of plans and of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from dpkern import DPStep
from dpkern.privacy.accounting import events
from dpkern.privacy.accounting.events import EventSpec
from dpkern.privacy.mechanisms import (
    Block,
    DiagonalMap,
    Importance,
    Mechanism,
    MechanismState,
    Plan,
    ReleaseMap,
    Site,
    WhitenedCrop,
)
from dpkern.privacy.mechanisms.certify import gaussian_spec, laplace_spec
from dpkern.privacy.mechanisms.notes import notes
from dpkern.privacy.mechanisms.plan import assign_positions

CONV = Site(
    kind="conv",
    shape=(20, 10, 2, 2),
    input=(7, 7),
    output=(6, 6),
    stride=(1, 1),
    padding=(0, 0),
    dilation=(1, 1),
)
SHAPES = ((20, 10, 2, 2), (20,), (9, 7))
"""A kernel, its bias, and a dense weight."""


@dataclass(frozen=True, kw_only=True)
class Made(Mechanism):
    """Gaussian (or Laplace) noise with a release for each parameter."""

    name: ClassVar[str] = "made"

    noise_multiplier: float = 1.0
    max_grad_norm: float = 1.0
    releases: tuple[ReleaseMap | None, ...] = (None, None, None)
    stretches: tuple[float, ...] = (1.0, 1.0, 1.0)
    clipping: str = "flat"
    arithmetic: str = "float"
    mode: str = "corrected"
    distribution: str = "gaussian"
    noise_point: str = "per_batch"
    batch_size: int | None = None
    importance: Importance | None = None
    unsampled_event: EventSpec | None = None
    silent: tuple[int, ...] = ()
    claims: float | None = None

    @property
    def certified_for(self) -> str:
        return "released bits" if self.arithmetic == "exact" else "real-number sums"

    @property
    def unsampled(self) -> EventSpec:
        return events.no_op() if self.unsampled_event is None else self.unsampled_event

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        return events.gaussian(self.noise_multiplier)

    def claim(self, **_: Any) -> float | None:
        return self.claims

    def plan(self, shapes: Sequence[Sequence[int]], memory: MechanismState | None = None) -> Plan:
        sigma = self.noise_multiplier * (self.batch_size or 1) ** 0.5
        blocks = assign_positions(
            Block(
                shape=tuple(shape),
                clip_group=index if self.clipping == "per_layer" else 0,
                bound=self.max_grad_norm,
                noise_scale=0.0 if index in self.silent else sigma * self.max_grad_norm,
                release=self.releases[index],
                sensitivity_factor=self.stretches[index],
            )
            for index, shape in enumerate(shapes)
        )
        law = laplace_spec if self.distribution == "laplace" else gaussian_spec
        spec = law(blocks, self.arithmetic)
        if self.noise_point == "per_sample" and self.batch_size is None:
            spec = events.non_private()
        return Plan(
            mechanism=self.name,
            mode=self.mode,
            blocks=blocks,
            clipping=self.clipping,
            arithmetic=self.arithmetic,
            distribution=self.distribution if self.noise_multiplier else None,
            neighbouring="add_remove",
            certified_for=self.certified_for,
            spec=spec,
            p=1 if self.distribution == "laplace" else 2,
            noise_point=self.noise_point,
            samples=self.batch_size,
            unsampled=self.unsampled,
            notes=notes("G2") if self.mode == "published" else (),
            importance=self.importance,
        )


def crop(rank: int = 4, seed: int = 0, **more: Any) -> WhitenedCrop:
    """A release of the kernel's taps by a full-rank map and its inverse (or pseudo-inverse)."""
    signal = np.random.default_rng(seed).standard_normal((rank, 4))
    return WhitenedCrop(site=CONV, signal=signal, post=np.linalg.pinv(signal), **more)


def make(mechanism: Mechanism, *, seed: int | None = 7, **more: Any) -> DPStep:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator) for shape in SHAPES]
    given = {"expected_batch_size": 8.0, "sample_rate": 0.01, "unsafe_seed": seed} | more
    return DPStep(mechanism, params, **given)


def gradients(batch: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((batch, *shape), generator=generator) for shape in SHAPES]


def without_noise(change: Callable[..., Made] = Made, **fields: Any) -> Made:
    """The mechanism with noise off: what is left is clipping and the maps."""
    return change(noise_multiplier=0.0, **fields)


@dataclass(frozen=True, kw_only=True)
class Learner(Made):
    """Scales every coordinate by a running mean of noisy gradients; keeps a secret beside it."""

    name: ClassVar[str] = "learner"
    doubled: bool = False
    drifting: bool = False

    def memory(self, params: Sequence[torch.Tensor]) -> MechanismState:
        ones = [torch.ones_like(p, dtype=torch.float64) for p in params]
        own = [torch.zeros_like(p, dtype=torch.float64) for p in params]
        seen = [torch.zeros_like(p, dtype=torch.float64) for p in params]
        kept = {"scale": ones, "secret": own, "seen": seen}
        return MechanismState(kept, unsaved=frozenset({"secret"}))

    def plan(self, shapes: Sequence[Sequence[int]], memory: MechanismState | None = None) -> Plan:
        if memory is None:
            return super().plan(shapes)
        norm = "release" if self.importance is None else "gradient"
        scales = tuple(DiagonalMap(scale=scale.clone(), norm=norm) for scale in memory["scale"])
        plan = replace(self, releases=scales)._made(shapes)
        if self.drifting and memory["seen"][0].any():
            plan = replace(plan, spec={**plan.spec, "noise_multiplier": 5.0})
        return plan

    def _made(self, shapes: Sequence[Sequence[int]]) -> Plan:
        return Made.plan(self, shapes)

    def weigh(self, memory: MechanismState, importance: Sequence[torch.Tensor]) -> None:
        for seen, scale, w in zip(memory["seen"], memory["scale"], importance, strict=True):
            seen.copy_(w)
            scale.copy_(2.0 + w.abs())

    def learn(self, memory: MechanismState, gradients: Sequence[torch.Tensor]) -> None:
        for scale, secret, g in zip(memory["scale"], memory["secret"], gradients, strict=True):
            scale.mul_(0.5).add_(0.5 * (1 + g.abs()))
            secret.add_(1)
            if self.doubled:
                g.mul_(2)
        if self.drifting:
            memory["seen"][0].fill_(1)

    def realised(self, memory: MechanismState | None) -> dict[str, float]:
        return {} if memory is None else {"largest": max(float(s.max()) for s in memory["scale"])}


def weighing(source: str, bound: float = 1e6, sd: float = 2.0**-4) -> Learner:
    return Learner(importance=Importance(bound=bound, noise_scale=sd, source=source))
