"""Small records with labels that a network can learn, for tests of AdLM."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkern.objective.adlm_data import Labelled

CLASSES = 3


def images(count: int, seed: int, side: int = 8) -> tuple[Tensor, Tensor]:
    """A bright bar per class in noise, entries in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % CLASSES
    x = 0.3 * torch.rand(count, side, side, generator=generator)
    for row, label in zip(x, y.tolist(), strict=True):
        row[2 * label : 2 * label + 2] += 0.6
    return x, y


def labelled(count: int = 60) -> Labelled:
    x, y = images(count, 1)
    x_test, y_test = images(30, 2)
    return Labelled(x=x, y=y, x_test=x_test, y_test=y_test, classes=CLASSES, source="bars")
