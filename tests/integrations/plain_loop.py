"""The ordinary loop with ``PrivacyEngine`` that a framework's run is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpkern

SEED = 3
RECORDS = 24
"""Number of records of every data set here; with 4 in a batch an epoch has 6 steps."""

RATE = 0.2


def mlp() -> nn.Module:
    """Return the same small network every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def rows() -> list[tuple[Tensor, Tensor]]:
    """Return records of numbers with a label."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(RECORDS, 5, generator=generator)
    y = torch.randint(3, (RECORDS,), generator=generator)
    return list(zip(x, y, strict=True))


def schedule(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that halves the rate at every step, so that each step of it shows."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with a state that grows with the steps."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)


def train(
    model: nn.Module,
    data: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    batch_size: int,
    physical: int | None,
    epochs: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    seed: int | None = SEED,
    collate_fn: Any = None,
) -> dpkern.PrivacyEngine:
    """Train by the loop that the documentation shows, with a schedule of every release."""
    optimizer = optimizer or sgd(model)
    engine = dpkern.PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=batch_size, shuffle=True, collate_fn=collate_fn),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        max_physical_batch_size=physical,
        unsafe_seed=seed,
    )
    scheduler = schedule(optimizer)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            if loader.final:
                scheduler.step()
    return engine


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have the same bits."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def certified(engine: dpkern.PrivacyEngine) -> Any:
    """Return what a report certifies, without what differs from key to key."""
    report = engine.report(1e-3)
    return {k: v for k, v in report.items() if k not in ("noise", "warnings")}
