"""Ghost ops on explicit gradients: norms, clip factors and sums of many tensors at once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkern.ops import clip, ghost, testing
from dpkern.ops._lattice import round_down
from dpkern.ops.backends import cpu
from tests.ops.backends.every_backend import every_backend

TYPES = (torch.float32, torch.float64)
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}


def _several(dtype: torch.dtype, batch: int) -> list[torch.Tensor]:
    """Gradients of several shapes, one of them in another order of dimensions."""
    generator = torch.Generator().manual_seed(batch)
    shapes = ((3,), (), (70, 9), (2, 5, 4), (0, 2))
    grads = [torch.randn(batch, *s, generator=generator, dtype=dtype) for s in shapes]
    grads[3] = grads[3].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return grads


@every_backend
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_norm_and_sums_of_many_tensors(backend: str, dtype: torch.dtype, batch: int) -> None:
    grads = _several(dtype, batch)
    squares = ghost.explicit_norm(grads, backend=backend)
    true = sum(part.double().flatten(1).square().sum(1) for part in grads if part.dim() > 1)
    true = true + grads[1].double().square()
    assert squares.dtype is torch.float64
    torch.testing.assert_close(squares, true, rtol=1e-13, atol=0)
    factors = torch.rand(batch, generator=torch.Generator().manual_seed(1), dtype=dtype)
    outs = [torch.ones(part.shape[1:], dtype=dtype) for part in grads]
    ghost.contract(grads, factors, outs, backend=backend)
    for part, out in zip(grads, outs, strict=True):
        want = 1 + torch.einsum("b,b...->...", factors.double(), part.double())
        testing.assert_close("sum", out, want, ROUNDING[dtype])


@every_backend
def test_a_sample_that_is_not_finite_shows_and_drops(backend: str) -> None:
    grads = _several(torch.float32, 4)
    grads[0][2, 1] = math.inf
    squares = ghost.explicit_norm(grads, backend=backend)
    assert torch.isfinite(squares).tolist() == [True, True, False, True]
    factors, norms = ghost.clip_factors([squares], 1.0, dtype=torch.float32, backend=backend)
    assert factors[2] == 0
    assert not math.isfinite(norms[2])
    outs = [torch.zeros(part.shape[1:]) for part in grads]
    ghost.contract(grads, factors, outs, backend=backend)
    assert all(bool(torch.isfinite(out).all()) for out in outs)


@every_backend
@pytest.mark.parametrize("dtype", TYPES)
@settings(deadline=None)  # kernels may be compiled at the first call
@given(
    values=st.lists(st.floats(0, 1e30), min_size=1, max_size=6),
    bound=st.sampled_from([2.0**-90, 0.3, 1.0, 1e10, math.inf]),
    scale=st.sampled_from([1.0, 7.0, 1 / 3]),
)
def test_factors_never_lift_a_sample_above_the_bound(
    backend: str, dtype: torch.dtype, values: list[float], bound: float, scale: float
) -> None:
    squares = torch.tensor(values, dtype=torch.float64)
    factors, norms = ghost.clip_factors(
        [squares, squares], bound, dtype=dtype, scale=scale, backend=backend
    )
    assert factors.dtype is dtype
    torch.testing.assert_close(norms, (2 * squares).sqrt() * scale, rtol=1e-15, atol=0)
    own = factors.double() * norms / scale
    assert bool((own <= bound).all())
    assert bool((factors.double() <= scale).all())
    kept = norms <= bound * clip.SLACK
    nearest_below = torch.tensor(scale, dtype=torch.float64).to(dtype).double() * (1 - 2.0**-23)
    assert bool((factors.double()[kept] >= nearest_below).all())
    if not math.isinf(bound):  # the negative control: without rounding down and slack
        over = norms > bound
        loose = (bound / norms * scale)[over]
        assert bool((factors.double()[over] < loose).all())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize(
    ("bound", "scale"), [(1.0, 1.0), (2.0**-140, 3.0), (1e30, 1e-40), (0.3, 7.0)]
)
def test_factors_of_many_samples_are_those_of_one_by_one(
    dtype: torch.dtype, automatic: bool, bound: float, scale: float
) -> None:
    edge = (bound * clip.SLACK / scale) ** 2
    values = [0.0, 5e-324, 1e-310, 1.7e308, math.inf, math.nan]
    values += [edge * (1 + i * 2.0**-52) for i in range(-20, 20)]
    values += [edge * 1.1**i for i in range(-300, 300)]
    norms = [math.sqrt(square) * scale for square in values]
    exact = [_factor(norm, bound * clip.SLACK, automatic) * scale for norm in norms]
    wanted = round_down(torch.tensor(exact, dtype=torch.float64), dtype)
    best, squares = cpu.isa(), torch.tensor(values, dtype=torch.float64)
    try:
        for name in cpu.ISAS[: cpu.ISAS.index(best) + 1]:
            cpu.use_isa(name)
            found = ghost.clip_factors(
                [squares], bound, dtype=dtype, scale=scale, automatic=automatic, backend="cpu"
            )
            assert torch.equal(found[0], wanted)
            torch.testing.assert_close(
                found[1], torch.tensor(norms, dtype=torch.float64), rtol=0, atol=0, equal_nan=True
            )
    finally:
        cpu.use_isa(best)


def _factor(norm: float, aim: float, automatic: bool) -> float:
    if not math.isfinite(norm):
        return 0.0
    if automatic:
        return aim / (norm + clip.GAMMA)
    return 1.0 if norm <= aim else aim / norm


@every_backend
def test_automatic_factors(backend: str) -> None:
    squares = torch.tensor([0.0, 1.0, 1e-8], dtype=torch.float64)
    factors, norms = ghost.clip_factors(
        [squares], 2.0, dtype=torch.float64, scale=3.0, automatic=True, backend=backend
    )
    want = 3 * 2.0 * clip.SLACK / (norms + clip.GAMMA)
    torch.testing.assert_close(factors, want, rtol=1e-15, atol=0)


@every_backend
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("order", [(1, 2, 3), (1, 3, 2), (3, 1, 2), (2, 3, 1)])
def test_contract_takes_any_order_of_dimensions(
    backend: str, dtype: torch.dtype, order: tuple[int, int, int]
) -> None:
    for batch, shape in ((0, (2, 3, 4)), (5, (7, 1, 30)), (4, (50, 9, 20)), (3, (0, 2, 2))):
        generator = torch.Generator().manual_seed(batch)
        dense = torch.randn(batch, *shape, generator=generator, dtype=dtype).permute(0, *order)
        back = [order.index(i) + 1 for i in (1, 2, 3)]
        grads = dense.contiguous().permute(0, *back)
        factors = torch.rand(batch, generator=generator, dtype=dtype)
        if batch:
            factors[1] = 0
            grads[1] = math.nan
        results = []
        for threads in (1, 2):
            out = torch.ones(shape, dtype=dtype)
            with testing.threads(threads):
                ghost.contract([grads], factors, [out], backend=backend)
            results.append(out)
        used = factors != 0
        want = 1 + torch.einsum("b,b...->...", factors[used].double(), grads[used].double())
        testing.assert_close("sum", results[0], want, ROUNDING[dtype])
        if backend == "cpu":
            assert torch.equal(results[0], results[1])
