"""Whitened norms from retained bins: the coordinates' own norms, and never below them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpkern.ops import spectral, testing
from dpkern.ops.backends import _spectral
from dpkern.ops.spectral import Band, pencil
from dpkern.ops.spectral._basis import FLOAT_RANK, RANK
from dpkern.ops.spectral._spectra import Grid
from dpkern.ops.spectral._whitened_plan import Matrix, WhitenedPlan, halves, whitened_plan
from dpkern.ops.spectral.bins import kept_bins
from dpkern.ops.spectral.whitened_bins import by_grams
from tests.ops.spectral_cases import VOLUMES, Case
from tests.ops.test_spectral_bound import DRAWS, GRIDS, Draw, apart, constants

pytestmark = pytest.mark.skipif(
    "cpu" not in testing.available_backends(), reason="the compiled kernels are not built"
)
WIDE = [
    Case(48, 40, (2, 2), (3, 3), 1, 1, 1, 1, "padded"),
    Case(64, 32, (3, 3), (3, 3), 1, 0, 1, 1, "least"),
    Case(80, 64, (4, 3), (2, 2), 1, 0, 1, 2, "fast"),
]
"""Few bins and many channels: their norms are Gram matrices over channels."""


def matrices(case: Case, band: Band) -> list[Tensor]:
    """Return the signal of two noise kinds, and a matrix that mixes even and odd taps."""
    geometry, axes = case.layer.geometry, len(case.size)
    taps = geometry.kernel[-axes:], geometry.dilation[-axes:]
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(5, geometry.taps, generator=generator, dtype=torch.float64)
    laws = [pencil(band, *taps, 1.0, 1.0, "mask", FLOAT_RANK), pencil(band, *taps, 1.0, 0.5)]
    return [*(torch.tensor(law.signal) for law in laws), mixed]


def exact(case: Case, x: Tensor, g: Tensor, matrix: Tensor, band: Band) -> Tensor:
    """Return norms of coordinates by filtered taps in float64, without underflow."""
    scales = [t.double().flatten(1).abs().amax(1).clamp(min=2.0**-149) for t in (x, g)]
    xs, gs = (
        t.double() / s.view(-1, *(1,) * (t.dim() - 1)) for t, s in zip((x, g), scales, strict=True)
    )
    options: dict[str, Any] = {**case.sizes, "size": case.size, "band": band}
    rows, _ = spectral.conv_release(xs, gs, matrix=matrix, backend="reference", **options)
    return rows.flatten(1).norm(dim=1) * scales[0] * scales[1]


def shares(case: Case, draw: Draw, dtype: torch.dtype, backend: str = "cpu") -> list[float]:
    """Return the least and largest of computed over exact norms, over bands and matrices."""
    generator = torch.Generator().manual_seed(len(case.name))
    x, g = (t.to(dtype).contiguous() for t in draw(case, generator))
    found = []
    for kind in case.kinds:
        band = Band(case.size, kind, 0.4)
        for matrix in matrices(case, band):
            want = exact(case, x, g, matrix, band)
            *_, squares = spectral.whitened_bins(
                x, g, matrix, band=band, backend=backend, **case.sizes
            )
            assert bool(torch.isfinite(squares).all())
            ratio = torch.where(want > 0, squares.sqrt() / want.clamp(min=1e-300), 1.0)
            found += [float(ratio.min()), float(ratio.max())]
    return found


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("case", GRIDS[:-1], ids=lambda case: case.name)
def test_no_norm_is_under_reported(case: Case, draw: Draw) -> None:
    """Eight kinds of operands on nine grids, 96 samples, three bands, three matrices: 62 208."""
    assert min(shares(case, draw, torch.float32)) >= 1 - 1e-12


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_no_norm_of_many_channels_is_under_reported(case: Case, draw: Draw) -> None:
    """Eight kinds of operands on three grids, 96 samples, three bands, three matrices: 20 736."""
    assert min(shares(case, draw, torch.float32)) >= 1 - 1e-12


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("case", VOLUMES, ids=lambda case: case.name)
def test_no_norm_of_volumes_is_under_reported(case: Case, draw: Draw) -> None:
    """Eight kinds of operands on six grids, 96 samples, two bands, three matrices: 27 648."""
    assert min(shares(case, draw, torch.float32)) >= 1 - 1e-12


@pytest.mark.parametrize("name", testing.available_isas())
def test_gram_matrices_in_every_instruction_set(name: str) -> None:
    with testing.isa(name):
        assert min(shares(WIDE[0], apart, torch.float32)) >= 1 - 1e-12


def test_many_channels_are_summed_in_gram_matrices() -> None:
    for case in WIDE:
        band = Band(case.size, case.kinds[0], 0.4)
        groups, bins = case.groups, len(kept_bins(band))
        for matrix in matrices(case, band):
            sizes = bins, case.ins // groups, case.outs // groups, len(matrix)
            assert by_grams(*sizes)
            assert not by_grams(10 * sizes[0], *sizes[1:])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_norms_of_ordinary_operands_are_close(backend: str) -> None:
    normal = DRAWS[0]
    for case in GRIDS[:-1] + WIDE if backend == "cpu" else GRIDS[:3]:
        assert max(shares(case, normal, torch.float32, backend)) <= 1 + 5e-3
        least, *_, most = sorted(shares(case, normal, torch.float64, backend))
        assert least >= 1 - 1e-9
        assert most <= 1 + 1e-7


def weakened(monkeypatch: pytest.MonkeyPatch, bins: float, product: float) -> None:
    """Divide the errors that the bound is made of."""
    plan_for = _spectral.plan_for

    def plan(*args: Any) -> WhitenedPlan:
        made = plan_for(*args)
        return replace(
            made,
            x_error=made.x_error / bins,
            g_error=made.g_error / bins,
            product_error=made.product_error / product,
        )

    monkeypatch.setattr(_spectral, "plan_for", plan)


def test_smaller_bounds_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: bins of spectra that hardly meet hide more than the coordinates hold."""
    weakened(monkeypatch, 1e5, 1e5)
    for draw in (apart, constants):
        assert min(min(shares(case, draw, torch.float32)) for case in GRIDS[:5]) < 1 - 1e-9


def test_the_bound_of_products_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: operands of whole numbers on a grid of four have exact bins."""
    case = Case(3, 3, (4, 4), (2, 2), 1, 0, 1, 1, "padded")
    weakened(monkeypatch, 1e9, 1e9)

    def whole(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, g = (
            torch.randint(-9, 10, (96, *t.shape[1:]), generator=generator).double()
            for t in case.operands(1, torch.float64)
        )
        return x, g

    assert min(shares(case, whole, torch.float32)) < 1 - 1e-9
    monkeypatch.undo()
    assert min(shares(case, whole, torch.float32)) >= 1 - 1e-12


def test_the_bound_of_gram_matrices_holds_where_coordinates_cancel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exact bins of large values outside the taps: nothing but the sums' own bound covers them."""
    case = Case(64, 64, (4, 4), (2, 2), 1, 0, 1, 1, "padded")
    band = Band(case.size, "shells", 1.0)
    x, g = (torch.randint(-9, 10, t.shape).float() for t in case.operands(64, torch.float32))
    x[:, :, 2:, 2:] *= 2.0**16
    g[:, :, 1:] = g[:, :, :, 1:] = 0
    weakened(monkeypatch, 1e9, 1e9)
    for matrix in matrices(case, band):
        assert by_grams(len(kept_bins(band)), 64, 64, len(matrix))
        want = exact(case, x, g, matrix, band)
        *_, squares = spectral.whitened_bins(x, g, matrix, band=band, backend="cpu", **case.sizes)
        ratio = squares.sqrt() / want
        assert float(ratio.min()) >= 1 - 1e-8
        assert float(ratio.max()) <= 1 + 1e-2


def test_even_and_odd_rows_have_the_norms_of_the_matrix() -> None:
    band = Band((14, 14), "shells", 0.3)
    signal = pencil(band, (5, 5), (1, 1), 1.0, 1.0, "mask", RANK).signal
    even, odd, cosine = halves(np.asarray(signal))
    assert cosine < 1e-9
    assert np.abs(even - even[:, ::-1]).max() < 1e-9 * np.abs(even).max()
    assert np.abs(odd + odd[:, ::-1]).max() < 1e-9 * np.abs(odd).max()
    both = np.concatenate([even, odd])
    square = signal.T @ signal
    assert np.abs(both.T @ both - square).max() < 1e-9 * np.abs(square).max()


def test_rows_that_are_neither_are_left_as_they_are() -> None:
    """Negative control: halves of such a matrix have other norms, which its plan knows."""
    case = GRIDS[0]
    band = Band(case.size, "shells", 0.4)
    grid = Grid(case.layer, case.layer.size, None)
    plans = [
        whitened_plan(Matrix.of(matrix), grid, band, torch.float32)
        for matrix in matrices(case, band)
    ]
    assert [plan.odd_from > 0 for plan in plans] == [True, False, False]
    assert halves(matrices(case, band)[2].numpy())[2] > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_has_the_same_bits_alone_and_with_any_threads(dtype: torch.dtype) -> None:
    for case in GRIDS[:-1] + WIDE:
        x, g = case.operands(19, dtype)
        x[5], g[7] = 0, 2.0**-140
        band = case.band()
        assert isinstance(band, Band)
        matrix = matrices(case, band)[0]
        options: dict[str, Any] = {**case.sizes, "band": band, "backend": "cpu"}
        with testing.threads(1):
            whole = spectral.whitened_bins(x, g, matrix, **options)
        with testing.threads(2):
            again = spectral.whitened_bins(x, g, matrix, **options)
        assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))
        assert whole[2][5] == 0
        for one in (0, 7, 18):
            at = slice(one, one + 1)
            alone = spectral.whitened_bins(x[at], g[at], matrix, **options)
            assert torch.equal(alone[2], whole[2][at])
            assert torch.equal(alone[0], whole[0][:, at])


def test_bins_are_those_of_the_whole_norm() -> None:
    """Bins that are computed without the others have the same bits."""
    for case in GRIDS[:-1]:
        x, g = case.operands(19, torch.float32)
        band = case.band()
        assert isinstance(band, Band)
        options: dict[str, Any] = {**case.sizes, "band": band, "backend": "cpu"}
        mine = spectral.whitened_bins(x, g, matrices(case, band)[0], **options)
        whole = spectral.conv_bins(x, g, **options)
        assert torch.equal(mine[0], whole[0])
        assert torch.equal(mine[1], whole[1])


def test_a_sample_that_is_not_finite_has_no_finite_norm() -> None:
    case = GRIDS[0]
    x, g = case.operands(4, torch.float32)
    x[1, 0, 2, 2], g[2, 0, 1, 1] = float("nan"), float("inf")
    band = Band(case.size, "shells", 0.4)
    *_, squares = spectral.whitened_bins(
        x, g, matrices(case, band)[0], band=band, backend="cpu", **case.sizes
    )
    assert torch.isfinite(squares).tolist() == [True, False, False, True]
