"""The matrix product of linear layers: against float64, for every layout, size and thread count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product as pairs

import pytest
import torch

import dpkern
from dpkern.ops import product, testing
from tests.ops.backends.every_backend import every_backend

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}
SIZES = ((1, 1), (7, 3), (12, 33), (13, 256), (49, 257), (100, 513))
COLUMNS = (1, 5, 31, 32, 64, 129)


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
    "isa", [i for i in testing.available_isas() if i in ("baseline", "avx2", "avx512")]
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
@pytest.mark.parametrize("shape", [(0, 4, 4), (5, 0, 4), (5, 4, 0)])
def test_empty_products(backend: str, shape: tuple[int, int, int]) -> None:
    x, w, bias = _operands(*shape, torch.float32)
    with _kernel():
        got = product.matmul(x, w, bias, backend=backend)
    torch.testing.assert_close(got, x @ w + bias)


@every_backend
def test_rows_never_meet(backend: str) -> None:
    x, w, bias = _operands(30, 40, 50, torch.float32)
    x[7, 3] = math.nan
    with _kernel():
        got = product.matmul(x, w, bias, backend=backend)
    assert torch.isfinite(got).all(dim=1).tolist() == [row != 7 for row in range(30)]


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


def test_narrow_instructions_leave_products_to_the_library() -> None:
    from dpkern.ops.backends import cpu

    best = cpu._product.own()
    for isa in testing.available_isas():
        with testing.isa(isa):
            own = cpu._product.own()
            assert own is (best and isa.startswith("avx512"))
            with cpu.use_own_products(not own):
                assert cpu._product.own() is not own
            assert cpu._product.own() is own
