"""Integer sums by tiles of bytes and of bfloat16 numbers, where a processor has them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from dpkern.ops import ghost, testing

SHAPES = [(24, 16, 16), (33, 50, 70), (64, 128, 33), (96, 17, 260), (257, 40, 48)]
LARGEST = 2.0**29
"""What the largest entry becomes before it is truncated, so that little is lost by that."""


def integers(a: torch.Tensor, g: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(g.shape[2], a.shape[2], dtype=torch.int32)
    ghost.linear_integer_sum(a, g, factors, out)
    return out


def exact(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.einsum("btp,btd->bpd", g.double(), a.double())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_samples_integers_depend_on_nothing_else(shape: tuple[int, int, int]) -> None:
    t, d, p = shape
    generator = torch.Generator().manual_seed(t)
    a = torch.randn(7, t, d, generator=generator)
    g = torch.randn(7, t, p, generator=generator)
    factors = torch.rand(7, generator=generator) * 1e4
    factors[2] = 0
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    for isa in testing.available_isas():
        with testing.isa(isa):
            alone = [integers(a[b : b + 1], g[b : b + 1], factors[b : b + 1]) for b in range(7)]
            whole = torch.stack(alone).sum(0).int()
            for threads in (1, 2, 3):
                with testing.threads(threads):
                    assert torch.equal(integers(a, g, factors), whole), isa
                    assert torch.equal(integers(a[order], g[order], factors[order]), whole), isa
            want = (factors.double()[:, None, None] * exact(a, g)).trunc().sum(0)
            assert (whole - want).abs().max() <= 1e-4 * want.abs().max() + 7, isa


def adversarial(t: int, d: int, p: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield operands that rounding hurts."""
    generator = torch.Generator().manual_seed(3)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    yield "usual", normal(4, t, d), normal(4, t, p)
    a, g = normal(4, t, d), normal(4, t, p)
    half = t // 2
    a[:, half : 2 * half] = a[:, :half]
    g[:, half : 2 * half] = -g[:, :half] * (1 + 2.0**-20)
    yield "positions that cancel", a, g
    ones = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))
    yield "all bits set", ones * normal(4, t, d).sign(), ones * normal(4, t, p).sign()
    ties = 1 + 2.0**-8 + 2.0**-17
    yield "between two numbers of 16 bits", ties * normal(4, t, d).sign(), normal(4, t, p)
    worst = 1 + 2.0**-8 - 3 * 2.0**-17 - 2.0**-23  # both of its bfloat16 parts are half a unit off
    yield "what is left out adds up", torch.full((4, t, d), worst), torch.full((4, t, p), worst)
    scales = torch.exp2(torch.randint(-50, 50, (4, t, 1), generator=generator).float())
    yield "positions of all sizes", normal(4, t, d) * scales, normal(4, t, p) / scales
    yield "next to nothing", normal(4, t, d) * 2.0**-125, normal(4, t, p) * 2.0**100
    yield "denormal", normal(4, t, d) * 2.0**-135, normal(4, t, p) * 2.0**120
    yield "huge", normal(4, t, d) * 2.0**115, normal(4, t, p) * 2.0**-110


@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_stays_within_its_bound(shape: tuple[int, int, int]) -> None:
    """That of the tiles is not a hundred times too large."""
    for isa in testing.available_isas():
        exceeded = False
        for name, a, g in adversarial(*shape):
            gradients = exact(a, g)
            largest = gradients.abs().amax((1, 2))
            factors = (LARGEST / largest).clamp(max=2.0**126).float()
            with testing.isa(isa):
                errors = ghost.linear_sum_error(a, g)
                for b in range(len(a)):
                    made = integers(*(x[b : b + 1] for x in (a, g, factors)))
                    off = made.double() / factors[b].double() - gradients[b]
                    # What one entry loses by being truncated.
                    truncated = math.sqrt(off.numel()) / float(factors[b])
                    assert off.norm() <= errors[b] + truncated, (isa, name)
                    exceeded = exceeded or bool(off.norm() > errors[b] / 100 + truncated)
        assert exceeded or isa != "amx"


def test_numbers_next_to_the_largest_float_have_no_bound() -> None:
    a, g = torch.ones(3, 32, 16), torch.full((3, 32, 16), 1e-30)
    a[0, 5, 3], a[1, 2, 2] = 3.4e38, math.nan
    for isa in testing.available_isas():
        with testing.isa(isa):
            errors = ghost.linear_sum_error(a, g)
            assert math.isinf(errors[1]), isa
            assert math.isfinite(errors[2]), isa
            assert isa != "amx" or math.isinf(errors[0])


def test_bounds_are_those_of_the_norms_whatever_their_sizes() -> None:
    """Squares of the small and large ones are beyond float32, and those of long rows add up."""
    generator = torch.Generator().manual_seed(8)
    scales = torch.tensor([1.0, 2.0**-75, 2.0**-60, 2.0**70, 2.0**100])[:, None, None]
    for t, d, p in ((3, 15, 7), (5, 1, 40), (30, 129, 1100), (2, 20000, 3)):
        a = torch.rand(len(scales), t, d, generator=generator) * scales
        g = torch.rand(len(scales), t, p, generator=generator) / scales
        want = ghost.linear_sum_error(a, g, backend="reference")
        for isa in testing.available_isas():
            with testing.isa(isa):
                errors = ghost.linear_sum_error(a, g, backend="cpu")
            assert bool((errors >= want * (1 - 1e-6)).all()), (isa, t)
            looser = 34 if isa == "amx" else 1.003
            assert bool((errors <= looser * want).all()), (isa, t)
