"""Norms and bins on grids with more than 64 values on an axis, whose lines take two levels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dpkern.ops import spectral, testing
from dpkern.ops.backends import _spectral
from dpkern.ops.spectral._lines import LONGEST, LongLine, circle, long_line
from dpkern.ops.spectral._plan import plan_of, reaches, takes
from dpkern.ops.spectral._spectra import Grid
from tests.ops import test_spectral_bound as small
from tests.ops.spectral_cases import Case

pytestmark = pytest.mark.skipif(
    "cpu" not in testing.available_backends(), reason="the compiled kernels are not built"
)

# Both axes long, one of them, and signals; odd and even levels; strides that divide the grid, that
# have a factor in common with it, and that do not; factors above 128; more channels than float32
# adds up.
LINES = [
    Case(2, 3, (140,), (5,), 1, 2, 1, 1, "padded"),
    Case(3, 2, (400,), (5,), 1, 2, 1, 1, "linear"),
    Case(3, 5, (129,), (3,), 2, 0, 1, 1, "padded"),
    Case(4, 4, (148,), (3,), 4, 1, 1, 2, "padded"),
    Case(1, 2, (227,), (3,), 1, 0, 1, 1, "padded"),
    Case(70, 3, (132,), (3,), 1, 0, 1, 1, "padded"),
    Case(3, 1, (150,), (1,), 150, 0, 1, 1, "padded"),
]
PLANES = [
    Case(2, 1, (138, 140), (3, 3), 1, 1, 1, 1, "padded"),
    Case(1, 2, (6, 150), (3, 5), 1, 2, 1, 1, "padded"),
    Case(2, 4, (131, 20), (3, 3), 2, 1, 1, 2, "least"),
    Case(1, 1, (70, 70), (3, 3), 1, 0, 1, 1, "linear"),
]


def sizes_of(case: Case) -> dict[str, Any]:
    return {**case.sizes, "backend": "cpu"}


@pytest.mark.parametrize("draw", small.DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("case", LINES + PLANES, ids=lambda case: case.name)
def test_no_norm_is_under_reported(
    case: Case, draw: small.Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight kinds of operands and four bands each: 23 552 norms."""
    assert max(case.size) > LONGEST
    assert reaches(Grid(case.layer, case.layer.size, None))
    monkeypatch.setattr(small, "SAMPLES", 96 if case in LINES else 16)
    assert min(small.shares(case, draw, torch.float32)) >= 1 - 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", LINES + PLANES, ids=lambda case: case.name)
def test_norms_and_bins_are_those_of_transforms(case: Case, dtype: torch.dtype) -> None:
    x, g = case.operands(5, dtype)
    want_bins = small.agree(case, x, g, small.bands(case), "cpu")
    grid = Grid(case.layer, case.layer.size, None)
    alone = _spectral._bins(x, g, grid, case.band())
    small.bins_agree(alone, want_bins, dtype)
    used = x.reshape(*x.shape[:2], *case.layer.input)[:, :, : grid.rows[0], : grid.rows[1]]
    testing.assert_close("squares", alone[2], used.double().flatten(1).square().sum(1), 1e-3)


@pytest.mark.parametrize(
    ("draw", "transforms"), [(small.apart, 1e5), (small.apart, 1)], ids=["divided", "whole"]
)
def test_the_bound_of_transforms_is_needed(
    draw: small.Draw, transforms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a bound that is divided fails where spectra hardly meet."""
    monkeypatch.setattr(small, "SAMPLES", 24)
    small.weakened(monkeypatch, transforms, 1)
    worst = min(min(small.shares(case, draw, torch.float32)) for case in LINES[:2] + PLANES[:1])
    assert (worst < 1 - 1e-9) == (transforms > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_has_the_same_bits_alone_and_with_any_threads(dtype: torch.dtype) -> None:
    for case in (LINES[0], LINES[3], PLANES[1]):
        x, g = case.operands(19, dtype)
        x[5], g[7], x[9, 0] = 0, 2.0**-140, 2.0**90
        band = case.band()
        with testing.threads(1):
            whole = spectral.conv_norm(x, g, size=case.size, **sizes_of(case))
            bins = spectral.conv_bins(x, g, band=band, **sizes_of(case))
        with testing.threads(2):
            assert torch.equal(spectral.conv_norm(x, g, size=case.size, **sizes_of(case)), whole)
        assert whole[5] == 0
        for one in (0, 7, 9, 18):
            at = slice(one, one + 1)
            alone = spectral.conv_norm(x[at], g[at], size=case.size, **sizes_of(case))
            assert torch.equal(alone, whole[at])
            alone_bins = spectral.conv_bins(x[at], g[at], band=band, **sizes_of(case))
            assert torch.equal(alone_bins[0], bins[0][:, at])


def two_levels(line: LongLine, x: np.ndarray[Any, Any], kind: type) -> np.ndarray[Any, Any]:
    """Return the spectrum about the origin as the kernel sums it, with numbers of ``kind``."""
    n1, n2 = line.first, line.second
    cosine, sine = (t.astype(kind) for t in circle(line.n))
    terms = line.levels[0].count
    a0, b0 = (terms // 2, n2 // 2) if line.shared else (0, 0)
    padded = np.zeros(terms * n2, kind)
    padded[: len(x)] = x
    found = np.zeros((2, n1, n2), kind)
    turned = np.zeros((2, n1, n2), kind)
    for k in range(n1):
        for b in range(n2):
            p = q = kind(0)
            for a in range(terms):
                at = k * (a - a0) * n2 % line.n
                p += cosine[at] * padded[a * n2 + b]
                q += sine[at] * padded[a * n2 + b]
            c, s = (t[k * (b - b0) % line.n] for t in (cosine, sine))
            turned[:, k, b] = c * p - s * q, c * q + s * p
    for m in range(n2):
        for b in range(n2):
            at = m * (b - b0) % n2 * n1
            c, s = cosine[at], sine[at]
            p, q = turned[:, :, b]
            found[0, :, m] += c * p - s * q
            found[1, :, m] += c * q + s * p
    return found.reshape(2, -1)


@pytest.mark.parametrize("size", [(132, 132), (140, 70), (143, 143), (226, 224)])
def test_errors_of_a_line_cover_two_levels(size: tuple[int, int]) -> None:
    """The order of frequencies is that of the spectrum, and float32 stays within the error."""
    line = long_line(*size, 1)
    assert line is not None
    rng = np.random.default_rng(line.n)
    for x in (rng.normal(size=line.count), np.ones(line.count)):
        x = x.astype(np.float32)
        angle = np.outer(line.frequencies, np.arange(line.count) - line.origin)
        want = np.exp(-2j * np.pi * (angle % line.n) / line.n) @ x.astype(float)
        p, q = two_levels(line, x, np.float32).astype(float)
        error = np.linalg.norm(p - 1j * q - want) / np.linalg.norm(x) / line.n**0.5
        assert 0 < error <= line.error(torch.float32)


def test_frequencies_stand_once() -> None:
    for n, step in ((132, 1), (143, 2), (226, 5), (230, 7), (256, 3), (4096, 1)):
        line = long_line(n, n // step, step)
        assert line is not None
        assert sorted(line.frequencies) == list(range(n))
        assert len(line.halves) == n // 2 + 1
        assert len({min(k, n - k) for k in line.halves.tolist()}) == n // 2 + 1


def test_which_grids_the_kernel_takes() -> None:
    assert all(takes(size) for size in ((1, 4096), (226, 226), (229, 240), (128, 17)))
    assert not any(takes(size) for size in ((1, 257), (514, 10), (1, 4098)))
    for n in range(65, 257):
        assert takes((n, n))


def test_float32_is_taken_where_its_error_is_small() -> None:
    def wide(case: Case) -> bool:
        return plan_of(Grid(case.layer, case.layer.size, None)).wide

    assert not wide(Case(3, 3, (224, 224), (7, 7), 2, 3))
    assert not wide(Case(3, 3, (4096,), (5,), 1, 2))
    assert not wide(Case(3, 3, (224, 224), (3, 3), 1, 1))  # 226 = 2 * 113
    assert wide(Case(65, 3, (224, 224), (3, 3), 1, 1))
