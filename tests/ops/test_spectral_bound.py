"""The fused norm of correlation maps is never below the exact one, for deceptive operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkern.ops import spectral, testing
from dpkern.ops.backends import _spectral
from dpkern.ops.spectral import Band
from dpkern.ops.spectral._lines import FrequencyLine, circle
from dpkern.ops.spectral._plan import NormPlan, reaches
from dpkern.ops.spectral._spectra import Grid
from tests.ops.spectral_cases import Case, squares_by_transforms

pytestmark = pytest.mark.skipif(
    "cpu" not in testing.available_backends(), reason="the compiled kernels are not built"
)
SAMPLES = 96

GRIDS = [
    Case(2, 3, (8, 8), (3, 3), 1, 1, 1, 1, "padded"),
    Case(3, 2, (14, 10), (5, 5), 1, 0, 1, 1, "padded"),
    Case(4, 4, (9, 11), (3, 3), 1, 1, 1, 2, "padded"),
    Case(2, 4, (16, 16), (3, 3), 2, 1, 1, 1, "fast"),
    Case(2, 2, (15, 15), (3, 3), 2, 1, 1, 1, "least"),
    Case(1, 2, (5, 5), (5, 5), 1, 0, 1, 1, "least"),
    Case(20, 12, (6, 6), (3, 3), 1, 1, 1, 1, "linear"),
    Case(2, 2, (32, 32), (3, 3), 1, 1, 1, 1, "padded"),
    Case(3, 2, (40,), (5,), 1, 2, 1, 1, "padded"),
    Case(1, 1, (36, 36), (1, 1), 1, 0, 1, 1, "padded"),
]


def exact(case: Case, x: Tensor, g: Tensor, band: Band | None) -> Tensor:
    """Return squared norms by transforms in float64, scaled so that nothing underflows."""
    scales = [t.double().flatten(1).abs().amax(1).clamp(min=2.0**-149) for t in (x, g)]
    xs, gs = (
        t.double() / s.view(-1, *(1,) * (t.dim() - 1)) for t, s in zip((x, g), scales, strict=True)
    )
    squares = squares_by_transforms(case, xs, gs, band)
    return squares * scales[0].square() * scales[1].square()


def wave(
    sizes: tuple[int, ...], grid: tuple[int, ...], at: tuple[int, ...], turn: Tensor
) -> Tensor:
    """Return ``[B, 1, *sizes]``, a cosine of one frequency of the grid."""
    angle = turn.view(-1, *(1,) * len(sizes))
    for axis, (n, m, k) in enumerate(zip(sizes, grid, at, strict=True)):
        steps = torch.arange(n, dtype=torch.float64).view(-1, *(1,) * (len(sizes) - 1 - axis))
        angle = angle + 2 * math.pi * k * steps / m
    return angle.cos()[:, None]


Draw = Callable[[Case, torch.Generator], tuple[Tensor, Tensor]]


def shapes(case: Case) -> list[tuple[int, ...]]:
    """Return the shapes of both operands."""
    x, g = case.operands(1, torch.float64)
    return [(SAMPLES, *t.shape[1:]) for t in (x, g)]


def normal(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw what layers hold."""
    x, g = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes(case))
    return x, g


def constants(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw constants with a little noise: one frequency is huge, the others are small."""
    x, g = normal(case, generator)
    return 1 + 1e-3 * x, 1 + 1e-3 * g


def scales(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw channels of sizes from 2^-20 to 2^20."""
    pair = normal(case, generator)
    powers = [
        torch.randint(-20, 21, (SAMPLES, t.shape[1], *(1,) * (t.dim() - 2)), generator=generator)
        for t in pair
    ]
    x, g = (t * 2.0**p for t, p in zip(pair, powers, strict=True))
    return x, g


def lognormal(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw entries of very different sizes."""
    x, g = (t * (4 * t.roll(1)).exp() for t in normal(case, generator))
    return x, g


def sparse(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a few entries, mostly one."""
    x, g = (t * (t.abs() > 2) for t in normal(case, generator))
    return x, g


def denormal(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw operands below and near the least float32, the other one large or small."""
    pair = normal(case, generator)
    least = torch.randint(-150, -110, (SAMPLES,), generator=generator)
    other = torch.randint(-140, 110, (SAMPLES,), generator=generator)
    swap = torch.rand(SAMPLES, generator=generator) < 0.5
    powers = torch.where(swap, least, other), torch.where(swap, other, least)
    x, g = (t * 2.0 ** p.view(-1, *(1,) * (t.dim() - 1)) for t, p in zip(pair, powers, strict=True))
    return x, g


def _waves(case: Case, generator: torch.Generator, mirrored: bool) -> tuple[Tensor, Tensor]:
    grid = case.size
    low = tuple(1 for _ in grid)
    far = (-1, *low[1:]) if mirrored and len(grid) > 1 else tuple(min(2, n // 2) for n in grid)
    turns = [
        2 * math.pi * torch.rand(SAMPLES, generator=generator, dtype=torch.float64) for _ in "abc"
    ]
    x_shape, g_shape = shapes(case)
    small = 10.0 ** (-6 * torch.rand(SAMPLES, generator=generator, dtype=torch.float64))
    small = small.view(-1, *(1,) * (len(g_shape) - 1))
    x = 1000 * wave(x_shape[2:], grid, low, turns[0])
    steps = tuple(
        n // math.gcd(n, s) for n, s in zip(grid, case.layer.stride[-len(grid) :], strict=True)
    )
    g = 1000 * (
        wave(g_shape[2:], steps, far, turns[1]) + small * wave(g_shape[2:], steps, low, turns[2])
    )
    return x.expand(x_shape), g.expand(g_shape)


def apart(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a wave, and one of another frequency with very little of the first."""
    return _waves(case, generator, False)


def diagonals(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the same with spectra on opposite diagonals: M M and N N cancel."""
    return _waves(case, generator, True)


DRAWS: list[Draw] = [normal, constants, scales, lognormal, sparse, denormal, apart, diagonals]


def bands(case: Case) -> list[Band | None]:
    """Return filters of every kind."""
    return [None, *(Band(case.size, kind, 0.4) for kind in case.kinds)]


def agree(
    case: Case, x: Tensor, g: Tensor, filters: list[Band | None], backend: str
) -> tuple[Tensor, ...]:
    """Check norms and bins against transforms in float64; return the bins of transforms."""
    narrow, sizes = x.dtype is torch.float32, {**case.sizes, "backend": backend}
    for band in filters:
        want = exact(case, x, g, band)
        got = spectral.conv_norm(x, g, size=case.size, band=band, **sizes)
        assert bool((got >= want * (1 - 1e-12)).all())
        assert bool((got <= want * (1 + (2e-3 if narrow else 1e-10))).all())
    band = case.band()
    found = spectral.conv_bins(x, g, band=band, **sizes)
    want_bins = spectral.conv_bins.reference(x.double(), g.double(), **case.sizes, band=band)
    bins_agree(found, want_bins, x.dtype)
    assert bool((found[2] >= exact(case, x, g, None) * (1 - 1e-12)).all())
    return want_bins


def bins_agree(found: tuple[Tensor, ...], want: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Check the bins of both operands."""
    for i in range(2):
        close = 1e-5 if dtype is torch.float32 else 1e-12
        testing.assert_close("bins", found[i].double(), want[i], close)


def shares(case: Case, draw: Draw, dtype: torch.dtype) -> list[float]:
    """Return the least of computed over exact norms, for each band; samples of norm 0 give 1."""
    generator = torch.Generator().manual_seed(len(case.name))
    x, g = (t.to(dtype).contiguous() for t in draw(case, generator))
    found = []
    for band in bands(case):
        want = exact(case, x, g, band)
        got = spectral.conv_norm(x, g, **case.sizes, size=case.size, band=band, backend="cpu")
        assert bool(torch.isfinite(got).all())
        found.append(float(torch.where(want > 0, got / want.clamp(min=1e-300), 1.0).min()))
    return found


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("case", GRIDS, ids=lambda case: case.name)
def test_no_norm_is_under_reported(case: Case, draw: Draw) -> None:
    """Eight kinds of operands on ten grids, 96 samples and four bands each: 30 720 norms."""
    assert min(shares(case, draw, torch.float32)) >= 1 - 1e-15


@pytest.mark.parametrize("draw", [apart, diagonals], ids=lambda draw: draw.__name__)
def test_the_bound_in_double_holds_where_spectra_hardly_meet(draw: Draw) -> None:
    # The oracle's own rounding is of the order of the error that is bounded.
    for case in GRIDS[:4]:
        assert min(shares(case, draw, torch.float64)) >= 1 - 1e-6


def weakened(monkeypatch: pytest.MonkeyPatch, transforms: float, sums: float) -> None:
    """Divide the errors that the bound is made of."""
    plan_of = _spectral.plan_of

    def plan(grid: Grid) -> NormPlan:
        made = plan_of(grid)
        tables = replace(made.tables, errors=made.tables.errors / transforms)
        return replace(made, tables=tables, narrow_sums=made.narrow_sums / sums)

    monkeypatch.setattr(_spectral, "plan_of", plan)


@pytest.mark.parametrize(("draw", "transforms", "sums"), [(apart, 1e5, 1), (diagonals, 1, 1e5)])
def test_smaller_bounds_fail(
    draw: Draw, transforms: float, sums: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: both parts of the bound are needed."""
    weakened(monkeypatch, transforms, sums)
    worst = [min(shares(case, draw, torch.float32)) for case in GRIDS if len(case.input) == 2]
    assert min(worst) < 1 - 1e-9


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "line",
    [
        FrequencyLine(8, 8, 1),
        FrequencyLine(34, 32, 1),
        FrequencyLine(5, 5, 1),
        FrequencyLine(9, 4, 2),
        FrequencyLine(64, 60, 1),
    ],
)
def test_errors_of_a_line_cover_its_sums(line: FrequencyLine, kind: torch.dtype) -> None:
    """Sums in ``kind`` with the chain of the kernel, against those in extended precision."""
    generator = torch.Generator().manual_seed(line.n)
    turns = (
        torch.outer(torch.arange(line.n // 2 + 1), torch.arange(line.count) * line.step) % line.n
    )
    table = torch.from_numpy(circle(line.n))
    worst = 0.0
    for _ in range(50):
        x = torch.randn(line.count, generator=generator, dtype=torch.float64).to(kind)
        for part in table:
            coefficients = part[turns]
            total = torch.zeros(len(turns), dtype=kind)
            for j in range(line.count):
                total += coefficients[:, j].to(kind) * x[j]
            want = coefficients.numpy().astype("longdouble") @ x.numpy().astype("longdouble")
            difference = torch.from_numpy((total.numpy().astype("longdouble") - want).astype(float))
            worst = max(worst, float(difference.norm() / x.double().norm() / line.n**0.5))
    assert worst <= line.error(kind)


def test_a_circle_has_exact_zeros_and_ones() -> None:
    for n in range(1, 70):
        cosine, sine = circle(n)
        for quarter, values in enumerate([(1, 0), (0, 1), (-1, 0), (0, -1)]):
            if n * quarter % 4 == 0:
                assert (cosine[n * quarter // 4], sine[n * quarter // 4]) == values
        assert abs(cosine**2 + sine**2 - 1).max() <= 2.0**-51


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_has_the_same_bits_alone_and_with_any_threads(dtype: torch.dtype) -> None:
    for case in GRIDS:
        x, g = case.operands(37, dtype)
        x[5], g[7], x[9, 0] = 0, 2.0**-140, 2.0**90
        sizes: dict[str, Any] = {**case.sizes, "backend": "cpu"}
        band = case.band()
        with testing.threads(1):
            whole = spectral.conv_norm(x, g, size=case.size, **sizes)
            bins = spectral.conv_bins(x, g, band=band, **sizes)
        with testing.threads(2):
            assert torch.equal(spectral.conv_norm(x, g, size=case.size, **sizes), whole)
            again = spectral.conv_bins(x, g, band=band, **sizes)
            assert all(torch.equal(a, b) for a, b in zip(again, bins, strict=True))
        assert whole[5] == 0
        for one in (0, 7, 9, 20, 36):
            at = slice(one, one + 1)
            alone = spectral.conv_norm(x[at], g[at], size=case.size, **sizes)
            assert torch.equal(alone, whole[at])
            alone_bins = spectral.conv_bins(x[at], g[at], band=band, **sizes)
            assert torch.equal(alone_bins[0], bins[0][:, at])
            assert torch.equal(alone_bins[1], bins[1][:, at])


def test_grids_beyond_the_kernel_take_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transforms have the same norm and bins as kernels, and no norm is below the exact one."""
    case = Case(2, 3, (396,), (5,), 1, 2, 1, 1, "padded")
    x, g = case.operands(3, torch.float32)
    want = exact(case, x, g, None)
    sizes: dict[str, Any] = {**case.sizes, "backend": "cpu"}
    bins = []
    for reach in (reaches, lambda _: False):
        monkeypatch.setattr(_spectral, "reaches", reach)
        for got in (
            spectral.conv_norm(x, g, size=case.size, **sizes),
            (kept := spectral.conv_bins(x, g, band=case.band(), **sizes))[2],
        ):
            assert bool((got >= want).all())
            torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
        bins.append(kept)
    for one, other in zip(bins[0][:2], bins[1][:2], strict=True):
        testing.assert_close("bins", one, other, 1e-5)
