"""SPOF's environmental noise and the largest multiplier: print and exact form (S8-S10)."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.papers.spof import bmax
from dpkern.privacy.theory import environment, spof_loss
from tests.objective.spof_network import CODES, REAL, N, Network, real, seeded

near = partial(pytest.approx, rel=1e-6)


# Environmental noise: (13), (34)-(39), theorem 1.


def test_identities_of_the_noisy_network_v8() -> None:
    net = Network(sigma=2.0)
    assert (net.b * net.hidden - net.noisy_hidden).abs().max() < 1e-12
    assert (net.b >= 0).all()
    assert (net.b <= 1 / net.hidden).all()
    v = net.noise @ net.encoder
    torch.testing.assert_close(net.b, v.exp() / (1 + (v.exp() - 1) * net.hidden))
    weighted = [[sum((net.total[u] - net.b[u, r]) * net.decoder[r, i] * net.hidden[u, r]
                     for r in range(CODES)) for i in range(N)] for u in range(5)]  # fmt: skip
    torch.testing.assert_close(net.offset, torch.tensor(weighted, dtype=REAL))
    found = environment.noisy_logits(net.z, net.total, net.offset)
    assert (found - net.noisy_z).abs().max() < 1e-12


def test_without_noise_b_is_the_code_length_v8_s8() -> None:
    net = Network(sigma=0.0)
    assert (net.b - 1).abs().max() < 1e-12
    assert (net.total - CODES).abs().max() < 1e-12
    found = environment.noisy_logits(net.z, net.total, net.offset)
    assert (found - net.z).abs().max() < 1e-12
    # (13) does not become (12) there, and Dbar^[N] is l times Dbar.
    alpha = spof_loss.coefficients(net.x)
    clean = spof_loss.polynomial(alpha, net.z).sum(-1)
    loss = partial(environment.noisy_loss, alpha, net.z, net.total, net.offset)
    assert (loss() - clean).abs().min() > 0.1
    torch.testing.assert_close(loss(power="squared"), clean)
    torch.testing.assert_close(
        environment.noisy_sensitivity(N, net.total), torch.full_like(net.total, 7 * 21)
    )


def test_only_the_square_of_b_gives_the_polynomial_at_the_noisy_logit_v9_s8() -> None:
    net = Network(sigma=2.0)
    for form in spof_loss.FORMS:
        alpha = spof_loss.coefficients(net.x, form=form)
        wanted = spof_loss.polynomial(alpha, net.noisy_z).sum(-1)
        loss = partial(environment.noisy_loss, alpha, net.z, net.total, net.offset)
        assert (loss(power="squared") - wanted).abs().max() < 1e-11
        assert (loss() - wanted).abs().min() > 0.05


def test_multipliers_of_extreme_noise() -> None:
    found = environment.multipliers(real(0.25, 0.25, 0.25), real(-1e4, 1e4, 0.0))
    torch.testing.assert_close(found, real(0.0, 4.0, 1.0))


def test_printed_scale_with_environmental_noise() -> None:
    found = environment.noisy_sensitivity(N, real(7.0, 0.5), real(0.0, 2.5))
    assert found.tolist() == pytest.approx([147, 10.5 + 113.75])
    assert environment.noisy_sensitivity(N, real(1.0), 2.5).item() == pytest.approx(134.75)


# The largest multiplier: (46)-(56), proposition 4.


def test_norm_enters_squared_s9() -> None:
    assert bmax.exponent_scale(5, 21.5) == near(107.5)
    assert bmax.exponent_scale(5, 21.5, form="printed") ** 2 == near(25 * 21.5)
    w = torch.randn(N, generator=seeded(2), dtype=REAL)
    projected = 5 * torch.randn(100_000, N, generator=seeded(5), dtype=REAL) @ w
    norm = w.norm().item()
    assert projected.std().item() == pytest.approx(bmax.exponent_scale(5, norm), rel=0.01)
    assert projected.std().item() != pytest.approx(
        bmax.exponent_scale(5, norm, form="printed"), rel=0.1
    )


@pytest.mark.parametrize("h", [0.0, 0.3, 0.9])
def test_only_the_correct_inverse_undoes_the_map_s9(h: float) -> None:
    d = torch.linspace(-3, 3, 31, dtype=REAL)
    x = environment.multipliers(torch.full_like(d, h), d)
    torch.testing.assert_close(x, d.exp() / (1 + h * (d.exp() - 1)))
    torch.testing.assert_close(bmax.inverse(x, h), d.exp())
    assert torch.allclose(bmax.inverse(x, h, form="printed"), d.exp()) == (h == 0)
    for form in bmax.FORMS:
        at = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(bmax.inverse(at, h, form=form).sum(), at)
        torch.testing.assert_close(bmax.slope(x, h, form=form), gradient)


@pytest.mark.parametrize("form", bmax.FORMS)
@pytest.mark.parametrize("h", [0.0, 0.3, 0.9])
def test_densities_are_those_of_their_closed_distribution_functions(h: float, form: str) -> None:
    top = min(bmax.support(h, form=form), 60.0)
    x = ((torch.arange(500, dtype=REAL) + 0.5) * top / 500).requires_grad_()
    (gradient,) = torch.autograd.grad(bmax.cdf(x, h, 1.5, form=form).sum(), x)
    torch.testing.assert_close(bmax.pdf(x.detach(), h, 1.5, form=form), gradient)
    outside = real(-1.0, 0.0, *([1e3] if h else []))
    assert bmax.pdf(outside, h, 1.5, form=form).tolist() == [0] * len(outside)
    assert bmax.cdf(outside, h, 1.5, form=form).tolist() == [0, 0, 1][: len(outside)]
    assert bmax.cdf(real(1e-9), h, 1.5, form=form).item() < 1e-30
    assert bmax.cdf(real(top), h, 1.5, form=form).item() > 0.99


def test_printed_density_as_a_formula() -> None:
    h, s = 0.3, 1.5
    x = torch.linspace(0.05, 3.2, 64, dtype=REAL)
    root = s * math.sqrt(2 * math.pi)
    printed = (1 + h) / root / (x * (1 - h * x + h))
    printed = printed * torch.exp(-(torch.log(x / (1 - h * x + h)) ** 2) / (2 * s * s))
    torch.testing.assert_close(bmax.pdf(x, h, s, form="printed"), printed)
    correct = 1 / root / (x * (1 - h * x))
    correct = correct * torch.exp(-(torch.log(x * (1 - h) / (1 - h * x)) ** 2) / (2 * s * s))
    torch.testing.assert_close(bmax.pdf(x, h, s), correct)
    same = [bmax.pdf(x, 0.0, s, form=form) for form in bmax.FORMS]
    assert torch.equal(*same)
    ends = [bmax.support(h, form=form) for form in bmax.FORMS]
    assert ends == pytest.approx([(1 + h) / h, 1 / h])
    assert [bmax.support(0.0, form=form) for form in bmax.FORMS] == [math.inf, math.inf]
    assert bmax.pdf(real(4.0), h, s, form="printed") > 0
    for level in (0.0, 0.3, 0.9):
        assert bmax.cdf(real(1.0), level, s).item() == near(0.5)


def test_only_the_correct_density_is_that_of_draws_v10_s9() -> None:
    h, s, draws = 0.3, 1.5, 2_000_000
    bins = 25
    x = bmax.sample(h, s, draws, seeded(10))
    counts = torch.histc(x, bins, 0.05, 3.2)
    edges = torch.linspace(0.05, 3.2, bins + 1, dtype=REAL)

    def deviation(form: str) -> float:
        expected = draws * bmax.cdf(edges, h, s, form=form).diff()
        return (expected / counts - 1).abs().max().item()

    assert deviation("correct") < 0.03
    assert deviation("printed") == pytest.approx(0.38, abs=0.01)


def test_largest_of_many_v11_s10() -> None:
    scale = bmax.exponent_scale(5, 21.5)
    exact = bmax.bmax_probability(CODES, 100, 0.0, scale)
    assert exact == pytest.approx(1.84e-31, rel=5e-3)
    # The source's own rule gives the same magnitude, in both forms.
    assert bmax.bmax_trapezoid(CODES, 100, 0.0, scale) == pytest.approx(exact, rel=0.5)
    for form in bmax.FORMS:
        for sigma in (0.1, 1.0, 5.0, 20.0, 1e6):
            s = bmax.exponent_scale(sigma, 21.5, form=form)
            for h in (0.0, 0.3, 0.9):
                assert bmax.bmax_probability(CODES, 100, h, s, form=form) < 2.0**-100
    # The claimed 1/2 is there for one code and one copy only.
    assert bmax.bmax_probability(1, 1, 0.4, 2.0) == near(0.5)
    assert bmax.bmax_probability(1, 2, 0.4, 2.0) == near(0.25)


def test_trapezoid_meets_the_closed_form() -> None:
    for h in (0.0, 0.3, 0.9):
        exact = bmax.bmax_probability(CODES, 100, h, 1.5, at=9.0)
        found = bmax.bmax_trapezoid(CODES, 100, h, 1.5, at=9.0, points=20_001)
        assert found == pytest.approx(exact, rel=1e-4)
    assert bmax.bmax_trapezoid(1, 1, 0.3, 1.0, points=20_001) == pytest.approx(0.5, rel=1e-6)
    assert bmax.sensitivity_gap(7.0) == 9
    assert bmax.sensitivity_gap(1.0) == 0


def test_law_of_the_largest_is_that_of_draws() -> None:
    h, s, copies = 0.2, 1.2, 20
    largest = CODES * bmax.sample(h, s, 20_000 * copies, seeded(8)).reshape(-1, copies).amax(-1)
    for at in (14.0, 21.0, 28.0):
        exact = bmax.bmax_probability(CODES, copies, h, s, at=at)
        assert (largest <= at).double().mean().item() == pytest.approx(exact, abs=0.015)


def test_b_is_hardly_ever_below_one_v12_s10() -> None:
    run = partial(bmax.simulate, CODES, N)
    calm = run(spread=0.1, sigma=0.01, draws=4_000, generator=seeded(1))
    assert calm.below_one == 0
    loud = run(spread=10, sigma=1e6, draws=20_000, generator=seeded(2))
    assert loud.below_one == pytest.approx(2**-7, abs=2e-3)
    paper = run(spread=10, sigma=5, draws=20_000, generator=seeded(3))
    assert paper.below_one == pytest.approx(0.0071, abs=1.4e-3)
    assert paper.below_one < paper.below_codes < 0.5


def test_simulated_multipliers_are_those_of_34() -> None:
    draws, generator = 3_000, seeded(4)
    encoder = 2 * torch.rand(draws, N, CODES, generator=generator, dtype=REAL) - 1
    record = torch.rand(draws, 1, N, generator=generator, dtype=REAL)
    noise = 3 * torch.randn(draws, 1, N, generator=generator, dtype=REAL)
    b = environment.multipliers(torch.sigmoid(record @ encoder), noise @ encoder).sum((1, 2))
    found = bmax.simulate(CODES, N, spread=1, sigma=3, draws=draws, generator=seeded(4))
    wanted = [(b < level).double().mean().item() for level in (1, CODES)]
    assert [found.below_one, found.below_codes] == pytest.approx(wanted, abs=1e-12)
    assert 0 < found.below_one < found.below_codes


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: bmax.pdf(real(0.5), 1.0, 1.0), "h"),
        (lambda: bmax.cdf(real(0.5), 0.5, 0.0), "scale"),
        (lambda: bmax.bmax_trapezoid(7, 100, 0.0, 1.0, points=1), "points"),
        (lambda: bmax.sample(0.5, 1.0, 0, seeded(0)), "draws"),
    ],
)
def test_numbers_out_of_range_are_refused(call: object, name: str) -> None:
    assert callable(call)
    with pytest.raises(InvalidInput, match=f"^{name}: "):
        call()
