"""Integers of one position: products of two vectors, with the product of their norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dpkern.ops import ghost, testing
from tests.engine.test_exact_sums import M, factors_of, norm_square, pairs


def added(a: Tensor, g: Tensor, factors: Tensor) -> Tensor:
    """The kernel's sum over the batch, ``[p, d]``."""
    out = torch.zeros(g.shape[2], a.shape[2], dtype=torch.int32)
    ghost.linear_integer_sum(a, g, factors, out, rounding="factors")
    return out


def alone(a: Tensor, g: Tensor, factors: Tensor) -> list[Tensor]:
    """What the kernel makes of each sample."""
    return [added(*one) for one in zip(a.split(1), g.split(1), factors.split(1), strict=True)]


def drawn(batch: int, d: int, p: int, *, aim: float = M) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs as after a rectifier, output gradients, and factors that clip every sample."""
    generator = torch.Generator().manual_seed(batch + d + p)
    a = torch.randn(batch, 1, d, generator=generator).relu() + 0.01
    g = torch.randn(batch, 1, p, generator=generator)
    return a, g, factors_of(ghost.linear_norm(a, g), aim)


SIZES = [(1, 1, 1), (2, 3, 7), (257, 33, 20), (70, 100, 50), (600, 10, 130)]


@pytest.mark.parametrize("sizes", SIZES)
def test_every_processor_order_and_number_of_threads_gives_the_same_sum(
    sizes: tuple[int, int, int],
) -> None:
    a, g, factors = drawn(*sizes)
    whole = torch.stack(alone(a, g, factors)).sum(0, dtype=torch.int32)
    order = torch.randperm(len(a), generator=torch.Generator().manual_seed(0))
    for isa in testing.available_isas():
        for threads in (1, 2, 3):
            with testing.isa(isa), testing.threads(threads):
                assert torch.equal(added(a, g, factors), whole), isa
                assert torch.equal(added(a[order], g[order], factors[order]), whole), isa
                first = added(a[: len(a) // 3], g[: len(a) // 3], factors[: len(a) // 3])
                rest = added(a[len(a) // 3 :], g[len(a) // 3 :], factors[len(a) // 3 :])
                assert torch.equal(first + rest, whole), isa


def test_kernel_and_reference_give_the_same_integers() -> None:
    for what, a, g in pairs(6, 1, 9, 8):
        for kind in (torch.float32, torch.float64):
            a, g = a.to(kind), g.to(kind)
            factors = factors_of(ghost.linear_norm(a, g), M).to(kind)
            expected = torch.zeros(8, 9, dtype=torch.int32)
            ghost.linear_integer_sum(
                a, g, factors, expected, rounding="factors", backend="reference"
            )
            for isa in testing.available_isas():
                with testing.isa(isa):
                    assert torch.equal(added(a, g, factors), expected), f"{what} {isa}"


def test_a_record_changes_the_sum_by_its_own_integers() -> None:
    a, g, _ = drawn(130, 50, 30)
    a[7] *= 1e6
    g[9] = 0
    factors = factors_of(ghost.linear_norm(a, g), M)
    whole = added(a, g, factors)
    for b in (0, 7, 9, 129):
        kept, only = factors.clone(), torch.zeros_like(factors)
        kept[b], only[b] = 0, factors[b]
        mine = added(a, g, only)
        assert torch.equal(whole - added(a, g, kept), mine)
        assert norm_square(mine.flatten()) <= M * M


def rounded_at_once(a: Tensor, g: Tensor, factor: Tensor) -> Tensor:
    """Both vectors to the nearest integers at once: their product may be too long."""
    d, p = a.shape[-1], g.shape[-1]
    room = float(factor.double() * a.double().norm() * g.double().norm())
    skew = (d / p) ** 0.25
    alpha = (a.double() / a.double().norm() * math.sqrt(room) * skew).round()
    beta = (g.double() / g.double().norm() * math.sqrt(room) / skew).round()
    return beta.flatten()[:, None] * alpha.flatten()


@pytest.mark.parametrize("aim", [M, 40.0, 3.0])
def test_no_product_is_longer_than_its_gradient(aim: float) -> None:
    too_long = 0
    for d, p in ((1, 1), (3, 2), (20, 5), (64, 64), (500, 1)):
        generator = torch.Generator().manual_seed(d)
        a, g, factors = drawn(40, d, p, aim=aim)
        a[::3] = torch.rand(14, 1, 1, generator=generator) + 0.5  # all entries round up, or none
        g[::3] = torch.rand(14, 1, 1, generator=generator) + 0.5
        factors = factors_of(ghost.linear_norm(a, g), aim)
        most = (factors.double() * a.double().norm(dim=(1, 2)) * g.double().norm(dim=(1, 2))) ** 2
        for b, one in enumerate(alone(a, g, factors)):
            assert norm_square(one.flatten()) <= min(aim**2, float(most[b]) * (1 + 1e-9))
            hasty = rounded_at_once(a[b], g[b], factors[b])
            too_long += float(hasty.square().sum()) > aim**2
    assert too_long > 40  # without looking at the norm: the test can fail


def test_samples_of_the_longest_norm_fill_blocks_without_overflow() -> None:
    batch = 2**31 // 2**22 - 1  # int32 holds as many
    a, g = torch.ones(batch, 1, 1), torch.full((batch, 1, 1), 2.0**22)
    factors = torch.ones(batch)
    (one, *_) = alone(a, g, factors)
    assert 2**22 - 2**14 < int(one) <= 2**22
    for isa in testing.available_isas():
        with testing.isa(isa):
            assert int(added(a, g, factors)) == batch * int(one)
            assert int(added(a, -g, factors)) == -batch * int(one)


def test_longer_samples_are_cut_to_the_longest_norm() -> None:
    a, g, factors = drawn(4, 30, 20)
    for one in alone(a, g, factors * 1e6):
        assert 2**21 < math.sqrt(norm_square(one.flatten())) <= 2**22
    wide, narrow = torch.zeros(1, 1, 5000), torch.ones(1, 1, 1)
    wide[..., 0] = 1  # the only entry that does not vanish: 16 bits hold it and its counterpart
    wide[..., 1:] = 1e-6
    assert 0 < int(added(wide, narrow, torch.full((1,), 1e9))[0, 0]) <= 2**22


def test_what_is_not_finite_or_has_no_factor_is_left_out() -> None:
    a, g, factors = drawn(6, 5, 4)
    expected = added(a[5:], g[5:], factors[5:])
    a[0, 0, 0], g[1, 0, 0], a[2], g[3] = math.nan, math.inf, 0, 0
    a[4], factors[4] = math.nan, 0
    assert torch.equal(added(a, g, factors), expected)


def test_integers_are_as_near_as_the_page_says() -> None:
    for d, p in ((20, 30), (100, 100), (512, 64)):
        a, g, factors = drawn(64, d, p)
        scaled = (factors[:, None, None].double() * g.double()).transpose(1, 2) * a.double()
        made = torch.stack(alone(a, g, factors)).double()
        off = (made - scaled).norm(dim=(1, 2)) / M
        assert float(off.mean()) < 1.5 * (d * p) ** 0.25 / math.sqrt(6 * M)
        along = (made * scaled).sum((1, 2)) / scaled.square().sum((1, 2))
        assert float((1 - along).mean()) < 3e-3
