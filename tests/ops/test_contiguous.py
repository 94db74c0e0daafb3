"""Tensors whose channels are last in memory, made contiguous by a kernel or by torch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dpkern.base import dispatch
from dpkern.ops import direct, testing

SHAPES = (
    *((3, 16, 8, 8), (2, 17, 9, 15), (64, 5, 3, 3), (1, 40, 70, 1), (2, 33, 130, 2)),
    *((2, 3, 4, 5, 6), (3, 9, 11), (0, 4, 3, 3), (2, 4, 0, 3), (2, 1, 5, 5), (2, 6, 1, 1)),
)
pytestmark = pytest.mark.skipif(
    not dispatch.availability("cpu")[0], reason="the kernels are not compiled"
)


def channels_last(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(shape[0], *shape[2:], shape[1]).to(dtype)
    return drawn.movedim(-1, 1)


@pytest.mark.parametrize("isa", [i for i in testing.available_isas() if i != "amx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 2])
def test_numbers_are_where_torch_puts_them(isa: str, dtype: torch.dtype, threads: int) -> None:
    for shape in SHAPES:
        x = channels_last(shape, dtype)
        with testing.isa(isa), testing.threads(threads):
            made = direct.contiguous(x)
        assert made.is_contiguous()
        assert torch.equal(made, x)


def test_the_kernel_makes_them() -> None:
    with mock.patch.object(direct, "kernel", side_effect=ZeroDivisionError):
        with pytest.raises(ZeroDivisionError):
            direct.contiguous(channels_last((2, 3, 4, 4)))
        for left in (
            channels_last((2, 3, 4, 4), torch.bfloat16),
            channels_last((2, 3, 4, 4))[:, :2],
            torch._neg_view(channels_last((2, 3, 4, 4))),
            torch.randn(4, 3).t(),
            torch.randn(1, 1, 4, 4).expand(2, 3, 4, 4),
        ):
            made = direct.contiguous(left)
            assert made.is_contiguous()
            assert torch.equal(made, left)
        with dispatch.use("reference"):
            assert direct.contiguous(channels_last((2, 3, 4, 4))).is_contiguous()
        with FakeTensorMode():
            assert direct.contiguous(channels_last((2, 3, 4, 4))).is_contiguous()


def test_a_contiguous_tensor_is_itself_and_a_copy_has_no_graph() -> None:
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    assert direct.contiguous(x) is x
    assert not direct.contiguous(channels_last((2, 3, 4, 4)).requires_grad_()).requires_grad
