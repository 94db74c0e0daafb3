"""Gradients kept in their operands' 16 bits: norms are those of the rounded numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpkern.base.errors import BackendError
from dpkern.ops import ghost, testing
from tests.ops.backends.every_backend import INTERPRETED, every_backend
from tests.ops.test_ghost_linear import _operands

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-6, torch.float64: 1e-14}
"""Of an entry: the dtype's roundoff."""
SHAPES = ((3, 7, 33, 257), (2, 1, 5, 4), (2, 70, 40, 130), (0, 3, 4, 5), (2, 0, 4, 5))


def unless_refused(backend: str, dtype: torch.dtype, run: Any) -> None:
    """Run it; CUDA kernels have no float16 gradients, and say so."""
    if backend == "cuda" and dtype is torch.float16:
        with pytest.raises(BackendError, match="no float16 gradients"):
            run()
    else:
        run()


def cuts(backend: str, dtype: torch.dtype) -> bool:
    """Whether numbers are cut off instead of rounded, as Triton's interpreter does."""
    return backend in INTERPRETED and dtype is torch.bfloat16


@every_backend
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_are_of_what_is_stored(
    shape: tuple[int, int, int, int], dtype: torch.dtype, backend: str
) -> None:
    a, g = (x.to(dtype) for x in _operands(*shape))
    want = torch.bmm(g.double().transpose(1, 2), a.double())
    sizes = torch.bmm(g.double().abs().transpose(1, 2), a.double().abs())

    def run() -> None:
        grads, squares = ghost.rounded_gradient(a, g, backend=backend)
        assert grads.dtype is dtype
        assert grads.is_contiguous()
        # Rounded once more at last, after a sum in float32 (float64: float64).
        inner = 2e-5 if dtype in (torch.bfloat16, torch.float16) else UNIT[dtype]
        unit = UNIT[dtype] * (2 if cuts(backend, dtype) else 1)
        near = unit * want.abs() + inner * sizes + torch.finfo(dtype).tiny
        assert ((grads.double() - want).abs() <= near).all()
        stored = grads.double().square().sum((1, 2))
        assert (squares >= stored).all()
        assert (squares <= stored * (1 + 1e-4)).all()

    unless_refused(backend, dtype, run)


@every_backend
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_sums_are_of_what_is_stored(dtype: torch.dtype, backend: str) -> None:
    grads = torch.randn(5, 33, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads[3, 2, 5] = torch.nan
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    factors = torch.tensor([1.0, 0.3, 2.0, 0.0, 0.7], dtype=kind)

    def run() -> None:
        outs = torch.ones(33, 70, dtype=kind), torch.ones(7, dtype=kind)
        parts = grads, grads[:, 2, :7].contiguous()
        versions = [out._version for out in outs]
        ghost.rounded_sum(parts, factors, outs, backend=backend)
        for part, out, version in zip(parts, outs, versions, strict=True):
            used = part[factors != 0].double()
            want = 1 + torch.einsum("b,b...->...", factors[factors != 0].double(), used)
            testing.assert_close("sum", out, want, 1e-6)
            assert out._version > version

    unless_refused(backend, dtype, run)


@every_backend
def test_a_sample_that_is_not_finite_stays_alone(backend: str) -> None:
    a, g = (x.bfloat16() for x in _operands(3, 7, 33, 20))
    a[1, 2, 3] = torch.inf
    _, squares = ghost.rounded_gradient(a, g, backend=backend)
    assert torch.isfinite(squares).tolist() == [True, False, True]


@every_backend
def test_rounding_up_lifts_no_sample_above_its_bound(backend: str) -> None:
    """Every entry is rounded away from zero by nearly half a unit, and the norm knows it."""
    value = 1 + 3 * 2.0**-8  # half way between two numbers of 8 bits; the even one is above
    a = torch.tensor([1.0, 3 * 2.0**-8]).bfloat16().view(1, 2, 1).expand(2, 2, 8).contiguous()
    g = torch.ones(2, 2, 6).bfloat16()
    grads, squares = ghost.rounded_gradient(a, g, backend=backend)
    if not cuts(backend, torch.bfloat16):
        assert (grads.double() > value).all()
        assert (squares > 48 * value**2).all()
    factors, _ = ghost.clip_factors([squares], 1.0, dtype=torch.float32)
    out = torch.zeros(6, 8)
    ghost.rounded_sum([grads[:1].contiguous()], factors[:1].contiguous(), [out], backend=backend)
    assert float(out.double().norm()) <= 1.0
