"""A small private training run for the tests of the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpkern import PrivacyEngine

ROWS, BATCH, DELTA = 48, 8, 1e-5


def data(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


class Run:
    """Module, optimizer, loader and engine, before and after ``make_private``."""

    def __init__(self, *, kind: str = "SGD", private: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = options.pop("module", None) or nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)
        )
        self.optimizer: Any = getattr(torch.optim, kind)(self.module.parameters(), lr=0.1)
        self.loader: Any = options.pop("data_loader", None) or DataLoader(
            data(), batch_size=BATCH, shuffle=True
        )
        self.engine = PrivacyEngine(accountant=options.pop("accountant", "prv"))
        if private:
            self.make(**options)

    def make(self, **options: Any) -> Any:
        given = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "unsafe_seed": 3} | options
        made = self.engine.make_private(
            module=self.module, optimizer=self.optimizer, data_loader=self.loader, **given
        )
        self.loader = made[-1]
        return made

    def train(self, epochs: int = 1, most: int = 10**9) -> int:
        """Typical loop; returns the number of batches."""
        criterion = nn.CrossEntropyLoss()
        taken = 0
        for _ in range(epochs):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                criterion(self.module(x), y).backward()
                self.optimizer.step()
                taken += 1
                if taken == most:
                    return taken
        return taken

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.module.parameters()])
