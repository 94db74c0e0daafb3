"""Integer sums of linear gradients whose operands are rounded to 16-bit integers first."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from dpkern.ops import ghost, testing
from dpkern.ops.ghost._operands import rounded_operands

SHAPES = [
    (1, 3, 5),
    (2, 7, 4),
    (33, 50, 70),
    (64, 96, 33),
    (65, 64, 100),
    (96, 17, 260),
    (257, 40, 8),
]
M = 953250.0
"""C / u of a clipping bound of 1 and noise 1.1, rounded down."""


def integers(a: torch.Tensor, g: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(g.shape[2], a.shape[2], dtype=torch.int32)
    ghost.linear_integer_sum(a, g, factors, out, rounding="operands")
    return out


def clipping(squares: torch.Tensor) -> torch.Tensor:
    """The factors that take norms to M, as the engine computes them."""
    return ghost.clip_factors([squares], M, dtype=torch.float32, scale=2.0**40)[0]


def exact(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.einsum("btp,btd->bpd", g.double(), a.double())


def integer_norm(alpha: torch.Tensor, gamma: torch.Tensor) -> int:
    """The squared norm of a sample's sum of products, in Python's integers."""
    whole = (gamma.T @ alpha).to(torch.int64)  # exact: below 2^31
    return sum(int(x) ** 2 for x in whole.flatten().tolist())


def adversarial(t: int, d: int, p: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield operands that rounding hurts, or that come near the largest integers."""
    generator = torch.Generator().manual_seed(3)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    yield "usual", normal(4, t, d), normal(4, t, p)
    a, g = normal(4, t, d), normal(4, t, p)
    half = t // 2
    a[:, half : 2 * half] = a[:, :half]
    g[:, half : 2 * half] = -g[:, :half] * (1 + 2.0**-20)
    yield "positions that cancel", a, g
    yield "all alike", torch.full((4, t, d), 1.37), torch.full((4, t, p), -0.77)
    one = torch.zeros(4, t, d)
    one[..., 0] = 1.999999
    peak = torch.full((4, t, p), 1e-4)
    peak[..., -1] = -1
    yield "one entry", one, peak
    yield "one entry of the outputs", normal(4, t, d), peak
    halves = torch.where(normal(4, t, d) > 0, 1.0, 1 / 2.0**15)
    yield "entries of one half", halves, torch.where(normal(4, t, p) > 0, 1.0, 1 / 2.0**14)
    scales = torch.exp2(torch.randint(-50, 50, (4, t, 1), generator=generator).float())
    yield "positions of all sizes", normal(4, t, d) * scales, normal(4, t, p) / scales
    yield "positions of all products", normal(4, t, d) * scales, normal(4, t, p)
    a, g = normal(4, t, d), normal(4, t, p)
    a[:, ::2], g[:, 1::3] = 0, 0
    yield "positions of zeros", a, g
    shifts = torch.tensor([1.0, 2.0**-75, 2.0**-43, 2.0**70])[:, None, None]
    yield "squares beyond float32", normal(4, t, d) * shifts, normal(4, t, p) / shifts
    yield "small", normal(4, t, d) * 2.0**-80, normal(4, t, p) * 2.0**-70
    yield "large", normal(4, t, d) * 2.0**80, normal(4, t, p) * 2.0**-90


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_those_of_the_integers_and_never_below(shape: tuple[int, int, int]) -> None:
    for name, a, g in adversarial(*shape):
        alpha, gamma, units = rounded_operands(a, g)
        sizes = units * (alpha.norm(dim=2) * gamma.norm(dim=2)).sum(1)
        for isa in testing.available_isas():
            with testing.isa(isa):
                norms = ghost.linear_integer_norm(a, g).sqrt()
                factors = (2.0**30 / norms).float().where(norms > 0, 1.0)
                for b in range(len(a)):
                    q = integers(*(x[b : b + 1] for x in (a, g, factors))).double().norm().item()
                    upper = norms[b].item() * factors[b].item()
                    assert q <= upper * (1 + 6 * 2.0**-24), (isa, name, b)
                    # Truncation takes up to 1 from every entry; a sum that cancels, more.
                    lost = math.sqrt(shape[1] * shape[2]) + 6 * 2.0**-24 * upper
                    slack = 2.0**-25 * (shape[0] + 8) * sizes[b].item() * factors[b].item()
                    assert upper <= q + lost + slack, (isa, name, b)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_takes_the_norms_of_its_integers(shape: tuple[int, int, int]) -> None:
    for name, a, g in adversarial(*shape):
        alpha, gamma, units = rounded_operands(a, g)
        squares = ghost.linear_integer_norm(a, g, backend="reference")
        for b in range(len(a)):
            true = integer_norm(alpha[b], gamma[b]) * units[b].item() ** 2
            assert true <= squares[b].item() <= true * (1 + 2.0**-30), (name, b)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_instruction_sets_and_the_reference_make_the_same_integers(
    shape: tuple[int, int, int],
) -> None:
    """A norm bounds a sum, whichever backend takes the one and makes the other."""
    for name, a, g in adversarial(*shape):
        for kind in (torch.float32, torch.float64):
            operands = a.to(kind), g.to(kind)
            factors = clipping(ghost.linear_integer_norm(*operands)).to(kind)
            out = torch.zeros(g.shape[2], a.shape[2], dtype=torch.int32)
            ghost.linear_integer_sum(
                *operands, factors, out, rounding="operands", backend="reference"
            )
            made = [out]
            for isa in testing.available_isas():
                with testing.isa(isa):
                    made.append(integers(*operands, factors))
            assert all(torch.equal(made[0], other) for other in made), (name, kind)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_sample_exceeds_the_bound(shape: tuple[int, int, int]) -> None:
    for name, a, g in adversarial(*shape):
        for isa in testing.available_isas():
            with testing.isa(isa):
                factors = clipping(ghost.linear_integer_norm(a, g))
                for b in range(len(a)):
                    q = integers(*(x[b : b + 1] for x in (a, g, factors))).double()
                    assert q.square().sum() <= M * M, (isa, name, b)


def test_the_norm_before_rounding_admits_too_much() -> None:
    """A factor that aims with the gradient's own norm: the test above can fail."""
    t, d, p = 2, 40, 40
    generator = torch.Generator().manual_seed(5)
    above = 0
    for _ in range(40):
        a = torch.randn(1, t, d, generator=generator)
        g = torch.randn(1, t, p, generator=generator)
        # Nearly opposite positions: what rounding leaves of the difference is another vector.
        a[:, 1], g[:, 1] = a[:, 0], -g[:, 0] * (1 + 2.0**-12)
        true = exact(a, g).flatten(1).square().sum(1)
        q = integers(a, g, clipping(true)).double()
        above += bool(q.square().sum() > M * M)
    assert above > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_samples_integers_depend_on_nothing_else(shape: tuple[int, int, int]) -> None:
    t, d, p = shape
    generator = torch.Generator().manual_seed(t)
    a = torch.randn(23, t, d, generator=generator)
    g = torch.randn(23, t, p, generator=generator)
    factors = clipping(ghost.linear_integer_norm(a, g)) * torch.rand(23, generator=generator)
    factors[2] = 0
    order = torch.randperm(23, generator=generator)
    alone = [integers(a[b : b + 1], g[b : b + 1], factors[b : b + 1]) for b in range(23)]
    whole = torch.stack(alone).sum(0).int()
    for threads in (1, 2, 3):
        with testing.threads(threads):
            assert torch.equal(integers(a, g, factors), whole)
            assert torch.equal(integers(a[order], g[order], factors[order]), whole)
            norms = ghost.linear_integer_norm(a, g)
            assert torch.equal(norms[order], ghost.linear_integer_norm(a[order], g[order]))


@pytest.mark.parametrize("shape", [(32, 64, 64), (65, 192, 768), (128, 256, 100), (1024, 64, 64)])
def test_rounding_is_a_small_part_of_a_usual_gradient(shape: tuple[int, int, int]) -> None:
    t, d, p = shape
    generator = torch.Generator().manual_seed(d)
    a = torch.randn(2, t, d, generator=generator)
    g = torch.softmax(3 * torch.randn(2, t, p, generator=generator), 2)
    g[..., 0] -= 1
    true = exact(a, g)
    alpha, gamma, units = rounded_operands(a, g)
    made = units[:, None, None] * exact(alpha, gamma)
    assert ((made - true).flatten(1).norm(dim=1) <= 4e-3 * true.flatten(1).norm(dim=1)).all()
    # Rounding has no direction, but for small entries that become zero.
    along = (made * true).flatten(1).sum(1) / true.flatten(1).square().sum(1)
    assert (along - 1).abs().max() < 1e-3


def test_samples_that_are_lost() -> None:
    a, g = torch.ones(7, 33, 64), torch.full((7, 33, 64), 0.5)
    a[0, 5, 3], g[1, 2, 2], a[2, 1, 1], g[3, 0, 0] = math.nan, math.inf, 2.0**101, -(2.0**101)
    a[4], g[5] = 0, 2.0**-130
    for isa in testing.available_isas():
        with testing.isa(isa):
            squares = ghost.linear_integer_norm(a, g)
            assert squares[:4].isinf().all(), isa
            assert squares[4:6].tolist() == [0, 0], isa
            assert squares[6].item() == pytest.approx(
                float(exact(a, g)[6].square().sum()), rel=2e-3
            ), isa
            # A lost sample adds nothing, whatever its factor.
            assert torch.equal(
                integers(a, g, torch.full((7,), 1e3)), integers(a[6:], g[6:], torch.tensor([1e3]))
            )
    for kept in (a[:0], g[:0]):
        assert ghost.linear_integer_norm(kept, kept).shape == (0,)
    none = torch.zeros(2, 0, 5), torch.zeros(2, 0, 3)
    assert ghost.linear_integer_norm(*none).tolist() == [0, 0]
    assert not integers(*none, torch.ones(2)).any()
