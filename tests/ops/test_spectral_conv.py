"""Spectral norms and sums of convolutions against correlation maps made by plain sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.ops import ghost, spectral, testing
from dpkern.ops.spectral import Band
from dpkern.ops.spectral._sizes import fast
from dpkern.ops.spectral._spectra import Grid, transform_error
from dpkern.ops.spectral.conv_sum import conv_filtered
from tests.ops.backends.every_backend import every_backend
from tests.ops.spectral_cases import CASES, VOLUMES, Case, correlation_map, taps, through

every_case = pytest.mark.parametrize("case", CASES + VOLUMES, ids=lambda case: case.name)
HERE = ["reference", *(["cpu"] if "cpu" in testing.available_backends() else [])]
PLAIN = Case(4, 6, (9, 8), (3, 3), 1, 1, 1, 2, "padded")


def _taken(case: Case, backend: str) -> str | None:
    """The backend of the time domain's ops, of which the CPU has none for volumes."""
    return None if case in VOLUMES else backend


def squared(maps: torch.Tensor) -> torch.Tensor:
    return maps.flatten(1).square().sum(1)


@every_case
def test_norms_and_sums_are_those_of_the_correlation_map(case: Case) -> None:
    x, g = case.operands(2, torch.float64)
    maps = correlation_map(case, x, g)
    sizes = case.sizes | {"size": case.size}
    factors = torch.tensor([0.7, -0.3], dtype=torch.float64)
    for backend in HERE:
        got = spectral.conv_norm(x, g, **sizes, backend=backend)
        torch.testing.assert_close(got, squared(maps), rtol=1e-12, atol=0)
        for kind in ("shells", "rectangle"):
            band = case.band(kind)
            filtered = through(band, maps)
            got = spectral.conv_norm(x, g, **sizes, band=band, backend=backend)
            torch.testing.assert_close(got, squared(filtered), rtol=1e-12, atol=0)
            crop = taps(case, filtered)
            total = torch.einsum("b,b...->...", factors, crop)
            for route in ("filter", "bins"):
                out = torch.ones_like(total)
                chosen: dict[str, Any] = {"band": band, "route": route}
                chosen["backend"] = backend if route == "bins" else _taken(case, backend)
                spectral.conv_sum(x, g, factors, out, **sizes, **chosen)
                testing.assert_close(route, out, 1 + total, 1e-12)
        out = torch.zeros_like(total)
        spectral.conv_sum(x, g, factors, out, **sizes, backend=_taken(case, backend))
        plain = torch.einsum("b,b...->...", factors, taps(case, maps))
        testing.assert_close("plain", out, plain, 1e-12)


@every_case
def test_the_whitened_norm_is_that_of_the_pseudo_inverse(case: Case) -> None:
    """``||W R||^2 = F^T H^+ F``, at most the kept part, which is at most the whole."""
    x, g = case.operands(2, torch.float64)
    maps = correlation_map(case, x, g)
    band = case.band(keep=0.6)
    sizes = case.sizes | {"size": case.size, "band": band}
    axes = len(case.input)
    matrix = torch.tensor(spectral.whitening(band, case.kernel, (case.dilation,) * axes)[0])
    crops = taps(case, through(band, maps)).flatten(3)
    want = torch.einsum("bocr,bocr->b", crops @ matrix.T, crops @ matrix.T)
    coordinates, squares = spectral.conv_release(x, g, matrix=matrix, **sizes)
    testing.assert_close("coordinates", coordinates, crops @ matrix.T, 1e-10)
    torch.testing.assert_close(squares, want, rtol=1e-10, atol=0)
    for backend in HERE:
        inputs = conv_filtered(x, case.layer, band, backend=backend)
        own = {k: v for k, v in case.sizes.items() if k != "padding"}
        grads, _ = ghost.conv_gradient(inputs, g, **own, backend=_taken(case, backend))
        got = spectral.whitened_norm(grads, matrix, backend=backend)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=0)
    kept = spectral.conv_norm(x, g, **sizes)
    whole = spectral.conv_norm(x, g, **(sizes | {"band": None}))
    assert bool((want <= kept * (1 + 1e-9)).all())
    assert bool((kept <= whole).all())


def test_retained_bins_of_a_line_are_those_of_a_plane_of_height_one() -> None:
    generator = torch.Generator().manual_seed(8)
    x, g = (torch.randn(3, c, n, generator=generator).double() for c, n in ((2, 9), (4, 7)))
    outs = []
    for band in (Band((9,), "shells", 0.5), Band((1, 9), "shells", 0.5)):
        *bins, _ = spectral.conv_bins(x, g, kernel_size=3, band=band)
        outs.append(x.new_zeros(4, 2, 3))
        spectral.bins_sum(bins[0], bins[1], x.new_ones(3), outs[-1], band=band)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-12, atol=1e-12)


def test_a_filter_before_the_padding_is_another_map() -> None:
    """Negative control of the filter route: it would be off by more than a tenth."""
    case = replace(PLAIN, groups=1)
    x, g = case.operands(3, torch.float64)
    band = case.band()
    want = taps(case, through(band, correlation_map(case, x, g))).sum(0)
    unpadded = Band(case.input, "shells", 0.4)
    inputs = spectral.filtered(x, padding=(0, 0), rows=case.input, band=unpadded)
    out = torch.zeros_like(want)
    ghost.conv_sum(inputs, g, torch.ones(3, dtype=x.dtype), out, **case.sizes)
    assert float((out - want).norm() / want.norm()) > 0.1


def test_groups_add_products_and_do_not_multiply_sums() -> None:
    x, g = PLAIN.operands(3, torch.float64)
    sizes = PLAIN.sizes | {"size": PLAIN.size}
    want = squared(correlation_map(PLAIN, x, g))
    torch.testing.assert_close(spectral.conv_norm(x, g, **sizes), want, rtol=1e-12, atol=0)
    wrong = spectral.conv_norm(x, g, **(sizes | {"groups": 1}))
    assert bool((wrong > 1.1 * want).all())


def test_the_grid_matters_and_beyond_the_linear_one_does_not() -> None:
    """Nor does which of these the norm is computed on."""
    small = replace(PLAIN, grid="padded", groups=1)
    x, g = small.operands(2, torch.float64)
    norms = []
    for grid in ("padded", "linear", "large"):
        case = replace(small, grid=grid)
        norms.append(spectral.conv_norm(x, g, **case.sizes, size=case.size))
    assert bool(((norms[0] - norms[1]).abs() > 0.005 * norms[1]).all())
    torch.testing.assert_close(norms[1], norms[2], rtol=1e-12, atol=0)


def test_strides_fold_where_they_divide_the_grid() -> None:
    case = Case(2, 3, (11, 9), (3, 3), 2, 1, 1, 1, "fast")
    assert Grid.of(case.layer, None).folds == (2, 2)
    assert Grid.of(replace(case, grid="padded").layer, case.band()).folds == (1, 1)
    assert [fast(n) for n in (1, 7, 34, 65, 66, 97)] == [1, 8, 36, 72, 72, 100]
    assert fast(10, 3) == 12


WIDER = {"triton": 2.0}
"""How much larger the eta of docs/spectral.md is for sums over a whole transform in float32."""


@every_backend
@pytest.mark.parametrize("case", [CASES[1], CASES[10], PLAIN, CASES[-3]], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_never_under_report(backend: str, case: Case, dtype: torch.dtype) -> None:
    if backend == "cpu" and dtype is torch.bfloat16:
        pytest.skip("16-bit operands are the reference's")
    x, g = case.operands(3, dtype)
    maps = correlation_map(case, x, g)
    sizes = case.sizes | {"size": case.size}
    for band in (None, case.band(), case.band("rectangle", 0.1)):
        want = squared(maps if band is None else through(band, maps))
        got = spectral.conv_norm(x, g, **sizes, band=band, backend=backend)
        assert bool((got >= want * (1 - 1e-14)).all())
        assert bool((got <= want * (1 + 1e-4 * WIDER.get(backend, 1.0))).all())


@every_backend
def test_a_norm_that_transforms_only_round_to_is_covered(backend: str) -> None:
    """Adversary: the spectra of x and g do not meet, so the computed product is rounding alone."""
    n = torch.arange(36, dtype=torch.float64)
    wave = [torch.cos(2 * math.pi * k * n / 36) for k in (3, 7)]
    x = (wave[0][:, None] * wave[0] * 1000).float()[None, None]
    g = torch.zeros(1, 1, 36, 36)
    g[0, 0] = (wave[1][:, None] * wave[1] * 1000).float()
    case = Case(1, 1, (36, 36), (1, 1), grid="padded")
    want = squared(correlation_map(case, x, g))
    got = spectral.conv_norm(x, g, **case.sizes, size=case.size, backend=backend)
    assert bool((got >= want).all())
    sizes = float((squared(x.double()) * squared(g.double())).sqrt())
    assert math.sqrt(float(got)) < 1e-3 * sizes * WIDER.get(backend, 1.0)
    assert math.sqrt(float(want)) < 1e-4 * sizes


def test_few_bins_are_multiplied_and_many_are_filtered() -> None:
    for case, kind, route in (
        (PLAIN, "shells", "bins"),
        (replace(PLAIN, kernel=(1, 1)), "all", "filter"),
    ):
        x, g = case.operands(1, torch.float32)
        band = Band(case.size, kind, 0.25 if kind == "shells" else 1.0)
        assert spectral.sum_route(x, g, **case.sizes, size=case.size, band=band) == route
        assert spectral.sum_route(x, g, **case.sizes, size=case.size) == "plain"


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_platforms_transforms_keep_their_bound_by_far(dtype: torch.dtype, device: str) -> None:
    """Errors are at most an eighth of eta, for random maps and for those of one frequency."""
    generator = torch.Generator().manual_seed(3)
    for size in ((1, 12), (5, 5), (8, 10), (18, 18), (36, 36), (65, 66), (72, 50)):
        n, m = (torch.arange(k, dtype=torch.float64) for k in size)
        wave = torch.cos(2 * math.pi * 2 * n / size[0])[:, None] * torch.cos(0.1 + m)
        maps = torch.stack([torch.randn(size, generator=generator, dtype=torch.float64), wave])
        maps = maps.to(dtype)
        # Exactly rounded sums are too slow: a matrix of exactly reduced angles, in float64.
        turns = [(torch.outer(k, k) % len(k)) / len(k) for k in (n, m)]
        down, across = (torch.exp(-2j * math.pi * t) for t in turns)
        want = (down @ maps.to(torch.complex128) @ across)[..., : size[1] // 2 + 1]
        got = torch.fft.rfft2(maps.to(device)).cpu()
        error = (got.to(torch.complex128) - want).abs().square().sum((1, 2))
        whole = maps.double().square().sum((1, 2)) * math.prod(size)
        unit = 8 if dtype is torch.float32 else 1  # the sums of the oracle round as well
        assert bool((error.sqrt() * unit <= transform_error(dtype, size) * whole.sqrt()).all())


@every_backend
def test_bins_carry_the_whole_norm_and_a_sum(backend: str) -> None:
    case = replace(PLAIN, grid="fast")
    x, g = case.operands(3, torch.float32)
    band = case.band()
    x_bins, g_bins, squares = spectral.conv_bins(x, g, **case.sizes, band=band, backend=backend)
    want = squared(correlation_map(case, x, g))
    assert bool((squares >= want).all())
    torch.testing.assert_close(squares, want, rtol=1e-4, atol=0)
    kept = len(band.weights)
    assert x_bins.shape == (kept, 3, 2, 4)
    assert g_bins.shape == (kept, 3, 2, 6)


@every_backend
def test_a_bad_sample_stays_alone(backend: str) -> None:
    case = CASES[9]
    x, g = case.operands(3, torch.float32)
    x[1, 0, 2, 3] = math.nan
    g[2, 0, 1, 1] = math.inf
    sizes = case.sizes | {"size": case.size}
    squares = spectral.conv_norm(x, g, **sizes, backend=backend)
    assert torch.isfinite(squares).tolist() == [True, False, False]
    band = case.band()
    one = [torch.zeros(4, 2, 3, 3) for _ in range(3)]
    factors = torch.tensor([0.5, 0.0, 0.0])
    for out, route in zip(one, ("filter", "bins"), strict=False):
        spectral.conv_sum(x, g, factors, out, **sizes, band=band, route=route)
    spectral.conv_sum(x[:1], g[:1], factors[:1], one[2], **sizes, band=band)
    for out in one[:2]:
        testing.assert_close("sum", out, one[2], 1e-5)
    empty = spectral.conv_norm(x[:0], g[:0], **sizes, backend=backend)
    assert empty.shape == (0,)
    nothing = spectral.conv_bins(x[:0], g[:0], **case.sizes, band=band, backend=backend)
    assert [t.numel() for t in nothing] == [0, 0, 0]
    spectral.conv_sum(x[:0], g[:0], factors[:0], one[2], **sizes, band=band)
    testing.assert_close("sum", one[2], one[0], 1e-5)


@pytest.mark.parametrize("isa", testing.available_isas())
def test_every_instruction_set_agrees(isa: str) -> None:
    case = Case(5, 9, (14, 13), (3, 3), 1, 1, 1, 1, "fast")
    x, g = case.operands(4, torch.float32)
    maps = correlation_map(case, x, g)
    results = []
    for threads in (1, 2):
        with testing.isa(isa), testing.threads(threads):
            results.append(spectral.conv_norm(x, g, **case.sizes, size=case.size, backend="cpu"))
    torch.testing.assert_close(results[0], squared(maps), rtol=1e-4, atol=0)
    assert torch.equal(results[0], results[1])


@every_backend
@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3, 4), (0, 1, 3, 4, 2), (0, 2, 3, 4, 1), (0, 3, 1, 2, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitened_norms_of_every_layout(
    backend: str, order: tuple[int, ...], dtype: torch.dtype
) -> None:
    if backend == "cpu" and order[1] == 3:
        pytest.skip("the kernel reads taps that stand together")
    generator = torch.Generator().manual_seed(0)
    for shape, rank in (((3, 5, 11, 3, 3), 9), ((2, 1, 1, 5, 4), 7), ((2, 17, 2, 1, 2), 1)):
        dense = torch.randn(shape, generator=generator, dtype=dtype).permute(order).contiguous()
        grads = dense.permute([order.index(i) for i in range(5)])
        matrix = torch.randn(rank, shape[3] * shape[4], generator=generator, dtype=torch.float64)
        want = squared(grads.double().flatten(3) @ matrix.T)
        got = spectral.whitened_norm(grads, matrix, backend=backend)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        assert bool((got >= want * (1 - 1e-14)).all())
    grads = torch.ones(2, 2, 2, 3, 3, dtype=dtype)
    grads[1, 0, 0, 0, 0] = math.nan
    got = spectral.whitened_norm(grads, torch.eye(9, dtype=torch.float64), backend=backend)
    assert torch.isfinite(got).tolist() == [True, False]
    got = spectral.whitened_norm(grads[:0], torch.eye(9, dtype=torch.float64), backend=backend)
    assert got.shape == (0,)


@every_backend
def test_whitening_in_float64_survives_a_narrow_band(backend: str) -> None:
    """The smallest coordinates are 1e-3 of the largest: float32 products would lose them."""
    case = Case(2, 3, (14, 14), (5, 5), 1, 0, 1, 1, "padded")
    band = case.band(keep=0.25)
    matrix = torch.tensor(spectral.whitening(band, (5, 5), (1, 1))[0])
    x, g = case.operands(2, torch.float32)
    grads, _ = ghost.conv_gradient(conv_filtered(x, case.layer, band), g, **case.sizes)
    want = squared(grads.double().flatten(3) @ matrix.T)
    got = spectral.whitened_norm(grads, matrix, backend=backend)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
    narrow = squared((grads.flatten(3) @ matrix.float().T).double())
    assert bool(((narrow - want).abs() > 1e-9 * want).any())


X, G, OUT, ONES = (
    torch.zeros(2, 4, 8, 8),
    torch.zeros(2, 6, 8, 8),
    torch.zeros(6, 4, 3, 3),
    torch.ones(2),
)
GEOMETRY: dict[str, Any] = {"kernel_size": 3, "padding": 1}
BAND = Band((10, 10), "shells", 0.5)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "three dimensions on a plane": (
        lambda: spectral.conv_norm(
            torch.zeros(1, 1, 4, 4, 4), torch.zeros(1, 1, 4, 4, 4), kernel_size=1, size=(4, 4)
        ),
        "size",
    ),
    "the authors' slice of a volume": (lambda: Band((4, 4, 4), "authors_slice", 0.5), "kind"),
    "a small grid": (lambda: spectral.conv_norm(X, G, **GEOMETRY, size=(10, 9)), "size"),
    "a grid of one number": (lambda: spectral.conv_norm(X, G, **GEOMETRY, size=(10,)), "size"),
    "another band": (
        lambda: spectral.conv_norm(X, G, **GEOMETRY, size=(12, 12), band=BAND),
        "band",
    ),
    "no band of bins": (
        lambda: spectral.conv_bins(X, G, **GEOMETRY, band=Band((9, 10), "all")),
        "size",
    ),
    "another band's bins": (
        lambda: spectral.bins_sum(
            torch.zeros(7, 2, 2, 4), torch.zeros(7, 2, 2, 6), ONES, OUT, band=BAND
        ),
        "band",
    ),
    "an unknown route": (
        lambda: spectral.conv_sum(X, G, ONES, OUT, **GEOMETRY, size=(10, 10), route="fast"),
        "route",
    ),
    "a plain route with a band": (
        lambda: spectral.conv_sum(
            X, G, ONES, OUT, **GEOMETRY, size=(10, 10), band=BAND, route="plain"
        ),
        "route",
    ),
    "factors of another batch": (
        lambda: spectral.conv_sum(X, G, torch.ones(3), OUT, **GEOMETRY, size=(10, 10), band=BAND),
        "factors",
    ),
    "a filter on a small grid": (
        lambda: spectral.filtered(X, padding=(1, 1), rows=(11, 10), band=BAND),
        "band",
    ),
    "a negative padding": (
        lambda: spectral.filtered(X, padding=(-1, 1), rows=(10, 10), band=BAND),
        "padding",
    ),
    "a filter of vectors": (
        lambda: spectral.filtered(torch.zeros(3, 4), padding=(0,), rows=(4,), band=BAND),
        "x",
    ),
    "a matrix of other taps": (
        lambda: spectral.whitened_norm(torch.zeros(1, 2, 2, 3, 3), torch.eye(4).double()),
        "matrix",
    ),
    "gradients with gaps": (
        lambda: spectral.whitened_norm(torch.zeros(2, 2, 2, 3, 4)[..., :3], torch.eye(9).double()),
        "grads",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case: str) -> None:
    call, name = BAD[case]
    with pytest.raises(InvalidInput) as refused:
        call()
    assert refused.value.name == name
