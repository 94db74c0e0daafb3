"""Materialized gradients on devices by the library: norms of what is stored, however it rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpkern.ops import ghost, testing
from dpkern.ops.backends import _device_products as products
from tests.ops.backends.every_backend import PARAMETERS, running

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
on_cuda = pytest.mark.parametrize("name", [p for p in PARAMETERS if p.values[0] == "cuda"])


def operands(
    batch: int, positions: int, d: int, p: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(positions + d + p)
    a, g = (torch.randn(batch, positions, n, generator=generator) for n in (d, p))
    return a.to(dtype), (1e-2 * g).to(dtype)


@on_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 7, 33, 257), (2, 1, 5, 4), (0, 3, 4, 5), (2, 0, 4, 5)])
def test_gradients_and_their_squares(
    name: str, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    a, g = operands(*shape, dtype)
    with running(name):
        grads, squares = ghost.linear_gradient(a, g, backend=name)
    want = torch.bmm(g.double().transpose(1, 2), a.double())
    sizes = torch.bmm(g.double().abs().transpose(1, 2), a.double().abs())
    unit = 1e-13 if dtype is torch.float64 else 1e-6
    assert grads.is_contiguous()
    assert grads.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert ((grads - want).abs() <= unit * sizes).all()
    stored = grads.double().square().sum((1, 2))
    assert (squares >= stored).all()
    assert (squares <= stored * (1 + 1e-11)).all()


@on_cuda
def test_norms_are_of_what_is_stored_and_not_of_what_was_meant(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that rounds its products badly, as TF32 does, can then pass no clipping bound."""
    monkeypatch.setattr(
        products, "batched_product", lambda g, a: 1.5 * torch.bmm(g.transpose(1, 2), a)
    )
    a, g = operands(3, 7, 33, 20)
    with running(name):
        grads, squares = ghost.linear_gradient(a, g, backend=name)
    testing.assert_close("squares", squares, grads.double().square().sum((1, 2)), 1e-11)
    meant = torch.bmm(g.double().transpose(1, 2), a.double()).square().sum((1, 2))
    assert (squares > 2 * meant).all()


@on_cuda
def test_a_sample_that_is_not_finite_stays_alone(name: str) -> None:
    a, g = operands(3, 7, 33, 20)
    a[1, 2, 3] = float("nan")
    with running(name):
        _, squares = ghost.linear_gradient(a, g, backend=name)
    assert torch.isfinite(squares).tolist() == [True, False, True]


@on_cuda
def test_blocks_that_cast_do_not_reach_the_product(name: str) -> None:
    a, g = operands(3, 7, 33, 20)
    with running(name), torch.autocast("cpu", torch.bfloat16):
        grads, _ = ghost.linear_gradient(a, g, backend=name)
    assert grads.dtype is torch.float32
    testing.assert_close("gradients", grads, torch.bmm(g.transpose(1, 2), a), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_odd_widths_begin_at_multiples_of_16_bytes(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 257).to(dtype)
    rows = products.aligned_rows(x)
    assert torch.equal(rows, x)
    assert rows.stride(2) == 1
    assert rows.stride(1) * rows.element_size() % 16 == 0
    assert rows.stride(0) == 3 * rows.stride(1)
    for width in (256, 3 if dtype is not torch.float64 else 1):
        whole = torch.zeros(2, 3, width, dtype=dtype)
        assert products.aligned_rows(whole) is whole


def test_16_bits_need_a_product_with_float32_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        """Operators of an older torch."""

        aten: Any = type("aten", (), {"bmm": object()})

    monkeypatch.setattr(torch, "ops", Old)
    on: Any = type("on", (), {"refusal": staticmethod(lambda *_: None)})
    half, single = torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1)
    assert "2.8" in str(products._refuse(on, half, half))
    assert products._refuse(on, single, single) is None
