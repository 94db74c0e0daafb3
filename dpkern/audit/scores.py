"""Score released vectors to tell "present" from "without": linear, quadratic, not finite.

Scores that are learnt from runs:

    Linear     w . x,  w = S^-1 (m1 - m0), S the pooled covariance       (Fisher's discriminant)
    Quadratic  sum_i ((x_i - m0_i)^2 / v0_i - (x_i - m1_i)^2 / v1_i)

The second, in the coordinates in which both covariances are diagonal, also sees noise whose scale
or direction depends on the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .covariance import Moments, Vector, looked_at, principal

RIDGE = 1e-9
"""Share of the mean variance that is added to S.

A direction without noise then counts for much, the rounding of a direction without signal for
nothing.
"""


@dataclass(frozen=True, eq=False)
class LinearScore:
    """The score ``weights . x``."""

    weights: Vector
    name: str = "linear"

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return looked_at(values) @ torch.from_numpy(self.weights)


@dataclass(frozen=True, eq=False)
class Quadratic:
    """The log-likelihood ratio of two Gaussians up to constants; ``axes`` diagonalise both."""

    axes: Vector
    means: tuple[Vector, Vector]
    variances: tuple[Vector, Vector]
    name: str = "quadratic"

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        along = looked_at(values) @ torch.from_numpy(self.axes)
        squares = [
            (along - torch.from_numpy(mean)).square() / torch.from_numpy(variance)
            for mean, variance in zip(self.means, self.variances, strict=True)
        ]
        return (squares[0] - squares[1]).sum(dim=1)


@dataclass(frozen=True)
class NotFinite:
    """The number of coordinates that are NaN or infinite."""

    name: str = "not finite"

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return (~values.detach().cpu().isfinite()).sum(dim=1).double()


def learnt(without: Moments, present: Moments) -> list[LinearScore | Quadratic]:
    """Return the scores that separate two samples best."""
    pooled = (without.scatter + present.scatter) / max(1, without.count + present.count - 2)
    mean_variance = float(np.trace(pooled)) / len(pooled)
    floor = RIDGE * mean_variance if mean_variance > 0 else 1.0
    values, axes = principal(pooled)
    values = np.maximum(values, 0.0) + floor
    gap = axes.T @ (present.mean - without.mean)
    # Where S is the identity, the axes of one covariance are those of the other.
    white = axes / np.sqrt(values)
    both = white @ principal(white.T @ present.covariance @ white)[1]
    variances = [np.maximum(_along(part, both), 0.0) + RIDGE for part in (without, present)]
    return [
        LinearScore(axes @ (gap / values)),
        Quadratic(
            both,
            (both.T @ without.mean, both.T @ present.mean),
            (variances[0], variances[1]),
        ),
    ]


def _along(found: Moments, axes: Vector) -> Vector:
    """Return the variances along the axes."""
    along: Vector = (axes * (found.covariance @ axes)).sum(axis=0)
    return along
