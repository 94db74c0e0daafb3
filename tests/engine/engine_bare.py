"""The private optimizer on a small network without engine and loader, and its plain twin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpkern import DPStep
from dpkern.engine.capture import Capture
from dpkern.engine.optimizer import OptimizerAdapter
from dpkern.privacy.mechanisms import DPSGD

BATCH = 6
NOISY = DPSGD(noise_multiplier=1.0, max_grad_norm=0.5, arithmetic="float")
PLAIN = DPSGD(noise_multiplier=0.0, max_grad_norm=math.inf, arithmetic="float")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=torch.tensor(0.1), momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.99)),
    "adam decoupled": lambda p: torch.optim.Adam(
        p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
FUSED = ("sgd", "momentum", "nesterov", "adam", "adam fused", "adamw", "adam decoupled")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(seed: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (size,), generator=generator)
    return torch.randn(size, 4, generator=generator), labels


class Run:
    """A private network without a loader: each forward pass brings new samples."""

    def __init__(
        self, kind: str | Callable[..., Any] = "sgd", mechanism: DPSGD = PLAIN, **more: Any
    ) -> None:
        self.model: nn.Module = more.pop("model", None) or network()
        made = OPTIMIZERS[kind] if isinstance(kind, str) else kind
        self.optimizer = made(list(self.model.parameters()))
        self.capture = Capture(self.model)
        self.step = DPStep(
            mechanism,
            self.capture.parameters,
            gradients="batched",
            **{"expected_batch_size": BATCH, "sample_rate": 0.1, "unsafe_seed": 3} | more,
        )
        self.adapter = OptimizerAdapter(self.optimizer, self.capture, self.step)
        self.capture.attach()
        self.adapter.attach()

    def backward(self, seed: int, size: int = BATCH) -> None:
        x, y = batch(seed, size)
        nn.functional.cross_entropy(self.model(x), y).backward()

    def train(self, *seeds: int) -> None:
        for seed in seeds:
            self.optimizer.zero_grad()
            self.backward(seed)
            self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


class Ordinary:
    """The same without privacy."""

    def __init__(self, kind: str) -> None:
        self.model = network()
        self.optimizer = OPTIMIZERS[kind](list(self.model.parameters()))

    def train(self, *seeds: int) -> None:
        for seed in seeds:
            x, y = batch(seed)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
