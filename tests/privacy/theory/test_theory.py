"""The sources' formulas: every printed number, and where print and exact form part."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.papers.directional import information, utility_subspace, water_filling
from dpkern.papers.gredp import corollary
from dpkern.papers.pnsgd import divergence
from dpkern.privacy.theory import composition, gaussian, markov, pnsgd, rdp

near = partial(pytest.approx, rel=1e-6)
SIGMA = pnsgd.pnsgd_sigma(1000, 1.0, 1.0, 1e-5)


def test_classic_gaussian_with_both_constants() -> None:
    assert gaussian.classic_sigma(1, 1e-5) == near(4.844805, rel=2e-7)
    assert gaussian.classic_sigma(1, 1e-5, constant=1) == near(4.798526, rel=2e-7)
    assert gaussian.classic_epsilon(4.844805, 1e-5) == near(1)
    assert gaussian.classic_sigma(1, 1e-5, sensitivity=3) == near(3 * 4.8448053)
    assert gaussian.exact_delta(1, 4.844805) == pytest.approx(4.1e-8, rel=0.02)
    assert gaussian.exact_delta(1, 4.798526) == pytest.approx(5.3e-8, rel=0.02)


def test_exact_gaussian_is_its_own_inverse_and_beats_the_classic_one() -> None:
    for epsilon, delta in ((0.1, 1e-8), (1, 1e-5), (8, 1e-5), (200, 1e-5)):
        multiplier = gaussian.exact_multiplier(epsilon, delta)
        assert gaussian.exact_epsilon(multiplier, delta) == near(epsilon)
        assert gaussian.exact_delta(epsilon, multiplier) <= delta
        assert gaussian.exact_delta(epsilon, multiplier * (1 - 1e-6)) > delta
    assert gaussian.exact_multiplier(0.9, 1e-5) < gaussian.classic_sigma(0.9, 1e-5)


def test_exact_gaussian_equals_its_hockey_stick() -> None:
    # Both laws on a grid: midpoints of cells of 1e-3 standard deviations.
    x = torch.arange(-12_000, 16_000, dtype=torch.float64) / 1000
    p, q = (torch.exp(-((x - mean) ** 2) / 2) for mean in (1.0, 0.0))
    p, q = (law / law.sum() for law in (p, q))
    found = divergence.hockey_stick(p.tolist(), q.tolist(), math.e)
    assert found == pytest.approx(gaussian.exact_delta(1, 1.0), rel=1e-5)


def test_the_constant_of_one_fails_for_large_shifts() -> None:
    # epsilon = mu sqrt(2 log 1/delta) misses its delta 2.35 times at mu = 2 and 694 times at 5.
    for mu, ratio in ((2, 2.35), (5, 694)):
        epsilon = gaussian.classic_epsilon(1 / mu, 1e-5, constant=1)
        assert gaussian.exact_delta(epsilon, 1 / mu) / 1e-5 == pytest.approx(ratio, rel=5e-3)


def test_claims_at_a_root_two_smaller_multiplier_survive_only_by_slack() -> None:
    def certified(claimed: float, delta: float) -> float:
        sigma = gaussian.classic_sigma(claimed, delta)
        return gaussian.exact_epsilon(sigma / math.sqrt(2), delta)

    for delta, last in ((1e-5, 0.365), (1e-6, 0.162), (1e-8, 0.026)):
        assert certified(last - 1e-3, delta) <= last - 1e-3
        assert certified(last + 1e-3, delta) > last + 1e-3
    assert certified(0.5, 1e-5) == pytest.approx(0.514, abs=5e-4)


def test_hockey_stick_and_contraction_of_channels() -> None:
    r = Fraction(1, 4)
    channel = [[1 - r, r], [r, 1 - r]]
    assert divergence.hockey_stick(channel[0], channel[1], Fraction(2)) == Fraction(1, 4)
    for gamma in (Fraction(1), Fraction(2), Fraction(3), Fraction(4)):
        assert divergence.contraction(channel, gamma) == max(0, (1 - r) - gamma * r)
    assert divergence.ldp_epsilon(channel) == near(math.log(3), rel=1e-15)
    assert divergence.ldp_epsilon([[1.0, 0.0], [0.5, 0.5]]) == math.inf
    assert divergence.ldp_epsilon([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]) == 0
    # The order of the pair matters: here the second row exceeds the first by more.
    lopsided = [[0.9, 0.1], [0.5, 0.5]]
    assert divergence.contraction(lopsided, 1.5) == pytest.approx(0.35)


@pytest.mark.parametrize("rows", [[[1.0]], [[0.5, 0.5], [1.0]], [[0.5, 0.4], [0.5, 0.5]], [[], []]])
def test_what_is_no_channel_is_refused(rows: list[list[float]]) -> None:
    with pytest.raises(InvalidInput, match="channel"):
        divergence.ldp_epsilon(rows)


def test_amplification_exact_and_simplified() -> None:
    assert composition.amplified(1, 1e-5, 0.01) == near((0.01703686, 1e-7))
    assert composition.amplified(0.5, 0.0, 0.001)[0] == near(0.000648511)
    root = composition.SIMPLIFIED_UP_TO
    assert math.expm1(root) == near(2 * root, rel=1e-12)
    for rate in (1e-3, 0.1):
        for epsilon, holds in ((0.5, True), (root, True), (3.0, False)):
            exact = composition.amplified(epsilon, 0, rate)[0]
            assert (exact <= composition.amplified_simplified(epsilon, 0, rate)[0]) == holds


def test_advanced_composition_with_and_without_its_second_term() -> None:
    leading = composition.advanced(0.1, 1e-9, 100, 1e-6, second_term=False)
    whole = composition.advanced(0.1, 1e-9, 100, 1e-6)
    assert leading == near((0.1 * math.sqrt(200 * math.log(1e6)), 100e-9 + 1e-6))
    assert whole[0] - leading[0] == near(100 * 0.1 * math.expm1(0.1))
    assert composition.basic(0.1, 1e-9, 100) == near((10, 1e-7))


def test_sampled_gaussian_rdp() -> None:
    assert rdp.rdp_epsilon(0.01, 4.0, 10_000, 1e-5) == (near(1.25857, rel=4e-6), 20)
    assert rdp.rdp_epsilon(1.0, 5.0, 1, 1e-5) == (near(0.979705), 25)
    # A rate next to 1 meets the closed form without sampling.
    almost = rdp.sampled_gaussian_rdp(1 - 1e-12, 5.0, 7)
    assert almost == pytest.approx(rdp.sampled_gaussian_rdp(1.0, 5.0, 7), rel=1e-9)


def test_composition_of_layers_as_the_accountant_of_the_sources_sees_it() -> None:
    # q = 500/60000, 3600 steps: flat, multiplier / sqrt 2, five layers, both.
    rate, sigma = 500 / 60000, 2.586
    for share, epsilon in ((1, 1.000), (2, 1.498), (5, 2.820), (10, 5.715)):
        found = rdp.rdp_epsilon(rate, sigma / math.sqrt(share), 3600, 1e-5).epsilon
        assert found == pytest.approx(epsilon, abs=2e-3)
    for share, epsilon in ((1, 2.001), (2, 3.439), (10, 38.24)):
        found = rdp.rdp_epsilon(rate, 1.461 / math.sqrt(share), 3600, 1e-5).epsilon
        assert found == pytest.approx(epsilon, abs=5e-3)


def test_corollary_2_as_printed_twice() -> None:
    epsilon = rdp.convert(0.1, 12, 1e-5)
    log = 2 * math.log(1.24e5)
    assert corollary.corollary2_sigma(0.1, 12, 1e-5) == near(math.sqrt(log / epsilon))
    appendix = corollary.corollary2_sigma(0.1, 12, 1e-5, placement="appendix")
    assert appendix == near(math.sqrt(log) / epsilon)
    sizes = {"epochs": 30, "dataset_size": 60_000, "batch_size": 500}
    total = corollary.corollary2_epsilon(0.1, 12, 1e-5, **sizes)
    assert total == near(3600 * 0.1 + math.log(1e5) / 11)


def test_markov_budget() -> None:
    assert markov.tau(1, 1e-5, 100) == near((4.162358e-4, 24), rel=2e-7)
    assert markov.tau(2, 1e-5, 1000) == near((1.600907e-4, 12), rel=2e-7)
    for order, scale in (("integer", 49.0151), ("real", 49.0056)):
        assert 1 / math.sqrt(markov.tau(1, 1e-5, 100, order).tau) == near(scale, rel=1e-6)
    assert 1 / math.sqrt(markov.tau(2, 1e-5, 1000).tau) == near(79.0345, rel=1e-6)


def test_the_best_real_order_is_concentrated_privacy() -> None:
    for epsilon, delta, count in ((1, 1e-5, 100), (0.01, 1e-8, 7), (50, 0.1, 1000)):
        found = markov.tau(epsilon, delta, count, "real")
        assert composition.zcdp_epsilon(count * found.tau / 2, delta) == near(epsilon)
        tail = math.log(1 / delta)
        assert found.tau == near(2 * tail / (count * found.beta**2))
        integer = markov.tau(epsilon, delta, count)
        others = [2 * (epsilon - tail / b) / (count * (1 + b)) for b in range(1, 5000)]
        assert integer.tau == near(max(others))
        assert integer.tau <= found.tau


def test_pnsgd_numbers() -> None:
    assert pnsgd.pnsgd_sigma(100, 1, 1, 1e-5) / 100 == near(114.59822)
    assert SIGMA / 1000 == near(122.19454)
    expected = {"notes": 1.0, "full_advanced": 1.04097, "exact_amplification": 0.53749}
    for rule, epsilon in expected.items():
        found = pnsgd.pnsgd_epsilon(SIGMA, 1000, 1, 1e-5, rule=rule)
        assert found == pytest.approx(epsilon, rel=1e-5)
    assert pnsgd.pnsgd_epsilon(SIGMA, 1000, 1, 1e-5, rule="rdp") == pytest.approx(0.08, abs=2e-3)
    assert pnsgd.utility_bound(1000, 1, 10, SIGMA, 1) == near(5338.51)


def test_pnsgd_chain_closes() -> None:
    chain = pnsgd.pnsgd_chain(SIGMA, 1000, 1.0, 1e-5)
    assert chain.query == pytest.approx(0.1012, rel=1e-4)
    assert chain.composed == near((1.0, 1e-5))
    assert chain.total == near(chain.composed[0], rel=1e-12)
    assert chain.sigma == near(SIGMA, rel=1e-12)
    # Other numbers of steps: step 3 with the same halves of delta.
    short = pnsgd.pnsgd_epsilon(SIGMA, 1000, 1, 1e-5, steps=10_000)
    logs = math.log(2e4 / (1000 * 1e-5)) * math.log(2e5)
    assert short == near(4 / SIGMA * 2 * math.sqrt(10_000 * logs))


def test_steps_shrink_by_the_root() -> None:
    sizes = pnsgd.step_sizes(2.0, 4.0)
    assert [sizes(1), sizes(4), sizes(100)] == near([0.5, 0.25, 0.05])
    assert pnsgd.gradient_bound(10, 2.0, 9, 5.0) == near(25)


def test_information_bounds() -> None:
    for epsilon, nats in ((0.1, 0.0052585), (1, 0.8591409), (2, 6.389056)):
        assert information.printed_bound(epsilon) == pytest.approx(nats, rel=1e-5)
    assert information.sharp_bound(1) == near(0.4621172)


def test_randomized_response_attains_the_sharp_bound() -> None:
    for epsilon in (0.1, 1.0, 4.0):
        r = 1 / (1 + math.exp(epsilon))
        rows = [[1 - r, r], [r, 1 - r]]
        assert information.kl(*rows) == near(information.sharp_bound(epsilon), rel=1e-12)
        nats = information.mutual_information([0.5, 0.5], rows)
        assert 0 < nats < information.sharp_bound(epsilon) < information.printed_bound(epsilon)
    assert information.kl([0.5, 0.5], [1.0, 0.0]) == math.inf


def test_water_filling() -> None:
    entropies = [water_filling.gaussian_entropy(variance) for variance in (4, 1, 0.25)]
    betas = water_filling.entropy_powers((1, 1, 1), entropies)
    assert betas == near((4, 1, 0.25), rel=1e-12)
    for rate, level, distortion in ((1, 0.7357589, 1.7215178), (3, 0.1353353, 0.4060058)):
        found = water_filling.distortion_at(betas, rate)
        assert (found.level, found.distortion, found.rate) == near((level, distortion, rate))
        back = water_filling.rate_at(betas, found.distortion)
        assert (back.level, back.rate) == near((found.level, rate), rel=1e-9)
    assert water_filling.distortion_at(betas, 0).distortion == near(5.25)
    assert water_filling.rate_at(betas, 6).rate == 0


def test_water_level_equals_bisection() -> None:
    generator = torch.Generator().manual_seed(1)
    betas = torch.rand(40, generator=generator, dtype=torch.float64).pow(4).tolist()
    for rate in (0.01, 3.0, 50.0, 400.0):
        low, high = 0.0, max(betas)
        for _ in range(200):
            level = (low + high) / 2
            spent = sum(max(0.0, math.log(beta / level) / 2) for beta in betas)
            low, high = (level, high) if spent > rate else (low, level)
        assert water_filling.distortion_at(betas, rate).level == near(high, rel=1e-9)


def test_entropies() -> None:
    width = 3.0
    assert water_filling.uniform_entropy(width) == near(math.log(3))
    assert water_filling.laplace_entropy(2.0) == near(1 + math.log(4))
    # At equal variance nothing has more entropy than a Gaussian.
    assert water_filling.laplace_entropy(1.0) < water_filling.gaussian_entropy(2.0)
    assert water_filling.uniform_entropy(math.sqrt(12)) < water_filling.gaussian_entropy(1.0)


def test_utility_subspace() -> None:
    found = utility_subspace.demonstrate(0, points=8)
    assert found.accuracy > 0.98
    for surface in found.surfaces:
        step = surface.offsets[1] - surface.offsets[0]
        for axis, (low, high) in enumerate(surface.slopes):
            measured = surface.cost.diff(dim=axis) / step
            assert low - 1e-9 <= measured.min() <= measured.max() <= high + 1e-9
    # The cost moves with the sign of the derivative: somewhere up, somewhere down.
    lows, highs = zip(*(slope for s in found.surfaces for slope in s.slopes), strict=True)
    assert min(lows) < 0 < max(highs)
