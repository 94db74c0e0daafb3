"""With no noise and no clipping private training is ordinary training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpkern

BATCH = 8
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


class Net(nn.Module):
    """Convolution, normalisation, attention and a linear layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.twice = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        h = self.twice(torch.tanh(self.twice(h)))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(h.mean(1))


def batches(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count * BATCH, 1, 6, 6, generator=generator).double()
    return TensorDataset(x, torch.randint(0, 3, (count * BATCH,), generator=generator))


@pytest.mark.parametrize("steps", [1, 3, 20])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_parameters_are_those_of_torch(kind: str, steps: int) -> None:
    torch.manual_seed(0)
    model = Net().double()
    plain = copy.deepcopy(model)
    optimizer, ordinary = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](plain.parameters())
    private, optimizer, loader = dpkern.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(batches(steps), batch_size=BATCH),
        noise_multiplier=0.0,
        max_grad_norm=math.inf,
        sampling="shuffled",
    )
    taken = 0
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
        ordinary.zero_grad()
        x, y = x.as_subclass(Tensor), y.as_subclass(Tensor)  # the other model is not the engine's
        F.cross_entropy(plain(x), y).backward()
        ordinary.step()
        taken += 1
    assert taken == steps
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        # Adam divides by gradients that are zero but for rounding (a key's bias has none).
        if kind.startswith("adam") and name.endswith("in_proj_bias"):
            keys = slice(4, 8)
            mine, theirs = mine.detach().clone(), theirs.detach().clone()
            mine[keys] = theirs[keys] = 0
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-9, atol=1e-9)
