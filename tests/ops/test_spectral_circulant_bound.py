"""The compiled norm of circulant layers is never below the exact one, for deceptive operands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dpkern.ops import spectral, testing
from dpkern.ops.backends import _circulant
from dpkern.ops.spectral import Band

pytestmark = pytest.mark.skipif(
    "cpu" not in testing.available_backends(), reason="the compiled kernels are not built"
)
SIZES = ((3, 2, 1), (2, 3, 2), (33, 20, 2), (17, 9, 4), (4, 1, 3), (5, 4, 8), (1, 6, 9), (9, 3, 16))
SIZES += ((2, 2, 65),)
SAMPLES = 96


def deceptive(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Operands of all magnitudes; in half of the samples nearly nothing is left of the product."""
    ins, outs, block = sizes
    generator = torch.Generator().manual_seed(block)
    x, g = (
        torch.randn(SAMPLES, 1, n, block, generator=generator, dtype=torch.float64)
        for n in (ins, outs)
    )
    x[::2] = x[::2].mean(-1, keepdim=True)  # one frequency, which g hardly has
    g[::2] -= g[::2].mean(-1, keepdim=True)
    # Of doubles, those whose squared norm is a double too.
    tiny = -149 if dtype is torch.float32 else -220
    powers = torch.randint(tiny, 60, (2, SAMPLES), generator=generator).double()
    x, g = (t * torch.exp2(e).view(-1, 1, 1, 1) for t, e in zip((x, g), powers, strict=True))
    return x.to(dtype), g.to(dtype)


def exact(x: Tensor, g: Tensor, band: Band | None) -> np.ndarray:
    """Squared norms in 64-bit mantissas, whose rounding is far below the kernel's."""
    wide = [t.double().numpy().astype(np.longdouble) for t in (x, g)]
    block = x.shape[3]
    maps = [np.einsum("btia,btja->bij", wide[1], np.roll(wide[0], -u, -1)) for u in range(block)]
    if band is not None:
        response = [np.longdouble(r) for r in np.asarray(band.response).ravel()]
        maps = [
            sum(response[v] * maps[(u + v) % block] for v in range(block)) for u in range(block)
        ]
    squares: np.ndarray = sum(np.square(m).sum((1, 2)) for m in maps)
    return squares


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_norms_are_never_below(
    sizes: tuple[int, int, int], dtype: torch.dtype, filtered: bool
) -> None:
    if filtered and sizes[2] < 3:
        return
    band = Band((sizes[2],), "shells", 0.4) if filtered else None
    x, g = deceptive(sizes, dtype)
    got = spectral.circulant_norm(x, g, band=band, backend="cpu").numpy().astype(np.longdouble)
    true = exact(x, g, band)
    above = 1e-17 * true if filtered else 0.0  # the response itself is rounded
    assert np.all(got >= true - above)
    largest = [np.square(t.double().numpy().astype(np.longdouble)).sum((1, 2, 3)) for t in (x, g)]
    assert np.all(got - true <= 1e-9 * largest[0] * largest[1] + 2.0**-1070)


@pytest.mark.parametrize("sizes", [(33, 20, 2), (9, 3, 16)], ids=str)
def test_without_the_slack_they_are_below(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    kernel = _circulant.circulant_squares
    monkeypatch.setattr(
        _circulant, "circulant_squares", lambda x, g, weights, error: kernel(x, g, weights, 0.0)
    )
    x, g = deceptive(sizes, torch.float64)
    got = spectral.circulant_norm(x, g, backend="cpu").numpy().astype(np.longdouble)
    assert np.any(got < exact(x, g, None))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_sample_that_is_not_finite_has_no_finite_norm(value: float) -> None:
    x, g = deceptive((5, 4, 8), torch.float32)
    plain = spectral.circulant_norm(x, g, backend="cpu")
    x[3, 0, 1, 2] = value
    got = spectral.circulant_norm(x, g, backend="cpu")
    assert not got[3].isfinite()
    kept = torch.arange(SAMPLES) != 3
    assert torch.equal(got[kept], plain[kept])


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    x, g = deceptive((9, 3, 16), torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        plain = spectral.circulant_norm(x, g, backend="cpu")
        torch.set_num_threads(threads)
        assert torch.equal(spectral.circulant_norm(x, g, backend="cpu"), plain)
    finally:
        torch.set_num_threads(before)


def test_squares_that_leave_the_range_do_not_matter() -> None:
    x, g = (t.double() for t in deceptive((5, 4, 8), torch.float32))
    x, g = x / x.abs().amax((1, 2, 3), keepdim=True), g / g.abs().amax((1, 2, 3), keepdim=True)
    plain = spectral.circulant_norm(x, g, backend="cpu")
    moved = spectral.circulant_norm(x * 2.0**-600, g * 2.0**560, backend="cpu")
    assert torch.equal(moved, plain * 2.0**-80)
