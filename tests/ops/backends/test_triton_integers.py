"""Integers of Triton's kernels: as near as their error says, of their sample alone, exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkern.ops import ghost

ON = {"backend": "triton"}
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
LARGE = 2.0**22


@pytest.fixture(autouse=True)
def _interpreted(interpreted: Callable[[str], Any]) -> None:
    """All kernels here run in Triton's interpreter."""


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cancelling(positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Records whose positions cancel: rounding is all that is left of their gradients."""
    a, g = random(4, positions, 40), random(4, positions, 33, seed=2)
    half = positions // 2
    a[:, half : 2 * half], g[:, half : 2 * half] = a[:, :half], -g[:, :half]
    order = torch.randperm(2 * half, generator=torch.Generator().manual_seed(3))
    return a[:, order].to(dtype), g[:, order].to(dtype)


def off(a: Tensor, g: Tensor, b: int) -> float:
    """The norm of what is truncated, less the gradient; truncation's own part is small."""
    factors, out = torch.zeros(len(a)), torch.zeros(g.shape[2], a.shape[2], dtype=torch.int32)
    factors[b] = LARGE
    ghost.linear_integer_sum(a, g, factors, out, **ON)
    exact = g[b].double().t() @ a[b].double()
    return float((out.double() / LARGE - exact).norm())


@pytest.mark.parametrize("positions", [2, 64, 130])
@TYPES
def test_what_is_truncated_is_as_near_as_the_error_says(positions: int, dtype: torch.dtype) -> None:
    a, g = cancelling(positions, dtype)
    cut = math.sqrt(33 * 40) / LARGE
    for b, error in enumerate(ghost.linear_sum_error(a, g, **ON).tolist()):
        assert off(a, g, b) <= error + cut


def test_an_error_that_is_a_thousandth_of_it_would_be_too_small() -> None:
    a, g = cancelling(130, torch.float32)
    cut = math.sqrt(33 * 40) / LARGE
    errors = ghost.linear_sum_error(256 * a, g, **ON)
    assert any(off(256 * a, g, b) > float(e) / 1000 + cut for b, e in enumerate(errors))


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize(("words", "lookups"), [(5, 7), (300, 90)])
@TYPES
def test_both_uses_of_a_tied_weight_are_added_before_they_are_truncated(
    words: int, lookups: int, padding_idx: int | None, dtype: torch.dtype
) -> None:
    ids = torch.randint(words, (3, lookups), generator=torch.Generator().manual_seed(1))
    ids[:, :3] = 2
    e, a, g = random(3, lookups, 33), random(3, 70, 33, seed=2), random(3, 70, words, seed=3)
    a, g = a.to(dtype), g.to(dtype)
    errors = ghost.tied_sum_error(ids, a, g, e, padding_idx=padding_idx, **ON)
    for b in range(3):
        factors, out = torch.zeros(3), torch.zeros(words, 33, dtype=torch.int32)
        factors[b] = 2.0**16
        ghost.tied_integer_sum(ids, a, g, e, factors, out, padding_idx=padding_idx, **ON)
        exact = g[b].double().t() @ a[b].double()
        kept = slice(None) if padding_idx is None else ids[b] != padding_idx
        exact.index_add_(0, ids[b][kept], e[b][kept].double())
        cut = math.sqrt(out.numel()) / 2**16
        assert float((out.double() / 2**16 - exact).norm()) <= float(errors[b]) + cut
        assert bool((out.double().abs() <= 2**16 * exact.abs() + 2**16 * errors[b]).all())


@pytest.mark.parametrize("rounding", ["truncate", "factors"])
@TYPES
def test_a_sample_that_has_no_factor_is_not_read(rounding: Any, dtype: torch.dtype) -> None:
    a, g, factors = random(5, 1, 30), random(5, 1, 20, seed=2), torch.full((5,), 1e4)
    wanted, found = torch.zeros(2, 20, 30, dtype=torch.int32)
    factors[1] = 0
    ghost.linear_integer_sum(a.to(dtype), g.to(dtype), factors, wanted, rounding=rounding, **ON)
    a[1], g[1] = math.nan, math.inf
    ghost.linear_integer_sum(a.to(dtype), g.to(dtype), factors, found, rounding=rounding, **ON)
    assert torch.equal(found, wanted)
    assert bool(wanted.any())


@pytest.mark.parametrize("positions", [1, 3])
def test_integers_are_those_of_each_sample_in_any_order_and_split(positions: int) -> None:
    rounding: Any = "factors" if positions == 1 else "truncate"
    a, g, factors = random(70, positions, 30), random(70, positions, 20, seed=2), random(70) * 1e4
    whole = torch.zeros(20, 30, dtype=torch.int32)
    ghost.linear_integer_sum(a, g, factors, whole, rounding=rounding, **ON)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    found = torch.zeros_like(whole)
    for some in order.split(23):
        ghost.linear_integer_sum(a[some], g[some], factors[some], found, rounding=rounding, **ON)
    assert torch.equal(found, whole)


def test_vectors_are_those_of_the_reference() -> None:
    """Some samples in a hundred are longer than they may be at the first try."""
    a, g, factors = random(400, 1, 3), random(400, 1, 5, seed=2), random(400, seed=3) * 3e3
    mine, theirs = torch.zeros(2, 5, 3, dtype=torch.int32)
    ghost.linear_integer_sum(a, g, factors, mine, rounding="factors", **ON)
    ghost.linear_integer_sum(a, g, factors, theirs, rounding="factors", backend="reference")
    assert torch.equal(mine, theirs)


def test_rows_that_stand_alone_are_multiplied_as_the_reference_does() -> None:
    ids, g = torch.arange(120).view(2, 60), random(2, 60, 33)
    factors = torch.tensor([1e5, 3e5])
    mine, theirs = torch.zeros(2, 120, 33, dtype=torch.int32)
    ghost.embedding_integer_sum(ids, g, factors, mine, **ON)
    ghost.embedding_integer_sum(ids, g, factors, theirs, backend="reference")
    assert torch.equal(mine, theirs)


def test_rows_of_a_tied_weight_count_in_its_error() -> None:
    """A thousand rows of one id, of one sign: every addition rounds a longer sum."""
    lookups, ids = 1024, torch.zeros(1, 1024, dtype=torch.int64)
    e = 1 + torch.rand(1, lookups, 8, generator=torch.Generator().manual_seed(1))
    a, g, out = torch.zeros(1, 1, 8), torch.zeros(1, 1, 2), torch.zeros(2, 8, dtype=torch.int32)
    (error,) = ghost.tied_sum_error(ids, a, g, e, **ON).tolist()
    ghost.tied_integer_sum(ids, a, g, e, torch.tensor([2.0**18]), out, **ON)
    lost = float((out[0].double() / 2**18 - e[0].double().sum(0)).norm())
    assert lost + math.sqrt(8) / 2**18 < error
    (alone,) = ghost.tied_sum_error(ids[:, :1], a, g, e.sum(1, keepdim=True), **ON).tolist()
    assert lost - math.sqrt(8) / 2**18 > alone  # more than one position's roundings


@pytest.mark.parametrize("positions", [1, 2, 16, 17, 63, 64, 65, 130, 1024, 9000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_16_bits_lose_as_much_as_the_model_says(
    positions: int, dtype: torch.dtype, interpreted: Callable[[str], Any]
) -> None:
    """Three roundings for every term of a chunk as the kernel has it, one for every chunk."""
    at, operands = interpreted("direct"), interpreted("operands")
    a = torch.zeros(1, positions, 64, dtype=dtype)
    depth = at.tile_of(operands.Operands.linear(a, a), dtype).depth
    least = 3 * depth + 1 + -(-positions // depth)
    assert interpreted("sum_errors").roundings(dtype, positions) >= least
    assert interpreted("sum_errors").roundings(torch.float32, positions) == positions


@pytest.mark.parametrize("sign", [1, -1])
def test_bytes_hold_the_longest_vectors(sign: int) -> None:
    """One entry that is all of its vector: 2^14, or as much as a product of 2^22 allows."""
    for columns in (1, 3):
        a, g = torch.zeros(2, 1, columns), torch.zeros(2, 1, 2)
        a[:, 0, 0], g[:, 0, 1] = 1.0, sign * 1.0
        mine, theirs = torch.zeros(2, 2, columns, dtype=torch.int32)
        for factor in (3.0, 16383.0, 2.0**21 + 1, 2.0**30):
            factors = torch.tensor([factor, factor / 2])
            ghost.linear_integer_sum(a, g, factors, mine, rounding="factors", **ON)
            given: Any = {"rounding": "factors", "backend": "reference"}
            ghost.linear_integer_sum(a, g, factors, theirs, **given)
        assert torch.equal(mine, theirs)
        assert int(mine.abs().max()) > 2**21


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 3, 4, 7])
def test_no_input_meets_more_taps_than_counted(
    kernel: int, dilation: int, stride: int, interpreted: Callable[[str], Any]
) -> None:
    places = [stride * o + dilation * k for o in range(60) for k in range(kernel)]
    most = max(map(places.count, set(places)))
    assert interpreted("sum_errors").touches((kernel,), (stride,), (dilation,)) == most
