"""Products of circulant blocks and weighted sums of their gradients, by the compiled kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dpkern.nn import functional
from dpkern.ops import spectral, testing
from dpkern.ops.backends._circulant import LARGEST_TABLE
from dpkern.ops.spectral import Band

pytestmark = pytest.mark.skipif(
    "cpu" not in testing.available_backends(), reason="the compiled kernels are not built"
)
BLOCKS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 64, LARGEST_TABLE)
SIZES = ((1, 1, 1), (5, 3, 2), (33, 17, 9), (70, 40, 33))
"""Samples, blocks of the input, blocks of the output."""
ROUNDINGS = 16


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=dtype, generator=generator)


def assert_close(got: Tensor, want: Tensor) -> None:
    error = (got.double() - want).norm() / want.norm()
    assert float(error) <= ROUNDINGS * torch.finfo(got.dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", BLOCKS)
def test_products_are_those_of_the_whole_matrix(block: int, dtype: torch.dtype) -> None:
    for (batch, ins, outs), convention in itertools.product(SIZES, functional.CONVENTIONS):
        x, weight = draw(batch, ins, block, dtype=dtype), draw(outs, ins, block, dtype=dtype)
        got = spectral.circulant_product(x, weight, convention=convention, backend="cpu")
        whole = functional.circulant_matrix(weight.double(), convention)
        assert_close(got.flatten(1), x.double().flatten(1) @ whole.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", BLOCKS)
def test_sums_are_those_of_transforms_in_float64(block: int, dtype: torch.dtype) -> None:
    for (batch, ins, outs), positions in itertools.product(SIZES, (1, 3)):
        x = draw(batch, positions, ins, block, dtype=dtype)
        g = draw(batch, positions, outs, block, dtype=dtype)
        factors = draw(batch, dtype=dtype).abs()
        factors[::3] = 0
        x[0], g[0] = float("nan"), float("inf")  # a sample of factor 0
        before = draw(outs, ins, block, dtype=dtype)
        for band in (None, Band((block,), "shells", 0.5)):
            out, want = before.clone(), before.double()
            spectral.circulant_sum(x, g, factors, out, band=band, backend="cpu")
            wide = x.double(), g.double(), factors.double()
            spectral.circulant_sum(*wide, want, band=band, backend="reference")
            assert_close(out, want)


def test_a_sample_has_the_same_bits_alone_and_with_any_threads() -> None:
    x, weight = draw(70, 17, 8, dtype=torch.float32), draw(9, 17, 8, dtype=torch.float32)
    g, factors = draw(70, 1, 9, 8, dtype=torch.float32), draw(70, dtype=torch.float32)
    results = []
    for threads in (1, 2):
        with testing.threads(threads):
            out = torch.zeros_like(weight)
            spectral.circulant_sum(x[:, None], g, factors, out, backend="cpu")
            results.append((spectral.circulant_product(x, weight, backend="cpu"), out))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    alone = spectral.circulant_product(x[33:34], weight, backend="cpu")
    assert torch.equal(alone, results[0][0][33:34])


@pytest.mark.parametrize("name", testing.available_isas())
def test_every_instruction_set(name: str) -> None:
    for block, dtype in itertools.product((3, 8, 31), (torch.float32, torch.float64)):
        x, weight = draw(37, 19, block, dtype=dtype), draw(10, 19, block, dtype=dtype)
        g, factors = draw(37, 1, 10, block, dtype=dtype), draw(37, dtype=dtype)
        out, want = torch.zeros_like(weight), torch.zeros_like(weight.double())
        with testing.isa(name):
            got = spectral.circulant_product(x, weight, backend="cpu")
            spectral.circulant_sum(x[:, None], g, factors, out, backend="cpu")
        assert_close(
            got.flatten(1), x.double().flatten(1) @ functional.circulant_matrix(weight.double()).T
        )
        wide = x[:, None].double(), g.double(), factors.double()
        spectral.circulant_sum(*wide, want, backend="reference")
        assert_close(out, want)


def test_small_and_large_numbers_stay_themselves() -> None:
    """Values at the ends of the range, denormals included, are neither lost nor made infinite."""
    weight = torch.zeros(2, 2, 8)
    weight[:, :, 0] = torch.eye(2)  # the identity
    for size in (2.0**-140, 2.0**-126, 2.0**120):
        x = draw(5, 2, 8, dtype=torch.float32).clamp(-2, 2) * size
        got = spectral.circulant_product(x, weight, backend="cpu")
        assert float((got.double() - x.double()).abs().max()) <= 8 * max(2.0**-24 * size, 2.0**-149)


def test_what_is_not_finite_stays_in_its_sample() -> None:
    x, weight = draw(40, 3, 8, dtype=torch.float32), draw(4, 3, 8, dtype=torch.float32)
    want = spectral.circulant_product(x, weight, backend="cpu")
    x[7, 1, 2] = float("nan")
    got = spectral.circulant_product(x, weight, backend="cpu")
    assert not bool(torch.isfinite(got[7]).any())
    kept = torch.arange(40) != 7
    assert torch.equal(got[kept], want[kept])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own duals
@pytest.mark.parametrize("convention", functional.CONVENTIONS)
def test_a_layer_gives_the_same_with_and_without_derivatives(convention: str) -> None:
    x, weight = draw(6, 40, 16, dtype=torch.float32), draw(20, 40, 16, dtype=torch.float32)
    plain = functional.circulant_product(x, weight, convention)
    with_graph = functional.circulant_product(x.requires_grad_(), weight, convention)
    assert with_graph.requires_grad
    assert_close(plain, with_graph.detach().double())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), x.detach())
        product = functional.circulant_product(dual, weight, convention)
        assert torch.autograd.forward_ad.unpack_dual(product).tangent is not None
    rows = torch.vmap(lambda t: functional.circulant_product(t, weight, convention))(x.detach())
    assert_close(rows, with_graph.detach().double())


def test_larger_blocks_are_refused_by_name() -> None:
    x = draw(2, 1, LARGEST_TABLE + 1, dtype=torch.float32)
    assert spectral.circulant_product(x, x[:1]).shape == (2, 1, LARGEST_TABLE + 1)
    with pytest.raises(Exception, match=f"at most {LARGEST_TABLE} values"):
        spectral.circulant_product(x, x[:1], backend="cpu")
