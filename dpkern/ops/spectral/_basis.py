"""Coordinates of a released crop, in which the clip norm is known and the noise is white.

A mechanism adds noise to a filtered spectrum, transforms back and releases the entries at the taps
of the kernel, lags u in {0, t, .., t (d - 1)} per axis. For one channel pair (pairs are
independent) let R be the correlation map on the grid and A [taps, P Q] the matrix of filter and
crop, A(u, n) = h(u - n). Noise of sd a on real and b on imaginary parts is, in front of A, a map
with covariance 1/2 [(a^2 + b^2) I + (a^2 - b^2) J], J the reversal n -> -n. Behind A:

    Sigma(u, v) = 1/2 [(a^2 + b^2) c(u - v) + (a^2 - b^2) c(u + v)],   c = IDFT(gains^2)

With A = U diag(s) V^T, where directions of s <= rank max(s) are dropped (post-processing):

    Wt = diag(1/s) U^T,  Wt A = V^T          ||Wt F|| <= ||R|| for F = A R
    N = Wt Sigma Wt^T = Q diag(lam) Q^T      = V^T 1/2 [(a^2 + b^2) I + (a^2 - b^2) J] V
    y = diag(lam^-1/2) Q^T Wt F              noise of variance 1
    F = U diag(s) Q diag(lam^1/2) y

and ||y|| <= min(lam)^-1/2 ||R||: the certified multiplier is sqrt(min(lam)) times the nominal one.
A A^T has eigenvalues down to 1e-10 of the largest, so noise is never drawn by a Cholesky factor of
it: a rounded sum has a part in the null directions that would get no noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...base import validate as check
from ...base.errors import InvalidInput
from ._band import Array, Band, half_weights

RANK = 2.0**-18
"""Directions of A with a smaller relative singular value are not released."""

FLOAT_RANK = 2.0**-10
"""The same for sums in float32: whitening magnifies their rounding by up to 1 / rank."""

NOISES = ("mask", "block")


@dataclass(frozen=True, eq=False)
class WhitenedBasis:
    """The release of a crop; matrices are per channel pair and read-only.

    Attributes:
        signal: ``[r, taps]``, from filtered kernel gradients F to coordinates y.
        post: ``[taps, r]``, back: ``post @ signal`` is the identity on the kept directions.
        scale: standard deviation of the noise in every coordinate, times sigma C.
        stretch: sup of ||y|| over a unit ball of R; 1 when the noise is isotropic.
        lam: ``[r]``, eigenvalues of the noise against the kept signal, ascending.
        noise: ``[taps, m]`` with ``noise @ noise.T`` the covariance of the released crop over
            (sigma C)^2; for releases in which some direction has no noise.
    """

    signal: Array
    post: Array
    scale: float
    stretch: float
    lam: Array
    noise: Array

    @property
    def multiplier(self) -> float:
        """Certified multiplier of this release per nominal one: sqrt(min(lam))."""
        return float(np.sqrt(max(0.0, self.lam[0])))


def lags(kernel: Sequence[int], dilation: Sequence[int]) -> np.ndarray[tuple[int, int]]:
    """Return ``[taps, axes]``: the entries of the correlation map in a kernel's gradient."""
    axes = [np.arange(k) * t for k, t in zip(kernel, dilation, strict=True)]
    return np.stack([grid.ravel() for grid in np.meshgrid(*axes, indexing="ij")], axis=1)


def covariance(
    band: Band, kernel: Sequence[int], dilation: Sequence[int], a: float, b: float, noise: str
) -> Array:
    """Return Sigma ``[taps, taps]`` of noise with sd ``a`` on real and ``b`` on imaginary parts.

    ``noise='mask'``: on every bin of the full spectrum, before the filter. ``'block'``: only on the
    corner ``band.block`` of the spectrum as it is stored (one-sided in two dimensions).
    """
    taps = lags(kernel, dilation)
    if noise == "mask":
        same = _table(band.correlation, taps[:, None] - taps[None])
        mirrored = _table(band.correlation, taps[:, None] + taps[None])
        sigma: Array = ((a * a + b * b) * same + (a * a - b * b) * mirrored) / 2
        return sigma
    real, imaginary = _block_basis(band, taps)
    sigma = a * a * (real @ real.T) + b * b * (imaginary @ imaginary.T)
    return sigma


def smoothing(band: Band, kernel: Sequence[int], dilation: Sequence[int]) -> Array:
    """Return h(u - v), ``[taps, taps]``.

    This is what the filter makes, at the taps, of a map that is zero at all other lags; of
    everything if the taps are the whole grid.
    """
    taps = lags(kernel, dilation)
    return _table(band.response, taps[:, None] - taps[None])


def _table(values: Array, index: np.ndarray[tuple[int, ...]]) -> Array:
    """Return ``values`` at lags ``[.., axes]``, which wrap around."""
    wrapped = index % np.array(values.shape)
    taken: Array = values[tuple(np.moveaxis(wrapped, -1, 0))]
    return taken


def _block_basis(band: Band, taps: np.ndarray[tuple[int, int]]) -> tuple[Array, Array]:
    """Return what one unit of noise on each stored bin of the block adds to the taps.

    The noise is real or imaginary.

    A bin of a one-sided spectrum counts twice unless its column is its own mirror.
    """
    stored = list(band.size)
    weights = np.ones(stored[-1])
    if len(stored) == 2:
        weights = half_weights(stored[-1])
        stored[-1] = weights.size
    corner = [min(n, size) for n, size in zip(band.block, stored, strict=True)]
    bins = lags(corner, [1] * len(corner))
    angle = 2 * np.pi * ((taps / np.array(band.size)) @ bins.T)
    amplitude = weights[bins[:, -1]] / np.sqrt(np.prod(band.size))
    return amplitude * np.cos(angle), -amplitude * np.sin(angle)


def whitening(
    band: Band, kernel: Sequence[int], dilation: Sequence[int], rank: float = RANK
) -> tuple[Array, Array]:
    """Return Wt ``[r, taps]`` and its inverse on the kept directions ``[taps, r]``."""
    whiten, back, _ = _whitening(band, tuple(kernel), tuple(dilation), rank)
    return whiten, back


@lru_cache(maxsize=256)
def _whitening(
    band: Band, kernel: tuple[int, ...], dilation: tuple[int, ...], rank: float
) -> tuple[Array, Array, Array]:
    """Return Wt, its inverse, and V^T ``[r, *size]``."""
    taps = lags(kernel, dilation)
    shifts = [_table(band.response, u - lags(band.size, [1] * len(band.size))) for u in taps]
    u, s, v = np.linalg.svd(np.stack(shifts), full_matrices=False)
    kept = s > rank * s[0]
    rows = v[kept].reshape(-1, *band.size)
    return _frozen((u[:, kept] / s[kept]).T), _frozen(u[:, kept] * s[kept]), _frozen(rows)


def pencil(
    band: Band,
    kernel: Sequence[int],
    dilation: Sequence[int],
    a: float,
    b: float,
    noise: str = "mask",
    rank: float = RANK,
) -> WhitenedBasis:
    """Return the release of a crop under noise of sd ``a`` on real and ``b`` on imaginary parts.

    Args:
        band: the filter.
        kernel: taps per axis of the kernel; ``(d,)`` releases all of a circulant block.
        dilation: their distance.
        a, b: standard deviations over sigma C.
        noise: ``mask`` or ``block``, see ``covariance``.
        rank: directions of A with a smaller relative singular value are not released.

    Raises:
        InvalidInput: a kernel that the grid cannot hold, or other axes than the band's.
    """
    check.choice(NOISES, noise=noise)
    axes = len(band.size)
    fits = len(kernel) == axes == len(dilation) and all(
        t * (k - 1) < n for k, t, n in zip(kernel, dilation, band.size, strict=True)
    )
    if not fits:
        raise InvalidInput(
            "kernel",
            expected=f"taps within a grid of {band.size}",
            got=f"kernel {tuple(kernel)} with dilation {tuple(dilation)}",
            remedy="Choose a larger FFT size.",
        )
    return _pencil(band, tuple(kernel), tuple(dilation), float(a), float(b), noise, rank)


@lru_cache(maxsize=256)
def _pencil(
    band: Band,
    kernel: tuple[int, ...],
    dilation: tuple[int, ...],
    a: float,
    b: float,
    noise: str,
    rank: float,
) -> WhitenedBasis:
    whiten, back, rows = _whitening(band, kernel, dilation, rank)
    values, vectors = np.linalg.eigh(covariance(band, kernel, dilation, a, b, noise))
    spread = _frozen(vectors * np.sqrt(np.maximum(values, 0)))
    if noise == "mask" and a == b:
        return WhitenedBasis(whiten, back, a, 1.0, _frozen(np.full(len(rows), a * a)), spread)
    if noise == "mask":
        axes = tuple(range(1, rows.ndim))
        reversed_rows = np.roll(np.flip(rows, axes), 1, axes).reshape(len(rows), -1)
        overlap = rows.reshape(len(rows), -1) @ reversed_rows.T
        against = ((a * a + b * b) * np.eye(len(rows)) + (a * a - b * b) * overlap) / 2
    else:
        real, imaginary = _block_basis(band, lags(kernel, dilation))
        factor = whiten @ np.hstack([a * real, b * imaginary])
        against = factor @ factor.T
    lam, q = np.linalg.eigh((against + against.T) / 2)
    root = np.sqrt(np.maximum(lam, np.finfo(np.float64).tiny))
    return WhitenedBasis(
        signal=_frozen((q / root).T @ whiten),
        post=_frozen(back @ (q * root)),
        scale=1.0,
        stretch=float(1 / root[0]),
        lam=_frozen(lam),
        noise=spread,
    )


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array
