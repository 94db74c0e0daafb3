"""Ghost ops of linear layers: against float64, and norms that are never below the exact square."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import pytest
import torch

from dpkern.base.dtypes import sum_dtype
from dpkern.base.errors import InvalidInput
from dpkern.ops import ghost, testing
from tests.ops.backends.every_backend import every_backend

POSITIONS = (0, 1, 2, 3, 7, 64, 129)
FEATURES = (1, 3, 10, 16, 17, 64, 130)
EXCESS = {torch.float32: 1e-4, torch.float64: 1e-10}
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}
TYPES = list(EXCESS)
ISAS = [isa for isa in testing.available_isas() if isa in ("baseline", "avx2", "avx512", "amx")]


def _operands(
    batch: int, positions: int, d: int, p: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch + 10 * positions + 1000 * d + 7 * p)
    a = torch.randn(batch, positions, d, generator=generator, dtype=dtype)
    return a, torch.randn(batch, positions, p, generator=generator, dtype=dtype) * 1e-3


def _gradients(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.bmm(g.double().transpose(1, 2), a.double())


def _sizes(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """``sum_t |g| outer |a|``: what rounding errors scale with."""
    return _gradients(a.abs(), g.abs())


@every_backend
@pytest.mark.parametrize("dtype", [*TYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("positions", [2, 5, 70])
def test_wide_odd_outputs(backend: str, positions: int, dtype: torch.dtype) -> None:
    """Devices fill such widths up, so that they are read 16 bytes at a time."""
    if dtype is torch.bfloat16 and backend == "cpu":
        pytest.skip("the CPU's kernels take wider operands")
    a, g = (x.to(dtype) for x in _operands(2, positions, 3, 1027))
    want, sizes = _gradients(a, g), _sizes(a, g)
    factors = torch.tensor([0.5, 2.0], dtype=torch.float64).to(sum_dtype(dtype))
    norms = ghost.linear_norm(a, g, backend=backend)
    true = want.square().sum((1, 2))
    assert (norms >= true * (1 - 1e-14)).all()
    assert (norms <= true * (1 + EXCESS.get(dtype, 5e-3))).all()
    grads, squares = ghost.linear_gradient(a, g, backend=backend)
    assert grads.shape == want.shape
    assert ((grads - want).abs() <= ROUNDING.get(dtype, 1e-5) * sizes).all()
    assert (squares >= grads.double().square().sum((1, 2)) * (1 - 1e-14)).all()
    total = torch.zeros(1027, 3, dtype=factors.dtype)
    ghost.linear_sum(a, g, factors, total, backend=backend)
    exact = torch.einsum("b,bpd->pd", factors.double(), want)
    limit = torch.einsum("b,bpd->pd", factors.double(), sizes)
    assert ((total - exact).abs() <= ROUNDING.get(dtype, 1e-5) * limit).all()


def _shapes() -> Iterator[tuple[int, int, int, int]]:
    """All pairs of positions and inputs, outputs and batch sizes in turn."""
    for i, (t, d) in enumerate(product(POSITIONS, FEATURES)):
        yield i % 5, t, d, FEATURES[(i + i // len(FEATURES)) % len(FEATURES)]


def _check_norm(norms: torch.Tensor, a: torch.Tensor, g: torch.Tensor, where: str) -> None:
    true = _gradients(a, g).square().sum((1, 2))
    assert norms.dtype is torch.float64
    assert norms.shape == true.shape
    assert (norms >= true * (1 - 1e-14)).all(), where
    assert (norms <= true * (1 + EXCESS[a.dtype])).all(), where


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES)
def test_kernels_agree_with_float64(isa: str, dtype: torch.dtype) -> None:
    for shape in _shapes():
        a, g = _operands(*shape, dtype)
        want, sizes = _gradients(a, g), _sizes(a, g)
        factors = torch.rand(shape[0], dtype=dtype) + 0.5
        results = []
        for threads in (1, 2):
            with testing.isa(isa), testing.threads(threads):
                for route in ("auto", "gram", "direct"):
                    norms = ghost.linear_norm(a, g, route=route, backend="cpu")
                    _check_norm(norms, a, g, f"{route} {shape}")
                    results.append(norms)
                grads, squares = ghost.linear_gradient(a, g, backend="cpu")
                total = torch.ones(g.shape[2], a.shape[2], dtype=dtype)
                ghost.linear_sum(a, g, factors, total, backend="cpu")
            assert ((grads - want).abs() <= ROUNDING[dtype] * sizes).all(), shape
            stored = grads.double().square().sum((1, 2))
            assert (squares >= stored * (1 - 1e-14)).all(), shape
            assert (squares <= stored * (1 + EXCESS[dtype])).all(), shape
            exact = 1 + torch.einsum("b,bpd->pd", factors.double(), want)
            limit = 1 + torch.einsum("b,bpd->pd", factors.double(), sizes)
            assert ((total - exact).abs() <= ROUNDING[dtype] * limit).all(), shape
            results += [grads, squares, total]
        half = len(results) // 2
        for one, two in zip(results[:half], results[half:], strict=True):
            assert torch.equal(one, two), f"{shape}: differs between one thread and two"


@pytest.mark.parametrize("dtype", TYPES)
def test_reference_agrees_with_float64(dtype: torch.dtype) -> None:
    for shape in _shapes():
        a, g = _operands(*shape, dtype)
        _check_norm(ghost.linear_norm(a, g, backend="reference"), a, g, str(shape))
        grads, squares = ghost.linear_gradient(a, g, backend="reference")
        assert ((grads - _gradients(a, g)).abs() <= ROUNDING[dtype] * _sizes(a, g)).all()
        assert (squares >= grads.double().square().sum((1, 2)) * (1 - 1e-14)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(64, 64, 200, 100), (3, 300, 33, 65), (300, 1, 96, 10)])
def test_large_sums_agree_with_the_reference(
    isa: str, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    a, g = _operands(*shape, dtype)
    factors = torch.rand(shape[0], dtype=dtype)
    totals = []
    for threads in (1, 2, 3):
        total = torch.zeros(shape[3], shape[2], dtype=dtype)
        with testing.isa(isa), testing.threads(threads):
            ghost.linear_sum(a, g, factors, total, backend="cpu")
        totals.append(total)
    want = torch.einsum("b,bpd->pd", factors.double(), _gradients(a, g))
    testing.assert_close("sum", totals[0], want, ROUNDING[dtype])
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[0], totals[2])


def _cancelling(noise: float) -> tuple[torch.Tensor, torch.Tensor, list[Fraction]]:
    """Nearly equal inputs, output gradients that sum to zero, and the exact squares."""
    generator = torch.Generator().manual_seed(5)
    shape = (12, 64, 48)
    a_units = (2**20 * (1 + noise * torch.randn(shape, generator=generator))).round().long()
    g_units = torch.randint(-2000, 2000, shape, generator=generator)
    g_units[:, -1] -= g_units.sum(1)
    grads = torch.einsum("btp,btd->bpd", g_units, a_units)  # int64: exact
    squares = [Fraction(sum(x * x for x in one.flatten().tolist()), 2**64) for one in grads]
    a, g = a_units.float() * 2.0**-20, g_units.float() * 2.0**-12
    assert torch.equal(a.double() * 2**20, a_units.double())
    assert torch.equal(g.double() * 2**12, g_units.double())
    return a, g, squares


@pytest.mark.parametrize("noise", [1e-3, 1e-5])
@pytest.mark.parametrize("route", ["auto", "gram", "direct"])
@pytest.mark.parametrize("isa", ISAS)
def test_norms_are_never_below_the_exact_square(isa: str, route: str, noise: float) -> None:
    a, g, squares = _cancelling(noise)
    with testing.isa(isa):
        norms = ghost.linear_norm(a, g, route=route, backend="cpu").tolist()
    reference = ghost.linear_norm(a, g, route=route, backend="reference").tolist()
    for norm, plain, square in zip(norms, reference, squares, strict=True):
        assert Fraction(norm) >= square
        assert Fraction(plain) >= square
        assert norm <= float(square) * (1 + EXCESS[torch.float32])
    kept, stored = ghost.linear_gradient(a, g)
    assert (stored >= kept.double().square().sum((1, 2))).all()


def test_a_plain_float32_gram_sum_does_under_report() -> None:
    # The control: without its bounds the Gram route fails the test above.
    a, g, squares = _cancelling(1e-3)
    gram = torch.bmm(a, a.transpose(1, 2)) * torch.bmm(g, g.transpose(1, 2))
    plain = gram.sum((1, 2)).tolist()
    assert any(Fraction(norm) < square for norm, square in zip(plain, squares, strict=True))


@pytest.mark.parametrize("route", ["auto", "gram", "direct"])
@pytest.mark.parametrize(
    "scales", [(1e25, 1e20), (1e12, 1e15), (1e-30, 1e-25), (1e-20, 1e15), (1e37, 1e-38)]
)
@every_backend
def test_extreme_numbers(backend: str, route: str, scales: tuple[float, float]) -> None:
    a, g = _operands(3, 9, 20, 30)
    a, g = a * scales[0], g * scales[1]
    _check_norm(ghost.linear_norm(a, g, route=route, backend=backend), a, g, route)
    grads, squares = ghost.linear_gradient(a, g, backend=backend)
    stored = grads.double().square().sum((1, 2))
    finite = torch.isfinite(stored)
    assert torch.equal(torch.isfinite(squares), finite)
    assert (squares >= stored * (1 - 1e-14))[finite].all()
    assert (squares <= stored * (1 + EXCESS[torch.float32]))[finite].all()


def test_only_one_position_has_rank_one() -> None:
    with pytest.raises(InvalidInput, match="rank_one with T = 3") as refused:
        ghost.linear_norm(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), route="rank_one")
    assert refused.value.name == "route"
