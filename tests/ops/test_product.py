"""The matrix product of linear layers: against float64, for every layout, size and thread count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product as pairs
from types import SimpleNamespace

import pytest
import torch

import dpkern
from dpkern.ops import product, testing
from tests.ops.backends.every_backend import every_backend

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}
SIZES = ((1, 1), (7, 3), (6, 8), (12, 33), (13, 256), (49, 257), (100, 513))
COLUMNS = (1, 2, 3, 4, 5, 31, 32, 64, 129)


@contextmanager
def _kernel() -> Iterator[None]:
    """The compiled kernel, on processors where torch's library is faster as well."""
    from dpkern.ops.backends import cpu

    with cpu.use_own_products(True):
        yield


def _operands(
    rows: int, inner: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + 100 * inner + columns)
    x = torch.randn(rows, inner, generator=generator, dtype=dtype)
    w = torch.randn(inner, columns, generator=generator, dtype=dtype)
    return x, w, torch.randn(columns, generator=generator, dtype=dtype)


@pytest.mark.parametrize(
    "isa", [i for i in testing.available_isas() if i in ("baseline", "avx2", "avx512", "amx")]
)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_the_kernel_agrees_with_float64(isa: str, dtype: torch.dtype) -> None:
    for (rows, inner), columns in pairs(SIZES, COLUMNS):
        x, w, bias = _operands(rows, inner, columns, dtype)
        sizes = x.double().abs() @ w.double().abs() + bias.double().abs()
        for weight, shift in pairs((w, w.t().contiguous().t()), (None, bias)):
            want = x.double() @ weight.double() + (0 if shift is None else shift.double())
            results = []
            for threads in (1, 2):
                with testing.isa(isa), testing.threads(threads), _kernel():
                    results.append(product.matmul(x, weight, shift, backend="cpu"))
            error = (results[0].double() - want).abs() / sizes
            assert float(error.max()) < ROUNDING[dtype], (rows, inner, columns)
            assert torch.equal(results[0], results[1])


@every_backend
@pytest.mark.parametrize("shape", [(0, 4, 4), (5, 0, 4), (5, 0, 40), (5, 4, 0)])
def test_empty_products(backend: str, shape: tuple[int, int, int]) -> None:
    x, w, bias = _operands(*shape, torch.float32)
    with _kernel():
        got = product.matmul(x, w, bias, backend=backend)
    torch.testing.assert_close(got, x @ w + bias)


@every_backend
@pytest.mark.parametrize(("inner", "columns"), [(40, 50), (43, 1), (43, 3), (5, 2)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_never_meet(backend: str, inner: int, columns: int, value: float) -> None:
    x, w, bias = _operands(30, inner, columns, torch.float32)
    for place in (3, -1, -5):
        spoilt = x.clone()
        spoilt[7, place] = value
        with _kernel():
            got = product.matmul(spoilt, w, bias, backend=backend)
        assert torch.isfinite(got).all(dim=1).tolist() == [row != 7 for row in range(30)]
        assert torch.equal(got[7].isnan(), (spoilt @ w + bias)[7].isnan())


def test_both_choices_train_alike() -> None:
    """A step through the kernel's products and one through torch's library."""
    from dpkern.ops.backends import cpu

    weights = []
    for own in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)
        ).double()
        data = torch.utils.data.TensorDataset(torch.randn(8, 20).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        made = dpkern.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=torch.utils.data.DataLoader(data, batch_size=8),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            sampling="fixed",
        )
        with cpu.use_own_products(own):
            for (x,) in made[2]:
                made[0](x).square().sum(1).mean().backward()
                made[1].step()
        weights.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-14)


@pytest.fixture
def made_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Says that Intel made this processor, or that somebody else did."""
    from dpkern.ops.backends import _product

    real = _product.extension()

    def pretend(intel: bool) -> None:
        fake = SimpleNamespace(is_intel=lambda: intel, isa=real.isa)
        monkeypatch.setattr(_product, "extension", lambda: fake)
        _product._faster.cache_clear()

    yield pretend
    _product._faster.cache_clear()


@pytest.mark.parametrize("intel", [True, False])
def test_maker_and_instructions_choose_who_multiplies(
    made_by: Callable[[bool], None], intel: bool
) -> None:
    from dpkern.ops.backends import _product, cpu

    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("the library is another one")
    made_by(intel)
    for isa in testing.available_isas():
        moderate = isa == "amx" if intel else isa != "baseline"
        large = isa == "amx" if intel else isa not in ("baseline", "avx2")
        with testing.isa(isa):
            own = _product.own()
            for weights, wanted in ((1 << 10, isa != "baseline"), (1 << 16, moderate)):
                assert _product.is_own(torch.float32, weights) is wanted
            assert _product.is_own(torch.float32, (1 << 16) + 1) is large
            for wanted in (True, False):
                with cpu.use_own_products(wanted):
                    for weights in (0, 1, 1 << 40):
                        assert _product.is_own(torch.float64, weights) is wanted
            assert _product.own() == own


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it() -> None:
    """Small products are the compiled kernel's whatever the number of rows."""
    if testing.available_isas()[-1] == "baseline":
        pytest.skip("the library multiplies")
    for inner, columns in ((20, 32), (1, 1024), (1024, 1), (31, 33), (340, 3), (7, 4), (5, 2)):
        x, w, bias = torch.randn(301, inner), torch.randn(inner, columns), torch.randn(columns)
        whole = product.matmul(x, w, bias)
        for first, last in ((0, 1), (1, 6), (7, 71), (300, 301)):
            assert torch.equal(product.matmul(x[first:last].clone(), w, bias), whole[first:last])


needs_tiles = pytest.mark.skipif(
    "amx" not in testing.available_isas(), reason="the processor has no tiles of bfloat16"
)


@needs_tiles
def test_products_by_tiles_are_as_exact_as_those_of_floats() -> None:
    """On numbers whose three parts are all as large as they can be, of one sign or of any."""
    generator = torch.Generator().manual_seed(0)
    worst = 1 + 2.0**-8 - 2.0**-16 - 2.0**-23
    for rows, inner, columns in ((33, 40, 50), (16, 1100, 32), (70, 513, 8), (5, 32, 4200)):
        for signs in (False, True):
            x, w = torch.full((rows, inner), worst), torch.full((inner, columns), worst)
            if signs:
                x *= torch.randn(rows, inner, generator=generator).sign()
                w *= torch.randn(inner, columns, generator=generator).sign()
            got = product.matmul(x, w, backend="cpu").double()
            error = (got - x.double() @ w.double()).abs()
            blocks = -(-inner // 32)
            bound = 2.0**-22 + (6 * blocks + 17) * 2.0**-24
            assert float(error.max()) <= bound * inner * worst**2


@needs_tiles
@pytest.mark.parametrize("columns", [40, 300])
def test_rows_beyond_the_largest_bfloat16_number(columns: int) -> None:
    """They are multiplied as before, and no other row becomes another one by that."""
    x, w, bias = _operands(50, 70, columns, torch.float32)
    usual = product.matmul(x, w, bias, backend="cpu")
    x[3, 5], x[3, 6], x[20, 60], x[49, 0] = 3.4e38, -3.4e38, math.inf, math.nan
    w[5], w[6], w[60, 1] = 1e-3, 1e-3, 0
    plain = product.matmul(x, w, bias, backend="cpu")
    with testing.isa("avx512"), _kernel():
        want = product.matmul(x, w, bias, backend="cpu")
    for row in (3, 20, 49):
        torch.testing.assert_close(plain[row], want[row], equal_nan=True)
    x[3, 5:7], x[20, 60], x[49, 0] = 0, 0, 0
    others = [row for row in range(50) if row not in (3, 20, 49)]
    assert torch.equal(product.matmul(x, w, bias, backend="cpu")[others], plain[others])
    assert torch.isfinite(plain[others]).all()
    assert torch.isfinite(usual).all()
    w[7, 9] = -math.inf
    with testing.isa("avx512"), _kernel():
        want = product.matmul(x, w, bias, backend="cpu")
    torch.testing.assert_close(product.matmul(x, w, bias, backend="cpu"), want, equal_nan=True)


@needs_tiles
def test_a_row_of_a_product_by_tiles_depends_on_nothing_else() -> None:
    x, w, bias = _operands(310, 600, 300, torch.float32)
    for weight in (w, w.t().contiguous().t()):
        whole = product.matmul(x, weight, bias, backend="cpu")
        for rows in (slice(0, 1), slice(5, 12), slice(17, 130), slice(64, 96)):
            for threads in (1, 2):
                with testing.threads(threads):
                    part = product.matmul(x[rows].contiguous(), weight, bias, backend="cpu")
                assert torch.equal(part, whole[rows])
