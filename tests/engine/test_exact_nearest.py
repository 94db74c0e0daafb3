"""Whole numbers that are added up in floating point: one instruction for a product and its sum."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dpkern.ops import ghost
from dpkern.ops.backends import cpu
from dpkern.ops.backends._extension import ISAS
from tests.engine.test_exact_sums import UNIT, M, factors_of, hostile, norm_square


def added(a: Tensor, g: Tensor, factors: Tensor) -> Tensor:
    """The kernel's sum over the batch, ``[p, d]``."""
    out = torch.zeros(g.shape[2], a.shape[2], dtype=torch.int32)
    ghost.linear_integer_sum(a, g, factors, out, rounding="nearest")
    return out


def one_by_one(a: Tensor, g: Tensor, factors: Tensor) -> Tensor:
    """The sum over the batch of what the kernel makes of each sample alone."""
    parts = zip(a.split(1), g.split(1), factors.split(1), strict=True)
    total = torch.zeros(g.shape[2], a.shape[2], dtype=torch.int64)
    for part in parts:
        total += added(*part)
    return total.to(torch.int32)


def halves(batch: int, d: int, p: int) -> tuple[Tensor, Tensor, Tensor]:
    """Products that are odd multiples of 1/2, 1/4 or whole numbers."""
    generator = torch.Generator().manual_seed(batch + d + p)
    a = torch.randint(-9, 9, (batch, 1, d), generator=generator) / 2
    g = torch.randint(-9, 9, (batch, 1, p), generator=generator) / 2
    return a, g, torch.ones(batch)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 3, 7), (300, 33, 20), (70, 100, 50)])
def test_ties_do_not_look_at_other_samples(sizes: tuple[int, int, int]) -> None:
    a, g, factors = halves(*sizes)
    whole = added(a, g, factors)
    assert torch.equal(whole, one_by_one(a, g, factors))
    order = torch.randperm(len(a), generator=torch.Generator().manual_seed(0))
    assert torch.equal(added(a[order], g[order], factors), whole)
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(added(a, g, factors), whole)
        finally:
            torch.set_num_threads(before)


def test_without_odd_factors_the_order_would_count() -> None:
    # 0 + 1/2 rounds to 0 and 1 + 1/2 to 2: ties go to the even sum, which is of all samples.
    def even(products: list[float]) -> float:
        total = torch.tensor(1.5 * 2**23)
        for product in products:
            total = total + product
        return float(total) - 1.5 * 2**23

    assert even([0.5, 1.0]) == 1
    assert even([1.0, 0.5]) == 2
    a, factors = torch.ones(2, 1, 1), torch.ones(2)
    for order in ([0.5, 1.0], [1.0, 0.5]):
        assert int(added(a, torch.tensor(order).view(2, 1, 1), factors)) == 2  # 1/2 + 2^-24 and 1


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("entry", [M - 0.25, -M + 0.25, 2**22 - 1.0, 300000.25, 1e-3])
def test_sums_beyond_what_floats_can_count_are_cut_into_runs(size: int, entry: float) -> None:
    batch = 2**31 // 2**22 - 1  # int32 holds as many
    a = torch.ones(batch, 1, size)
    g = torch.full((batch, 1, size), float(entry))
    factors = torch.ones(batch)
    assert torch.equal(added(a, g, factors), torch.full((size, size), round(entry) * batch))
    g[::2] *= -1
    assert torch.equal(added(a, g, factors), torch.full((size, size), -round(entry)))


def test_adding_up_without_runs_would_lose_integers() -> None:
    total = torch.tensor(1.5 * 2**23)
    for _ in range(9):
        total = total + torch.tensor(M - 1.0)  # above 2^24 floats are even
    assert int(total - 1.5 * 2**23) != 9 * (M - 1)


def test_nearest_integers_of_every_kind_of_record() -> None:
    for what, a in hostile((6, 1, 9), 1):
        for other, g in hostile((6, 1, 8), 2):
            factors = factors_of(ghost.linear_norm(a, g), M - math.sqrt(72) / 2)
            terms = factors.view(6, 1, 1) * g
            unusual = ~terms.isfinite().flatten(1).all(1)
            exact = (terms.double().transpose(1, 2) * a.double())[~unusual]
            # The last bit of a factor moves an entry by at most 2^-23 of it.
            room = 0.5 + 2.0**-22 * exact.abs().sum(0) + len(a) / 2
            got = added(a, g, factors)
            assert bool(((got - exact.sum(0)).abs() <= room).all()), f"{what} x {other}"
            assert torch.equal(got, one_by_one(a, g, factors)), f"{what} x {other}"


def test_a_record_changes_the_sum_by_its_own_integers() -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(130, 1, 50, generator=generator)
    g = torch.randn(130, 1, 30, generator=generator)
    a[7] *= 1e6
    g[9] = 0
    factors = factors_of(ghost.linear_norm(a, g), M - math.sqrt(1500) / 2)
    whole = added(a, g, factors)
    for b in (0, 7, 9, 129):
        kept = factors.clone()
        kept[b] = 0
        alone = torch.zeros_like(factors)
        alone[b] = factors[b]
        mine = added(a, g, alone)
        assert torch.equal(whole - added(a, g, kept), mine)
        assert norm_square(mine.flatten()) <= M * M


def test_aiming_at_the_clipping_bound_admits_too_much() -> None:
    # C / u is 953250.9; one entry has no room for a rounding either.
    generator = torch.Generator().manual_seed(5)
    a, g = torch.rand(4000, 1, 1, generator=generator) + 0.5, torch.ones(4000, 1, 1)

    def above(aim: float) -> int:
        factors, _ = ghost.clip_factors(
            [ghost.linear_norm(a, g)], aim, dtype=torch.float32, scale=1 / UNIT
        )
        parts = zip(a.split(1), g.split(1), factors.split(1), strict=True)
        return sum(norm_square(added(*part).flatten()) > M * M for part in parts)

    assert above(M - 0.5) == 0
    assert above(1 / UNIT) > 20


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_adds_whole_numbers(isa: str) -> None:
    a, g, factors = halves(40, 21, 11)
    config = cpu.build_config()
    if ISAS.index(isa) > ISAS.index(config["detected_isa"]):
        pytest.skip(f"no {isa} here")
    cpu.use_isa(isa)
    try:
        assert torch.equal(added(a, g, factors), one_by_one(a, g, factors))
    finally:
        cpu.use_isa(config["isa"])
