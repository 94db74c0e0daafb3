"""Bands of frequencies and the coordinates of released crops: counts, gains, certified pencils."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.ops.spectral import Band, pencil, whitening
from dpkern.ops.spectral._basis import RANK, covariance

S = math.sqrt(0.5)
KINDS = {"real": (1.0, 0.0), "circular": (S, S), "a=.9": (0.9, math.sqrt(0.19)), "full": (1.0, 1.0)}
BANDS = [
    Band((8, 8), "shells", 0.5),
    Band((9, 9), "shells", 0.28),
    Band((6, 10), "shells", 0.4),
    Band((7, 8), "rectangle", 0.3),
    Band((12,), "shells", 0.5),
    Band((1, 9), "rectangle", 0.5),
    Band((5, 5), "all"),
]


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_whole_shells_with_at_least_the_share(band: Band) -> None:
    gains = band.gains
    assert set(np.unique(gains)) <= {0.0, 1.0}
    mirror = gains
    for axis in range(gains.ndim):
        mirror = np.roll(np.flip(mirror, axis), 1, axis)
    assert (mirror == gains).all()
    assert band.count >= band.keep * gains.size
    # Without its outermost shell there would be too few.
    sizes = band.size
    frequency = [np.minimum(np.arange(n), n - np.arange(n)) / n for n in sizes]
    grids = np.meshgrid(*frequency, indexing="ij")
    rectangle = band.kind == "rectangle"
    radius = np.maximum.reduce(grids) if rectangle else np.sqrt(sum(f * f for f in grids))
    radius = np.round(radius, 9)
    outer = radius[gains > 0].max()
    assert ((radius <= outer) == (gains > 0)).all()
    if band.kind != "all":
        assert (radius < outer).sum() < band.keep * gains.size


@pytest.mark.parametrize("band", [*BANDS, Band((6, 6), "authors_slice", 0.5)], ids=str)
def test_weights_count_the_full_spectrum(band: Band) -> None:
    """Where columns 0 and Q/2 hold their own mirrors: K_real is the sum of the weights."""
    assert band.weights.sum() == band.count
    half = band.gains[..., : band.size[-1] // 2 + 1]
    assert (half[band.retained] > 0).all()
    assert len(band.weights) == np.count_nonzero(half)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_filter_and_correlation(band: Band) -> None:
    noise = np.random.default_rng(0).standard_normal(band.size)
    filtered = np.fft.ifftn(np.fft.fftn(noise) * band.gains).real
    shifts = np.array([np.roll(noise, u, tuple(range(noise.ndim))) for u in np.ndindex(*band.size)])
    direct = np.tensordot(band.response.ravel(), shifts, 1)
    assert direct == pytest.approx(filtered, abs=1e-13)
    assert band.correlation == pytest.approx(band.response, abs=1e-15)  # gains are 0 and 1
    assert band.correlation.ravel()[0] == pytest.approx(band.count / noise.size)


def test_integer_frequencies_keep_the_boundary() -> None:
    """A mask from floating-point frequencies loses bins of the shell it ends with."""
    lost = 0
    for n in range(5, 60):
        f = torch.fft.fftfreq(n).abs()
        for r in range(1, (n - 1) // 2):
            band = Band((n, n), "rectangle", ((2 * r) ** 2 + 1) / n**2)
            assert band.count == (2 * r + 1) ** 2
            lost += int((f * n <= r).sum()) != 2 * r + 1
    assert lost > 0


def test_share_is_the_decimal_that_was_written() -> None:
    assert Fraction(0.1) * 10 > 1  # as a binary number it would need a second bin
    assert Band((10,), "shells", 0.1).count == 1
    assert Band((10,), "shells", 0.11).count == 3


def test_authors_slice() -> None:
    assert Band((8,), "authors_slice", 0.5).gains.tolist() == [1, 1, 0.5, 0.5, 0, 0.5, 0.5, 1]
    shares = [Band((n, n), "authors_slice", 0.5).count / n**2 for n in (59, 23, 5)]
    assert shares == pytest.approx([0.5335, 0.5841, 0.84], abs=1e-4)
    gains = Band((12, 12), "authors_slice", 0.5).gains
    assert set(np.unique(gains)) == {0.0, 0.5, 1.0}
    # No low-pass: one diagonal orientation stays up to the highest frequency, the other goes.
    assert gains[5, 5] == 1 == gains[-5, -5]
    assert gains[5, -5] == 0 == gains[-5, 5]


TABLE = [
    ((34, 34), 3, 1, (0.7071, 0.7071, 0.7071, 1)),
    ((32, 32), 5, 1, (0.7071, 0.7071, 0.7071, 1)),
    ((8, 8), 5, 1, (0.7071, 0.7071, 0.7071, 1)),
    ((9, 9), 5, 1, (0.7071, 0.7071, 0.7071, 1)),
    ((6, 6), 5, 1, (0, 0.7071, 0.4359, 1)),
    ((5, 5), 5, 1, (0, 0.7071, 0.4359, 1)),
    ((34, 34), 3, 0.5, (0.3988, 0.7071, 0.5372, 1)),
    ((14, 14), 5, 0.5, (0.1370, 0.7071, 0.4490, 1)),
]


@pytest.mark.parametrize(("size", "d", "keep", "row"), TABLE, ids=lambda v: str(v))
def test_certified_multiplier_of_a_crop(size: Any, d: int, keep: float, row: Any) -> None:
    band = Band(size, "all" if keep == 1 else "shells", keep)
    for (a, b), expected in zip(KINDS.values(), row, strict=True):
        release = pencil(band, (d, d), (1, 1), a, b)
        assert release.multiplier == pytest.approx(expected, abs=6e-5)
        assert (release.stretch == 1) == (a == b)


def test_smallest_eigenvalue_and_shares_of_the_table() -> None:
    band = Band((34, 34), "shells", 0.5)
    assert np.linalg.eigvalsh(covariance(band, (3, 3), (1, 1), 1, 1, "mask"))[0] == pytest.approx(
        3.06e-2, rel=2e-3
    )
    assert band.count / 34**2 == pytest.approx(0.513, abs=5e-4)
    assert Band((14, 14), "shells", 0.5).count / 14**2 == pytest.approx(0.5153, abs=5e-5)


def test_published_code_on_lenet() -> None:
    """Noise on the corner alone, circular: two convolutions are weaker, the third has holes."""
    layers = [pencil(Band((n, n), "authors_slice", 0.5), (5, 5), (1, 1), S, S, "block")
              for n in (59, 23, 5)]  # fmt: skip
    assert [p.multiplier for p in layers] == pytest.approx([0.7765, 0.5227, 0], abs=6e-5)
    # Of 25 directions 4 are not released and 4 are released without noise.
    assert layers[2].lam.size == 21
    assert (layers[2].lam < 2.0**-20).sum() == 4
    block = pencil(Band((8,), "authors_slice", 0.5), (8,), (1,), S, S, "block")
    assert block.multiplier == pytest.approx(0.5, abs=1e-12)


CROPS = [
    (Band((34, 34), "shells", 0.5), (3, 3), (1, 1)),
    (Band((14, 14), "shells", 0.1), (5, 5), (1, 1)),  # eigenvalues down to 1e-9
    (Band((9, 11), "rectangle", 0.4), (3, 2), (2, 3)),
    (Band((6, 6), "shells", 0.3), (5, 5), (1, 1)),  # fewer kept bins than taps
    (Band((8,), "shells", 0.5), (8,), (1,)),
    (Band((1, 12), "shells", 0.5), (1, 4), (1, 2)),
]


@pytest.mark.parametrize("crop", CROPS, ids=lambda c: f"{c[0].size} {c[0].keep} {c[1]}")
@pytest.mark.parametrize("noise", KINDS)
def test_coordinates(crop: Any, noise: str) -> None:
    """Orthonormal signal rows, white noise, and back: against the explicit linear maps."""
    band, kernel, dilation = crop
    a, b = KINDS[noise]
    taps = tuple(np.indices(kernel).reshape(len(kernel), -1))
    taps = tuple(index * t for index, t in zip(taps, dilation, strict=True))
    # A: unit impulses of the map, filtered, at the taps.
    n = math.prod(band.size)
    impulses = np.eye(n).reshape(n, *band.size)
    axes = tuple(range(1, 1 + len(band.size)))
    filtered = np.fft.ifftn(np.fft.fftn(impulses, axes=axes) * band.gains, axes=axes).real
    A = filtered[(slice(None), *taps)].T
    H = covariance(band, kernel, dilation, 1, 1, "mask")
    assert pytest.approx(H, abs=1e-14) == A @ A.T
    whiten, back = whitening(band, kernel, dilation)
    rank = whiten.shape[0]
    assert rank <= min(H.shape[0], band.count)
    rows = whiten @ A
    # Kept singular values go down to 2^-18 of the largest: 34 bits are left.
    assert rows @ rows.T == pytest.approx(np.eye(rank), abs=1e-10)
    assert whiten @ back == pytest.approx(np.eye(rank), abs=1e-9)
    release = pencil(band, kernel, dilation, a, b)
    if release.multiplier < 2.0**-10:
        return
    assert release.signal @ release.post == pytest.approx(np.eye(rank), abs=1e-9)
    # The law: noise of variance scale^2 in coordinates is Sigma at the taps (kept directions).
    spread = release.post * release.scale
    sigma = covariance(band, kernel, dilation, a, b, "mask")
    projector = back @ whiten
    assert spread @ spread.T == pytest.approx(projector @ sigma @ projector.T, abs=1e-12)
    assert release.noise @ release.noise.T == pytest.approx(sigma, abs=1e-12)
    # The stretch is the largest singular value of the map from R to coordinates.
    top = np.linalg.svd(release.signal @ A, compute_uv=False)[0]
    assert top == pytest.approx(release.stretch, rel=1e-9)
    assert release.multiplier == pytest.approx(release.scale / release.stretch, rel=1e-12)


def test_directions_outside_the_band_are_dropped() -> None:
    band = Band((6, 6), "shells", 0.3)
    values = np.linalg.eigvalsh(covariance(band, (5, 5), (1, 1), 1, 1, "mask"))
    whiten, back = whitening(band, (5, 5), (1, 1))
    assert whiten.shape[0] == (values > RANK**2 * values[-1]).sum() == band.count < 25
    assert back.shape == (25, band.count)


def test_constants_are_shared_and_read_only() -> None:
    args: Any = ((3, 3), (1, 1), 1.0, 0.0)
    first, second = (pencil(Band((9, 9), "shells", 0.5), *args) for _ in range(2))
    assert first is second
    assert Band((9, 9), "shells", 0.5).gains is Band((9, 9), "shells", 0.5).gains
    with pytest.raises(ValueError, match="read-only"):
        first.signal[0] = 0


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Band((3, 3, 3, 3)), "size"),
        (lambda: Band((0, 3)), "size"),
        (lambda: Band((4, 4), "low"), "kind"),
        (lambda: Band((4, 4), "shells", 0.0), "keep"),
        (lambda: Band((4, 4), "all", 0.5), "keep"),
        (lambda: pencil(Band((4, 4)), (5, 5), (1, 1), 1, 1), "kernel"),
        (lambda: pencil(Band((4, 4)), (3, 3), (2, 2), 1, 1), "kernel"),
        (lambda: pencil(Band((4, 4)), (3,), (1,), 1, 1), "kernel"),
        (lambda: pencil(Band((4, 4)), (3, 3), (1, 1), 1, 1, "corner"), "noise"),
    ],
)
def test_refuses(make: Any, name: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        make()
    assert raised.value.name == name
