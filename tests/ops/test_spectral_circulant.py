"""Norms, gradients and sums of block-circulant layers against plain sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.ops import spectral, testing
from dpkern.ops.spectral import Band
from tests.ops.spectral_cases import through

# B, T, q, p, d: one position; the Gram way; the way of the spectrum; odd and tiny blocks.
SHAPES = ((3, 1, 4, 2, 8), (2, 2, 5, 7, 8), (2, 9, 3, 2, 8), (2, 4, 2, 3, 5), (2, 2, 3, 1, 1))


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    batch, positions, ins, outs, block = shape
    generator = torch.Generator().manual_seed(block + positions)
    x = torch.randn(batch, positions, ins, block, generator=generator, dtype=torch.float64)
    g = torch.randn(batch, positions, outs, block, generator=generator, dtype=torch.float64)
    return x.to(dtype), g.to(dtype)


def gradients(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """``grad[b, i, j, u] = sum_t sum_a g[t, i, a] x[t, j, a + u]``."""
    shifts = [x.double().roll(-u, -1) for u in range(x.shape[-1])]
    parts = [torch.einsum("btia,btja->bij", g.double(), shifted) for shifted in shifts]
    return torch.stack(parts, -1)


def test_the_oracle_is_autograd() -> None:
    x, g = operands(SHAPES[1], torch.float64)
    w = torch.randn(7, 5, 8, dtype=torch.float64, requires_grad=True)
    index = (torch.arange(8)[None] - torch.arange(8)[:, None]) % 8  # W[r, s] = w[(s - r) mod d]
    dense = w[:, :, index]
    y = torch.einsum("ijrs,btjs->btir", dense, x)
    want = gradients(x, g).sum(0)
    testing.assert_close("gradient", torch.autograd.grad((y * g).sum(), w)[0], want, 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_gradients_and_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, g = operands(shape, dtype)
    want = gradients(x, g)
    rounding = 1e-5 if dtype is torch.float32 else 1e-12
    grads, squares = spectral.circulant_gradient(x, g)
    testing.assert_close("gradient", grads, want, rounding)
    torch.testing.assert_close(
        squares, grads.double().flatten(1).square().sum(1), rtol=1e-13, atol=0
    )
    factors = torch.tensor([0.5, -2.0, 0.0][: len(x)], dtype=dtype)
    block = shape[-1]
    for band in (None, Band((block,), "shells", 0.4), Band((block,), "authors_slice", 0.5)):
        if band is not None and block == 1:
            continue
        maps = want if band is None else _filtered(band, want)
        got = spectral.circulant_norm(x, g, band=band)
        true = maps.flatten(1).square().sum(1)
        assert bool((got >= true * (1 - 1e-14)).all())
        torch.testing.assert_close(got, true, rtol=1e-5, atol=0)
        out = torch.ones(shape[3], shape[2], block, dtype=dtype)
        spectral.circulant_sum(x, g, factors, out, band=band)
        total = 1 + torch.einsum("b,b...->...", factors.double(), maps)
        testing.assert_close("sum", out, total, rounding)


def _filtered(band: Band, maps: torch.Tensor) -> torch.Tensor:
    plane = through(Band((1, *band.size), "all"), maps[..., None, :])
    assert torch.allclose(plane[..., 0, :], maps)  # all frequencies: the identity
    response = torch.tensor(band.response)
    total = torch.zeros_like(maps)
    for u in range(maps.shape[-1]):
        total += response[u] * maps.roll(u, -1)
    return total


def test_one_product_per_frequency_is_wrong_for_several_positions() -> None:
    """Negative control: what is exact at one position is far off at nine."""
    for shape, exact in ((SHAPES[0], True), (SHAPES[2], False)):
        x, g = operands(shape, torch.float64)
        xs, gs = (torch.fft.fft(t).abs().square().sum((1, 2)) for t in (x, g))
        product = (xs * gs).sum(1) / shape[-1]
        got = spectral.circulant_norm(x, g)
        assert bool(((product / got - 1).abs() < 1e-9).all()) is exact
        assert bool((product > 1.5 * got).all()) is not exact


def test_positions_may_cancel() -> None:
    """The Gram way of a gradient of nothing: never less than nothing, hardly more."""
    x, g = operands((2, 2, 5, 7, 8), torch.float64)
    x[:, 1] = x[:, 0]
    g[:, 1] = -g[:, 0]
    got = spectral.circulant_norm(x, g)
    sizes = x.flatten(1).square().sum(1) * g.flatten(1).square().sum(1)
    assert bool((got >= 0).all())
    assert bool((got < 1e-12 * sizes).all())


def test_a_bad_sample_stays_alone() -> None:
    x, g = operands((3, 2, 2, 2, 4), torch.float32)
    x[1, 0, 0, 0] = math.nan
    assert torch.isfinite(spectral.circulant_norm(x, g)).tolist() == [True, False, True]
    out = torch.zeros(2, 2, 4)
    spectral.circulant_sum(x, g, torch.tensor([1.0, 0.0, 1.0]), out)
    want = gradients(x, g)[[0, 2]].sum(0)
    testing.assert_close("sum", out, want, 1e-5)
    assert spectral.circulant_norm(x[:0], g[:0]).shape == (0,)
    assert spectral.circulant_gradient(x[:0], g[:0])[0].shape == (0, 2, 2, 4)
    spectral.circulant_sum(x, g, torch.zeros(3), out)
    testing.assert_close("sum", out, want, 1e-5)


X, G = torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 4, 8)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "another band": (lambda: spectral.circulant_norm(X, G, band=Band((4,), "all")), "band"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case: str) -> None:
    call, name = BAD[case]
    with pytest.raises(InvalidInput) as refused:
        call()
    assert refused.value.name == name
