"""Records of a few users, and one step of a trainer seen from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpkern.objective import Method, NonPrivate, SpofTraining, VisitSchedule
from dpkern.objective.autoencoder import Gradients, Weights
from dpkern.objective.descent import KernelSteps
from dpkern.objective.rules import Visit

N, CODES = 14, 7


@dataclass(frozen=True)
class Records:
    """float32 ``[m, N, n]`` and ``[m, K, n]``."""

    train: Tensor
    test: Tensor


def records(users: int = 2, each: int = 12, features: int = N, seed: int = 0) -> Records:
    generator = torch.Generator().manual_seed(seed)
    made = torch.rand(users, each + 5, features, generator=generator)
    return Records(made[:, :each].contiguous(), made[:, each:].contiguous())


def training(
    method: Method | None = None, data: Records | None = None, **options: Any
) -> SpofTraining:
    schedule = options.pop("schedule", None) or VisitSchedule(epochs=2)
    given = {"seeds": (3, 4, 5)} | options
    return SpofTraining(data or records(), method or NonPrivate(), schedule, **given)


def direction(run: SpofTraining, visit: Visit | None = None) -> tuple[Tensor, Gradients | Tensor]:
    """Return the direction of the next step's descent, by operations on tensors."""
    rule = run._make_rule() if isinstance(run._rule, KernelSteps) else run._rule
    return rule.direction(run.weights, visit or run._visit())


def flat(found: Gradients | Tensor) -> Tensor:
    return found.flat() if isinstance(found, Gradients) else found


def in_float64(weights: Weights) -> list[Tensor]:
    """Encoder and decoder of every pair, for autograd."""
    return [w.double().requires_grad_() for w in weights.pairs()]
