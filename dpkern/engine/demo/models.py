"""Build and evaluate the demonstration models and those of the papers, by name."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...base.errors import InvalidInput
from ...base.validate import choice
from . import networks, sources
from .sources import SOURCES

MODELS = ("linear", "mlp", "lenet5", "resnet", "transformer")
ALL_MODELS = (*MODELS, *SOURCES)
MLP_WIDTH = 64
DIGITS_ROWS = (64,)


def build(
    name: str,
    *,
    row_shape: tuple[int, ...],
    classes: int,
    init_seed: int = 0,
    linear: str = "dense",
    norm: str = "group",
    width: float = 1.0,
) -> nn.Module:
    """Return a freshly initialised model from ``[B, *row_shape]`` to logits ``[B, classes]``.

    The initial parameters come from a public seed and leave the caller's generator as it was.
    No model mixes the samples of a batch (no batch normalisation).

    - ``linear``: multinomial logistic regression.
    - ``mlp``: one hidden layer of 64 tanh units.
    - ``lenet5``, ``resnet``, ``transformer``: see ``networks``.
    - ``gredp-...``, ``directional-...``: see ``sources``; only these know ``linear``, ``norm`` and
      ``width``.

    Raises:
        InvalidInput: an unknown name, or a network for rows that it cannot take.
    """
    choice(ALL_MODELS, model=name)
    if name in MODELS and (linear, norm, width) != ("dense", "group", 1.0):
        raise InvalidInput(
            "linear, norm, width",
            expected=f"dense, group and 1 with the model {name}",
            got=f"{linear}, {norm}, {width}",
            remedy=f"Choose one of {', '.join(SOURCES)}, or leave them out.",
        )
    features = math.prod(row_shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(init_seed)
        if name in SOURCES:
            return sources.build(
                name, row_shape=row_shape, classes=classes, linear=linear, norm=norm, width=width
            )
        if name == "lenet5":
            return networks.lenet5(row_shape, classes)
        if name == "resnet":
            return networks.resnet(row_shape, classes)
        if name == "transformer":
            return networks.transformer(row_shape, classes)
        if name == "mlp":
            return nn.Sequential(
                nn.Flatten(),
                nn.Linear(features, MLP_WIDTH),
                nn.Tanh(),
                nn.Linear(MLP_WIDTH, classes),
            )
        return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def example_rows(name: str) -> tuple[int, ...]:
    """Return the shape of the model's usual rows: its paper's data set, else the digits."""
    return SOURCES[name].rows if name in SOURCES else DIGITS_ROWS


@torch.no_grad()
def scores(model: nn.Module, x: Tensor, *, chunk: int = 1024) -> Tensor:
    """Return the logits of all rows, ``[len(x), classes]``."""
    return torch.cat([model(x[start : start + chunk]) for start in range(0, len(x), chunk)])


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor, *, chunk: int = 1024) -> tuple[float, float]:
    """Return mean cross entropy and accuracy over all rows."""
    loss, correct = 0.0, 0
    for start in range(0, len(x), chunk):
        labels = y[start : start + chunk]
        logits = model(x[start : start + chunk])
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        correct += int((logits.argmax(1) == labels).sum())
    return loss / len(x), correct / len(x)
