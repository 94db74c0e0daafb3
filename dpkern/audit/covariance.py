"""Layer 1: estimate the covariance of the noise, and the directions with the least of it.

Released vectors are divided by the certified standard deviation of each coordinate. For noise that
is at least the certified one, every eigenvalue of the true covariance is then at least 1, and of n
runs of d Gaussian coordinates the sample covariance has, with probability 1 - alpha,

    lambda_min >= (1 - sqrt(d / m) - sqrt(2 log(1 / alpha) / m))^2,     m = n - 1 for the mean

A smaller eigenvalue refutes the certificate; one that is nothing but rounding is a direction
without noise.

Source: Davidson and Szarek 2001, theorem II.13 (smallest singular value of a Gaussian matrix).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .findings import Check

WIDEST = 512
"""Maximum of coordinates whose covariance is estimated; wider releases are subsampled evenly."""

LARGEST = 1e100
"""Larger numbers count as this one: products of their squares would overflow."""

NULL = 1e-9
"""An eigenvalue below this share of the largest is rounding: there is no noise."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Count, mean ``[d]`` and scatter ``sum (x - mean)(x - mean)^T [d, d]`` of some runs."""

    count: int
    mean: Vector
    scatter: Vector

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both samples together (Chan, Golub and LeVeque 1983)."""
        count = self.count + other.count
        gap = other.mean - self.mean
        mean = self.mean + gap * (other.count / count)
        between = np.outer(gap, gap) * (self.count * other.count / count)
        return Moments(count, mean, self.scatter + other.scatter + between)

    @property
    def covariance(self) -> Vector:
        """The unbiased covariance ``[d, d]``."""
        return self.scatter / max(1, self.count - 1)


def moments(values: torch.Tensor) -> Moments:
    """Return the moments of the examined coordinates of released vectors ``[runs, d]``."""
    rows = looked_at(values)
    mean = rows.mean(dim=0)
    centred = rows - mean
    # Torch multiplies: numpy's products have their own threads, without a limit per process.
    return Moments(len(rows), mean.numpy(), (centred.T @ centred).numpy())


def principal(matrix: Vector) -> tuple[Vector, Vector]:
    """Return eigenvalues, ascending, and eigenvectors as columns of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(torch.from_numpy(matrix))
    return values.numpy(), vectors.numpy()


def looked_at(values: torch.Tensor) -> torch.Tensor:
    """Return at most ``WIDEST`` coordinates in float64, with 0 for NaN and infinities."""
    chosen = values[:, selection(values.shape[1])]
    finite = chosen.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)
    return finite.clamp(-LARGEST, LARGEST)


def selection(width: int) -> slice:
    """Return the slice of the examined coordinates of a release of ``width``."""
    return slice(None, None, -(-width // WIDEST))


@dataclass(frozen=True)
class CovarianceSpectrum:
    """Eigenvalues of the noise's covariance, and the verdict on them.

    Attributes:
        values: eigenvalues, ascending; in units of the certified variances where there are any.
        weakest: unit vector of the released coordinates, or None where not all were examined.
        check: the verdict.
    """

    values: tuple[float, ...]
    weakest: torch.Tensor | None
    check: Check


def spectrum(found: Moments, sd: Vector | None, width: int, alpha: float) -> CovarianceSpectrum:
    """Compare the eigenvalues of the noise's covariance with the certified variances.

    Args:
        found: moments of the examined coordinates, from runs of one input.
        sd: certified sd of these coordinates, or None.
        width: length of the whole released vector.
        alpha: chance that sound Gaussian noise fails.
    """
    scale = np.ones(len(found.mean)) if sd is None else sd
    values, vectors = principal(found.covariance / np.outer(scale, scale))
    # Back from whitened coordinates: the canary that moves this direction by one unit of its noise.
    direction = vectors[:, 0] * scale
    weakest = torch.from_numpy(direction / np.linalg.norm(direction))
    values = np.maximum(values, 0.0)
    return CovarianceSpectrum(
        tuple(values.tolist()),
        weakest if len(found.mean) == width else None,
        _judged(values, found.count, width, sd is not None, alpha),
    )


def _judged(values: Vector, runs: int, width: int, certified: bool, alpha: float) -> Check:
    least, d = float(values[0]), len(values)
    nulls = int((values <= NULL * values[-1]).sum())
    free = max(1, runs - 1)  # the mean takes one
    spread = math.sqrt(d / free) + math.sqrt(-2 * math.log(alpha) / free)
    floor = max(0.0, 1 - spread) ** 2
    numbers = {"least": least, "largest": float(values[-1]), "without_noise": nulls, "runs": runs}
    seen = f"{d} of {width} coordinates, " if d < width else ""
    if runs <= d:
        text = f"{runs} runs cannot show the covariance of {d} coordinates"
        return _check(None, text, numbers)
    if not certified:
        text = f"{seen}least eigenvalue {least:.4g}, {nulls} directions without noise; no sd stated"
        return _check(None, text, numbers)
    text = (
        f"{seen}least eigenvalue {least:.4g} of the certified variance, at least {floor:.4g} asked"
    )
    text += f"; {nulls} directions without noise" if nulls else ""
    return _check(least >= floor and not nulls, text, numbers | {"floor": floor})


def _check(passed: bool | None, text: str, numbers: dict[str, float | int]) -> Check:
    return Check(
        layer="covariance",
        name="noise in every direction",
        passed=passed,
        text=text,
        numbers=numbers,
    )


def together(parts: Sequence[Moments]) -> Moments:
    """Return the moments of all the runs of the parts."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
