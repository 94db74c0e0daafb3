"""Release the moments of integer features once, and train on them as often as one likes.

``release`` adds the sums of ``mechanisms.ObjectiveRelease`` up in integers and noises them once.
``ReleasedMoments.solve`` fits linear scores ``W phi`` for every class to what was released:

    ridge     min sum ||W phi - (e_y - 1/K)||^2 / 2 + (lambda / 2) ||W||^2
    logistic  min sum of the logistic loss to second order at W = 0, + (lambda / (2 K)) ||W||^2

Both decide alike; the scores of the second are logits. The matrix of second moments is known up to
symmetric noise, whose eigenvalues end at ``edge = 2 sd sqrt(D)`` with the public standard deviation
sd off the diagonal. Eigenvalues are lowered by the edge, down to 0 at least, and lambda is a
multiple of it: no number is taken from the data besides the release.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..base.laws import SCALE_CELLS, SCALE_UNITS
from ..base.rng import Key, Purpose
from ..base.validate import choice, non_negative, positive, tensor
from ..ops import noise
from ..privacy.mechanisms.objective_release import ACROSS, DIAGONAL, ObjectiveRelease

SURROGATES = ("ridge", "logistic")

_AT_ONCE = 1 << 22
_EXACT = 1 << 53


@dataclass(frozen=True, kw_only=True)
class ReleasedMoments:
    """The released numbers, in features of length 1.

    Attributes:
        second: ``sum phi phi^T`` with noise, float64 ``[D, D]``, symmetric.
        first: ``sum (e_y - 1/K) phi^T`` with noise, less its mean over classes, float64 ``[K, D]``.
        edge: largest eigenvalue of the second moments' noise, nearly; 0 without noise.
    """

    second: Tensor
    first: Tensor
    edge: float

    def solve(self, *, surrogate: str = "ridge", ridge: float = 0.4) -> Tensor:
        """Return the weights W, float64 ``[K, D]``; post-processing.

        Args:
            surrogate: ``ridge`` or ``logistic``.
            ridge: lambda over the edge; without noise over 1.

        Raises:
            InvalidInput: an unknown surrogate, or no positive ridge.
        """
        choice(SURROGATES, surrogate=surrogate)
        penalty = positive(ridge=ridge) * (self.edge or 1.0)
        values, vectors = torch.linalg.eigh(self.second)
        kept = (values - self.edge).clamp_min_(0.0) + penalty
        weights: Tensor = ((self.first @ vectors) / kept) @ vectors.T
        return weights * len(weights) if surrogate == "logistic" else weights

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        return {"second": self.second, "first": self.first, "edge": self.edge}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ReleasedMoments:
        """Read what ``state_dict`` returned, such as a checkpoint's entry ``released``.

        Raises:
            InvalidInput: something else.
        """
        if set(state) != {"second", "first", "edge"}:
            raise InvalidInput(
                "state",
                expected="second, first and edge",
                got=", ".join(sorted(state)),
                remedy="Pass what ReleasedMoments.state_dict() returned.",
            )
        size = tensor(second=state["second"], shape=(None, None)).shape[0]
        tensor(first=state["first"], shape=(None, size))
        return cls(
            second=state["second"], first=state["first"], edge=non_negative(edge=state["edge"])
        )


def contributions(mechanism: ObjectiveRelease, features: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of what records contribute, in lattice units: int64 ``[coordinates]``.

    Squares, products of two features in row-major order, then features by class. Every sum is
    exact: products are added up in float64 below 2^53.

    Args:
        mechanism: gives sizes and bounds.
        features: int64 ``[n, D]``, each of norm at most ``mechanism.radius``.
        labels: int64 ``[n]``.

    Raises:
        InvalidInput: other shapes or labels, longer features, or more records than sums can hold.
    """
    d, k = mechanism.length, mechanism.classes
    tensor(features=features, shape=(None, d), dtypes=(torch.int64,))
    tensor(labels=labels, shape=(len(features),), dtypes=(torch.int64,))
    squared = mechanism.radius**2
    # Each entry is bounded before it is squared: no product leaves 64 bits.
    # The least int64 is its own absolute value.
    radius = mechanism.radius
    short = bool(((features >= -radius) & (features <= radius)).all())
    if not short or bool((features.square().sum(1) > squared).any()):
        raise InvalidInput(
            "features",
            expected=f"integer vectors of norm at most {mechanism.radius}",
            got="a longer one",
            remedy="Make them with FeatureMap(...)(x, radius=mechanism.radius).",
        )
    if bool(((labels < 0) | (labels >= k)).any()):
        raise InvalidInput(
            "labels",
            expected=f"classes 0 .. {k - 1}",
            got="another label",
            remedy="Pass the public number of classes.",
        )
    if len(features) * mechanism.reach >= _EXACT:
        raise InvalidInput(
            "features",
            expected=f"fewer than {_EXACT // mechanism.reach} records",
            got=str(len(features)),
            remedy="Lower epsilon, or give fewer records: sums of more are not exact.",
        )
    second = torch.zeros(d, d, dtype=torch.float64)
    for part in torch.split(features, max(1, _AT_ONCE // d)):
        rows = part.double()
        second += rows.T @ rows
    by_class = torch.zeros(k, d, dtype=torch.int64).index_add_(0, labels, features)
    on, off = mechanism.targets
    first = (on - off) * by_class + off * by_class.sum(0)
    across = second[tuple(torch.triu_indices(d, d, 1))].to(torch.int64)
    squares = second.diagonal().to(torch.int64)
    return torch.cat([DIAGONAL * squares, ACROSS * across, first.flatten()])


def release(
    mechanism: ObjectiveRelease, features: Tensor, labels: Tensor, key: Key
) -> ReleasedMoments:
    """Release the moments of these records, once.

    Args:
        mechanism: its configuration.
        features: int64 ``[n, D]``, each of norm at most ``mechanism.radius``.
        labels: int64 ``[n]``.
        key: used for nothing else.

    Raises:
        InvalidInput: as ``contributions``.
    """
    return read(mechanism, noised(mechanism, contributions(mechanism, features, labels), key))


def noised(mechanism: ObjectiveRelease, sums: Tensor, key: Key) -> Tensor:
    """Return sums with Gaussian noise of ``2^20`` lattice units, in these units, float64."""
    if not mechanism.noisy:
        return sums.double()
    cells = noise.add_noise(sums.clone(), stream=key.stream(Purpose.NOISE, 0))
    return cells.double() * (SCALE_UNITS // SCALE_CELLS)


def read(mechanism: ObjectiveRelease, released: Tensor) -> ReleasedMoments:
    """Return what is released as moments of features of length 1; post-processing."""
    d, k = mechanism.length, mechanism.classes
    split = [d, d * (d - 1) // 2, d * k]
    squares, across, first = torch.split(released, split)
    second = torch.zeros(d, d, dtype=torch.float64)
    second[tuple(torch.triu_indices(d, d, 1))] = across / ACROSS
    second = second + second.T + torch.diag(squares / DIAGONAL)
    on, off = mechanism.targets
    means = first.view(k, d) / (on - off)
    sd = SCALE_UNITS / ACROSS if mechanism.noisy else 0.0
    scale = mechanism.radius
    return ReleasedMoments(
        second=second / scale**2,
        first=(means - means.mean(0)) / scale,
        edge=2 * sd * math.sqrt(d) / scale**2,
    )
