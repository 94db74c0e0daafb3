"""Sums of a bias' gradients over positions: against float64, sample by sample."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dpkern.base import dispatch
from dpkern.ops import direct, testing

SHAPES = ((3, 1, 5), (2, 16, 64), (5, 17, 65), (9, 100, 130), (0, 4, 4), (2, 0, 3), (1, 1000, 1))
pytestmark = pytest.mark.skipif(
    not dispatch.availability("cpu")[0], reason="the kernels are not compiled"
)


@pytest.mark.parametrize("isa", [i for i in testing.available_isas() if i != "amx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_positions_are_added_up(isa: str, dtype: torch.dtype) -> None:
    """Within the rounding of chains of 16 and of a chain of their sums, and alone as in a batch."""
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        g = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        with testing.isa(isa), testing.threads(2):
            sums = direct.sum_positions(g)
            strided = direct.sum_positions(g.transpose(0, 1).contiguous().transpose(0, 1))
        with testing.threads(1):
            alone = [direct.sum_positions(sample[None]) for sample in g]
        assert sums is not None
        assert strided is not None
        assert torch.equal(sums, strided)
        for row, other in zip(sums, alone, strict=True):
            assert other is not None
            assert torch.equal(row, other[0])
        roundings = 16 + shape[1] // 16
        bound = roundings * torch.finfo(dtype).eps / 2 * g.double().abs().sum(1)
        assert ((sums.double() - g.double().sum(1)).abs() <= bound).all()


def test_torch_sums_what_the_kernels_do_not() -> None:
    assert direct.sum_positions(torch.ones(2, 3, 4, dtype=torch.bfloat16)) is None
    with FakeTensorMode():
        assert direct.sum_positions(torch.ones(2, 3, 4)) is None
    with dispatch.use("reference"):
        assert direct.sum_positions(torch.ones(2, 3, 4)) is None
