"""Demonstrate the utility subspace: some parameters take noise better than others.

A network with two inputs, two hidden units and one output learns x1 AND x2 of rounded inputs:

    h1 = s(t1 x1 + t3 x2 + b1)    h2 = s(t2 x1 + t4 x2 + b2)    y = s(t5 h1 + t6 h2 + b3)

and its cost is drawn over (0, reach)^2 for two pairs of parameters. It falls along a parameter with
a negative derivative and rises most along the largest positive one.

The print has a linear output, for which cross-entropy has no meaning, and says inputs are rounded
"up" where its example f(0.3, 0.7) = 0 needs rounding to the nearest.

Source: directional noise for DP-SGD, figure 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from ...base.validate import integer, positive

NAMES = ("t1", "t2", "t3", "t4", "t5", "t6", "b1", "b2", "b3")
PAIRS = (("t1", "b3"), ("t6", "b3"))
_LEARNING_RATE = 0.1
_BATCH = 250


@dataclass(frozen=True)
class Surface:
    """The cost over offsets of two parameters.

    Attributes:
        names: the two parameters.
        offsets: float64 ``[points]``, the grid of each axis.
        cost: float64 ``[points, points]``, first parameter along the first axis.
        slopes: smallest and largest derivative over the grid, by parameter.
    """

    names: tuple[str, str]
    offsets: torch.Tensor
    cost: torch.Tensor
    slopes: tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Demonstration:
    """The trained network and its two surfaces.

    Attributes:
        parameters: value by name.
        accuracy: share of the samples on the right side.
        cost: mean cross-entropy of the trained network.
        surfaces: one per pair of ``PAIRS``.
    """

    parameters: dict[str, float]
    accuracy: float
    cost: float
    surfaces: tuple[Surface, ...]


def demonstrate(
    seed: int, *, samples: int = 1000, epochs: int = 150, reach: float = 0.3, points: int = 16
) -> Demonstration:
    """Train the network and map its cost around the solution.

    Args:
        seed: seed of the samples, the start and the order of batches.
        samples: number of points of the unit square.
        epochs: passes of Adam over batches of 250.
        reach: offsets are in (0, reach).
        points: grid points of each axis.

    Raises:
        InvalidInput: a number out of its range.
    """
    integer(1, samples=samples)
    integer(0, epochs=epochs)
    integer(2, points=points)
    generator = torch.Generator().manual_seed(integer(seed=seed))
    x = torch.rand(samples, 2, generator=generator, dtype=torch.float64)
    target = x.round().prod(dim=1)
    values = torch.randn(len(NAMES), 1, generator=generator, dtype=torch.float64)
    values.requires_grad_()
    rule = torch.optim.Adam([values], lr=_LEARNING_RATE)
    for _ in range(epochs):
        order = torch.randperm(samples, generator=generator)
        for rows in torch.split(order, _BATCH):
            rule.zero_grad()
            _cost(values, x[rows], target[rows]).sum().backward()  # type: ignore[no-untyped-call]
            rule.step()
    trained = values.detach()
    right = (_logit(trained, x)[0] > 0) == (target > 0.5)
    steps = torch.arange(1, points + 1, dtype=torch.float64) / (points + 1)
    offsets = steps * positive(reach=reach)
    return Demonstration(
        parameters=dict(zip(NAMES, trained[:, 0].tolist(), strict=True)),
        accuracy=right.double().mean().item(),
        cost=_cost(trained, x, target).item(),
        surfaces=tuple(_surface(trained, pair, offsets, x, target) for pair in PAIRS),
    )


def _logit(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return logits ``[networks, samples]`` for parameters ``[9, networks]``."""
    t1, t2, t3, t4, t5, t6, b1, b2, b3 = values[:, :, None]
    h1 = torch.sigmoid(t1 * x[:, 0] + t3 * x[:, 1] + b1)
    h2 = torch.sigmoid(t2 * x[:, 0] + t4 * x[:, 1] + b2)
    logit: torch.Tensor = t5 * h1 + t6 * h2 + b3
    return logit


def _cost(values: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of each network."""
    logit = _logit(values, x)
    each: torch.Tensor = binary_cross_entropy_with_logits(
        logit, target.expand_as(logit), reduction="none"
    )
    return each.mean(dim=1)


def _surface(
    trained: torch.Tensor,
    names: tuple[str, str],
    offsets: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
) -> Surface:
    points = len(offsets)
    moved = trained.repeat(1, points * points)
    rows = [NAMES.index(name) for name in names]
    moved[rows[0]] += offsets.repeat_interleave(points)
    moved[rows[1]] += offsets.repeat(points)
    moved.requires_grad_()
    cost = _cost(moved, x, target)
    (gradient,) = torch.autograd.grad(cost.sum(), moved)
    first, second = ((gradient[row].min().item(), gradient[row].max().item()) for row in rows)
    return Surface(names, offsets, cost.detach().reshape(points, points), (first, second))
