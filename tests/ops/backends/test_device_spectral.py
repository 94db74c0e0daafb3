"""What devices run where torch's libraries are the kernels, on CPU tensors: same numbers as the
references, from above where they are norms, and no wait for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dpkern.base import dispatch
from dpkern.ops import _products, spectral, testing, update
from dpkern.ops.backends import _library
from dpkern.ops.spectral import Band
from dpkern.ops.update import Ball, Box, Projection, Simplex
from tests.ops.spectral_cases import CASES, VOLUMES, Case, correlation_map, taps, through
from tests.ops.test_whitened_bins import exact, matrices
from tests.step.no_wait import NoWait

FOLDED = Case(2, 3, (11, 9), (3, 3), 2, 1, 1, 1, "fast")
every_case = pytest.mark.parametrize(
    "case", [FOLDED, *CASES[::3], CASES[-1], *VOLUMES], ids=lambda case: case.name
)


@pytest.fixture(autouse=True)
def on_cpu_tensors() -> Iterator[None]:
    """The library's forms as the backend ``cuda``, whatever is installed."""
    kernels = [(name, run, lambda *_, **__: None) for name, run in _library.KERNELS]
    with dispatch.replaced("cuda", kernels):
        yield


def squared(maps: torch.Tensor) -> torch.Tensor:
    return maps.flatten(1).square().sum(1)


@every_case
def test_norms_and_sums_are_those_of_the_correlation_map(case: Case) -> None:
    x, g = case.operands(3, torch.float32)
    maps = correlation_map(case, x, g)
    sizes, band = case.sizes | {"size": case.size}, case.band()
    filtered = through(band, maps)
    for chosen, want in ((None, maps), (band, filtered)):
        got = spectral.conv_norm(x, g, **sizes, band=chosen, backend="cuda")
        assert bool((got >= squared(want) * (1 - 1e-14)).all())
        assert bool((got <= squared(want) * (1 + 1e-4)).all())
    x_bins, g_bins, squares = spectral.conv_bins(x, g, **case.sizes, band=band, backend="cuda")
    want_bins = spectral.conv_bins(x, g, **case.sizes, band=band, backend="reference")
    testing.assert_close("bins of x", x_bins, want_bins[0], 1e-5)
    testing.assert_close("bins of g", g_bins, want_bins[1], 1e-5)
    assert bool((squares >= squared(maps) * (1 - 1e-14)).all())
    for matrix in matrices(case, band):
        *_, squares = spectral.whitened_bins(x, g, matrix, **case.sizes, band=band, backend="cuda")
        want = exact(case, x, g, matrix, band).square()
        assert bool((squares >= want * (1 - 1e-12)).all())
        assert bool((squares <= want * (1 + 5e-3)).all())
    own = {"dilation": case.dilation, "groups": case.groups, "band": band, "backend": "cuda"}
    factors = torch.tensor([0.7, 0.0, -0.3])
    x_bins[:, 1] = math.nan  # factor 0: nothing of it
    g_bins[:, 1] = math.inf
    total = torch.einsum("b,b...->...", factors.double()[[0, 2]], taps(case, filtered)[[0, 2]])
    out = torch.ones_like(total, dtype=torch.float32)
    spectral.bins_sum(x_bins, g_bins, factors, out, **own)
    testing.assert_close("sum", out, 1 + total, 1e-5)


def test_norms_of_sixteen_bits_never_under_report() -> None:
    for case in (FOLDED, CASES[1], CASES[10]):
        x, g = case.operands(3, torch.bfloat16)
        want = squared(correlation_map(case, x, g))
        got = spectral.conv_norm(x, g, **case.sizes, size=case.size, backend="cuda")
        assert bool((got >= want * (1 - 1e-14)).all())
        assert bool((got <= want * (1 + 1e-4)).all())


def test_a_norm_that_transforms_only_round_to_is_covered() -> None:
    """Adversary: the spectra of x and g do not meet, so the computed product is rounding alone."""
    n = torch.arange(36, dtype=torch.float64)
    x, g = (
        torch.outer(wave, wave).mul(1000).float()[None, None]
        for wave in (torch.cos(2 * math.pi * k * n / 36) for k in (3, 7))
    )
    case = Case(1, 1, (36, 36), (1, 1), grid="padded")
    want = squared(correlation_map(case, x, g))
    got = spectral.conv_norm(x, g, **case.sizes, size=case.size, backend="cuda")
    assert bool((got >= want).all())
    assert math.sqrt(float(got)) < 1e-3 * float((squared(x) * squared(g)).sqrt())


SHAPES = ((3, 1, 4, 2, 8), (2, 2, 5, 7, 8), (2, 9, 3, 2, 8), (2, 4, 2, 3, 5))
"""B, T, q, p, d: one position, the Gram way, the way of the spectrum, odd blocks."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_circulant_norms_and_sums(shape: tuple[int, ...]) -> None:
    batch, positions, ins, outs, block = shape
    generator = torch.Generator().manual_seed(block)
    x = torch.randn(batch, positions, ins, block, generator=generator)
    g = torch.randn(batch, positions, outs, block, generator=generator)
    factors = torch.tensor([0.5, 0.0, -2.0][:batch])
    for band in (None, Band((block,), "shells", 0.4)):
        exact = spectral.circulant_norm(x.double(), g.double(), band=band, backend="reference")
        got = spectral.circulant_norm(x, g, band=band, backend="cuda")
        assert bool((got >= exact * (1 - 1e-12)).all())
        torch.testing.assert_close(got, exact, rtol=1e-3, atol=0)
        outs_ = [torch.ones(outs, ins, block) for _ in range(2)]
        spectral.circulant_sum(x, g, factors, outs_[0], band=band, backend="reference")
        x[1], g[1] = math.nan, math.inf
        spectral.circulant_sum(x, g, factors, outs_[1], band=band, backend="cuda")
        x[1], g[1] = x[0], g[0]
        testing.assert_close("sum", outs_[1], outs_[0], 1e-5)


def test_circulant_positions_that_cancel_are_not_under_reported() -> None:
    """The rounding of transforms is all that is left, and need not cancel."""
    generator = torch.Generator().manual_seed(2)
    for ins, outs in ((5, 7), (1, 1)):
        x = torch.randn(1, 1, ins, 8, generator=generator)
        g = torch.randn(1, 1, outs, 8, generator=generator)
        x, g = torch.cat([x, x * (1 + 2.0**-20)], 1), torch.cat([g, -g], 1)
        exact = spectral.circulant_norm(x.double(), g.double(), backend="reference")
        got = spectral.circulant_norm(x, g, backend="cuda")
        assert bool((got >= exact).all())
        assert float(got.sqrt()) < 1e-4 * float(x.norm() * g.norm())


SETS: list[Projection] = [Ball(0.7), Ball(1e3), Box(-0.2, 0.5), Simplex(3.0)]


def _calls() -> dict[str, Callable[[], Any]]:
    x, g = FOLDED.operands(3, torch.float32)
    band, sizes = FOLDED.band(), FOLDED.sizes | {"size": FOLDED.size}
    x_bins, g_bins, _ = spectral.conv_bins(x, g, **FOLDED.sizes, band=band, backend="reference")
    factors, out = torch.tensor([1.0, 0.0, 2.0]), torch.zeros(3, 2, 3, 3)
    blocks = torch.randn(3, 2, 2, 8)
    grads, eye = torch.randn(3, 2, 2, 3, 3), torch.eye(9, dtype=torch.float64)
    shells = Band(FOLDED.size, "shells", 0.4)
    rectangle = Band(FOLDED.size, "rectangle", 0.4)
    rows = {"padding": (1, 1), "rows": FOLDED.layer.least}
    to = {"backend": "cuda"}
    return {
        "spectral.conv_norm": lambda: spectral.conv_norm(x, g, **sizes, band=band, **to),
        "spectral.conv_bins": lambda: spectral.conv_bins(x, g, **FOLDED.sizes, band=band, **to),
        "spectral.whitened_bins": lambda: spectral.whitened_bins(
            x, g, eye, **FOLDED.sizes, band=band, **to
        ),
        "spectral.bins_sum": lambda: spectral.bins_sum(
            x_bins, g_bins, factors, out, band=band, **to
        ),
        "spectral.filtered": lambda: [
            spectral.filtered(x, **rows, band=b, **to) for b in (shells, rectangle)
        ],
        "spectral.whitened_norm": lambda: spectral.whitened_norm(grads, eye, **to),
        "spectral.circulant_norm": lambda: spectral.circulant_norm(blocks, blocks, **to),
        "spectral.circulant_product": lambda: spectral.circulant_product(
            blocks.flatten(0, 1), blocks[0], **to
        ),
        "spectral.circulant_gradient": lambda: spectral.circulant_gradient(blocks, blocks, **to),
        "spectral.circulant_sum": lambda: spectral.circulant_sum(
            blocks, blocks, factors, torch.zeros(2, 2, 8), **to
        ),
        "update.project": lambda: [
            update.project([torch.ones(3), torch.ones(())], onto, **to) for onto in SETS
        ],
    }


@pytest.mark.parametrize("name", [n for n, _ in _library.KERNELS if n != "product.matmul"])
def test_nothing_waits_for_the_device(name: str) -> None:
    call = _calls()[name]
    call()  # constants are made once
    with NoWait():
        call()


def test_a_wait_is_noticed() -> None:
    factors = torch.tensor([1.0, 0.0])
    for waiting in (
        lambda: bool((factors != 0).all()),
        lambda: factors[factors != 0],
        lambda: factors[torch.tensor(1)],
    ):
        with NoWait(), pytest.raises(AssertionError, match="the host would wait"):
            waiting()


def test_products_are_wide_where_tf32_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    for allowed, kind in (
        ("none", torch.float32),
        ("ieee", torch.float32),
        ("tf32", torch.float64),
    ):
        monkeypatch.setattr(
            type(torch.backends.cuda.matmul), "fp32_precision", property(lambda _, a=allowed: a),
            raising=False,
        )  # fmt: skip
        assert _products.exact(torch.float32, device) is kind
        assert _products.exact(torch.float32, torch.device("cpu")) is torch.float32
        assert _products.exact(torch.float64, device) is torch.float64


@pytest.mark.parametrize(
    ("allowed", "kind"),
    [("none", torch.float32), ("ieee", torch.float32)]
    + [(short, torch.float64) for short in ("tf32", "bf16")],
)
def test_products_are_wide_where_a_processor_may_shorten_them(
    monkeypatch: pytest.MonkeyPatch, allowed: str, kind: torch.dtype
) -> None:
    library = type(torch.backends.mkldnn.matmul)
    monkeypatch.setattr(library, "fp32_precision", property(lambda _: allowed), raising=False)
    assert _products.exact(torch.float32, torch.device("cpu")) is kind
    assert _products.exact(torch.float64, torch.device("cpu")) is torch.float64
