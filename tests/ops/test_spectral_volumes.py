"""Norms and bins of volumes: rows, columns, and then lines along the depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpkern.ops import spectral, testing
from dpkern.ops.backends import _spectral
from dpkern.ops.spectral._plan import (
    plan_of,
    reaches,
    sides_of,
    tables_of,
    takes,
    transform_products,
)
from dpkern.ops.spectral._spectra import Grid
from tests.ops import test_spectral_bound as small
from tests.ops.spectral_cases import VOLUMES, Case

pytestmark = pytest.mark.skipif(
    "cpu" not in testing.available_backends(), reason="the compiled kernels are not built"
)

# One axis longer than 64 values, strides with and without a factor of the grid, more channels than
# float32 adds up, and an axis of one value.
GRIDS = [
    *VOLUMES,
    Case(1, 2, (5, 70, 4), (3, 3, 3), 1, 0, 1, 1, "padded"),
    Case(70, 2, (3, 4, 4), (2, 2, 2), 1, 0, 1, 1, "padded"),
    Case(2, 2, (1, 6, 5), (1, 3, 3), 2, 0, 1, 1, "padded"),
    Case(1, 1, (8, 9, 10), (1, 1, 1), 1, 0, 1, 1, "padded"),
]


def sizes_of(case: Case) -> dict[str, Any]:
    return {**case.sizes, "backend": "cpu"}


@pytest.mark.parametrize("draw", small.DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("case", GRIDS, ids=lambda case: case.name)
def test_no_norm_is_under_reported(
    case: Case, draw: small.Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight kinds of operands on ten grids, 64 samples and three bands each: 15 360 norms."""
    assert reaches(Grid(case.layer, case.layer.size, None))
    monkeypatch.setattr(small, "SAMPLES", 64)
    assert min(small.shares(case, draw, torch.float32)) >= 1 - 1e-15


@pytest.mark.parametrize("draw", [small.apart, small.diagonals], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("transforms", [1e5, 1])
def test_the_bound_of_transforms_is_needed(
    draw: small.Draw, transforms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a bound that is divided fails where spectra hardly meet."""
    monkeypatch.setattr(small, "SAMPLES", 64)
    small.weakened(monkeypatch, transforms, 1)
    worst = min(small.shares(GRIDS[-1], draw, torch.float32))
    assert (worst < 1 - 1e-9) == (transforms > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", GRIDS, ids=lambda case: case.name)
def test_norms_and_bins_are_those_of_transforms(case: Case, dtype: torch.dtype) -> None:
    x, g = case.operands(5, dtype)
    want_bins = small.agree(case, x, g, small.bands(case), "cpu")
    grid = Grid(case.layer, case.layer.size, None)
    alone = _spectral._bins(x, g, grid, case.band())
    small.bins_agree(alone, want_bins, dtype)
    used = x[(slice(None), slice(None), *(slice(n) for n in grid.rows))]
    testing.assert_close("squares", alone[2], used.double().flatten(1).square().sum(1), 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_has_the_same_bits_alone_and_with_any_threads(dtype: torch.dtype) -> None:
    for case in VOLUMES[:2]:
        x, g = case.operands(19, dtype)
        x[5], g[7], x[9, 0] = 0, 2.0**-140, 2.0**90
        with testing.threads(1):
            whole = spectral.conv_norm(x, g, size=case.size, **sizes_of(case))
        with testing.threads(2):
            assert torch.equal(spectral.conv_norm(x, g, size=case.size, **sizes_of(case)), whole)
        assert whole[5] == 0
        for one in (0, 7, 9, 18):
            at = slice(one, one + 1)
            alone = spectral.conv_norm(x[at], g[at], size=case.size, **sizes_of(case))
            assert torch.equal(alone, whole[at])


def test_a_depth_of_one_is_a_plane() -> None:
    """The volume's kernel, with one more axis, against the plane's."""
    plane = Case(3, 2, (9, 8), (3, 3), 1, 1, 1, 1, "padded")
    x, g = plane.operands(4, torch.float64)
    want = spectral.conv_norm(x, g, **plane.sizes, size=plane.size, backend="cpu")
    sizes: dict[str, Any] = {"kernel_size": (1, 3, 3), "padding": (0, 1, 1), "backend": "cpu"}
    got = spectral.conv_norm(x[:, :, None], g[:, :, None], **sizes, size=(1, *plane.size))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_which_volumes_the_kernel_takes() -> None:
    assert all(takes(size) for size in ((8, 32, 32), (16, 112, 112), (3, 256, 4096)))
    assert not any(takes(size) for size in ((257, 8, 8), (8, 514, 8), (8, 8, 4098)))


def test_products_are_those_of_every_axis() -> None:
    """A volume of depth 1 has a plane's lines, and one of its own length at each bin."""
    case = Case(3, 2, (1, 70, 66), (1, 3, 3), 1, 0, 1, 1, "padded")
    volume = Grid(case.layer, case.layer.size, None)
    flat = Case(3, 2, (70, 66), (3, 3), 1, 0, 1, 1, "padded")
    plane = Grid(flat.layer, flat.layer.size, None)
    assert transform_products(volume) > transform_products(plane)
    assert plan_of(volume).tables.lines.shape == (18,)


@pytest.mark.parametrize("shared", [True, False], ids=["cpu", "devices"])
def test_errors_are_those_of_every_axis(shared: bool) -> None:
    """The bound has so much to spare that norms alone would not miss one."""
    for case in GRIDS:
        grid = Grid(case.layer, case.layer.size, None)
        errors = tables_of(grid, shared).errors.view(2, 2)
        for dtype, found in zip((torch.float32, torch.float64), errors.tolist(), strict=True):
            for side, error in zip(sides_of(grid, shared), found, strict=True):
                assert len(side.lines) == 3
                assert error >= sum(line.error(dtype) for line in side.lines)
