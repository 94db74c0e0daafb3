"""Norms and sums in the frequency domain by Triton's kernels in its interpreter: those of plain
sums in float64, norms from above for operands that were made to deceive. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dpkern.ops import spectral
from dpkern.ops.backends import _device_spectral
from tests.ops.backends.test_cuda_spectral import (
    LARGE,
    check,
    differ,
    shares,
    whitened_shares,
)
from tests.ops.spectral_cases import CASES, Case
from tests.ops.test_spectral_bound import DRAWS, GRIDS, Draw, apart, denormal
from tests.step.no_wait import NoWait

Modules = Callable[[str], Any]
EITHER = {"backend": "triton"}
LINE, FOLDED = CASES[-4], CASES[10]
"""One dimension; groups and a stride that folds."""
pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(
    "case", [LINE, pytest.param(FOLDED, marks=pytest.mark.slow)], ids=lambda case: case.name
)
def test_norms_bins_and_sums_are_those_of_the_correlation_map(case: Case) -> None:
    check(differ(case, torch.float32, "triton"), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES[::4], LARGE[1]], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_all_types(case: Case, dtype: torch.dtype) -> None:
    check(differ(case, dtype, "triton"), dtype)


@pytest.mark.parametrize("draw", [apart, denormal], ids=lambda draw: draw.__name__)
def test_no_norm_is_under_reported(draw: Draw) -> None:
    assert shares(GRIDS[0], draw, "triton") >= 1 - 1e-15


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_no_norm_is_under_reported_on_other_grids(draw: Draw) -> None:
    """Eight kinds of operands with groups, a stride and one dimension, six samples each."""
    for case in (GRIDS[2], GRIDS[4], GRIDS[8]):
        assert shares(case, draw, "triton") >= 1 - 1e-15
    assert whitened_shares(GRIDS[0], draw, "triton") >= 1 - 1e-12


def test_smaller_bounds_fail(interpreted: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    module = interpreted("spectral")
    error = module._error
    monkeypatch.setattr(module, "_error", lambda *given: error(*given) / 1e5)
    assert min(shares(case, apart, "triton") for case in GRIDS[:1]) < 1 - 1e-9


def test_the_errors_cover_computed_spectra(interpreted: Modules) -> None:
    """Of maps that fill the largest grid, where sums are longest."""
    case = Case(1, 1, (60, 60), (3, 3), 1, 2, 1, 1, "padded")
    x, g = case.operands(2, torch.float32)
    module = interpreted("spectral")
    found = module.Transformed(x, g, module.Grid(case.layer, case.size, None), case.band())
    exact = spectral.conv_bins(x, g, **case.sizes, band=case.band(), backend="reference")
    for got, want, error, map_ in zip(found.bins(), exact, found.errors, (x, g), strict=False):
        distance = (got.double() - want.double()).square().sum((0, 2, 3)).sqrt()
        # Parseval: half of the bins, which stand for two each but for a few.
        size = map_.double().flatten(1).norm(dim=1) * (case.size[0] * case.size[1] / 2) ** 0.5
        assert bool((distance < error * size).all())
        assert bool((distance > 1e-3 * error * size).all())


def test_what_is_not_finite_stays_in_its_sample() -> None:
    case = CASES[0]
    x, g = case.operands(4, torch.float32)
    sizes = case.sizes | EITHER | {"band": case.band()}
    plain = spectral.conv_bins(x, g, **sizes)
    x[1, 0, 2, 1], g[2, 1, 0, 0] = float("nan"), float("inf")
    found = spectral.conv_bins(x, g, **sizes)
    assert torch.isfinite(found[2]).tolist() == [True, False, False, True]
    for a, b in zip(found, plain, strict=True):
        index = [0, 3]
        assert torch.equal(
            a[:, index] if a.dim() > 1 else a[index], b[:, index] if b.dim() > 1 else b[index]
        )


def test_larger_grids_take_the_platforms_transforms(
    interpreted: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel is launched")

    monkeypatch.setattr(interpreted("spectral"), "launch", none)
    case = Case(1, 1, (66,), (3,), 1, 0, 1, 1, "padded")
    x, g = case.operands(2, torch.float32)
    got = spectral.conv_norm(x, g, **case.sizes, size=case.size, **EITHER)
    assert torch.equal(got, _device_spectral.conv_norm(x, g, band=None, plan=case.layer))
    spectral.conv_bins(x, g, **case.sizes, band=case.band(), **EITHER)
    with pytest.raises(AssertionError):
        spectral.conv_norm(
            x[..., :64].clone(), g[..., :62].clone(), **case.sizes, size=(64,), **EITHER
        )


def test_nothing_waits_for_the_device() -> None:
    case = LINE
    x, g = case.operands(2, torch.float32)
    band, sizes = case.band(), case.sizes | EITHER
    out = torch.zeros(case.layer.geometry.weight_shape)

    def run() -> None:
        spectral.conv_norm(x, g, **sizes, size=case.size, band=band)
        *both, _ = spectral.conv_bins(x, g, **sizes, band=band)
        spectral.bins_sum(*both, torch.ones(2), out, band=band, **EITHER)

    run()  # constants are made once
    with NoWait():
        run()
