"""SPOF's loss and sensitivities: printed numbers, and where they are wrong (S1-S7, S11)."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.papers.spof import expansion, remainder
from dpkern.privacy.theory import spof_loss, spof_sensitivity
from tests.objective.spof_network import CODES, REAL, N, Network, real, seeded

near = partial(pytest.approx, rel=1e-6)
SHIFTS = (0.0, 1.0, 2.5, 8.75, 17.5)
GRID = torch.linspace(0, 1, 101, dtype=REAL)


# The loss: (6)-(12), proposition 1.


@pytest.mark.parametrize("a", [-1.5, 0.0, 0.7, 12.0])
def test_derivatives_are_autograds_except_the_printed_sign_s1(a: float) -> None:
    at = torch.full_like(GRID, a, requires_grad=True)
    halves = (
        GRID * torch.nn.functional.softplus(-at),
        (1 - GRID) * torch.nn.functional.softplus(at),
    )
    taylor = spof_loss.derivatives(GRID, a, form="taylor")
    printed = spof_loss.derivatives(GRID, a)
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-15)
    for k, half in enumerate(halves):
        (first,) = torch.autograd.grad(half.sum(), at, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), at)
        close(taylor[k], half.detach())
        close(taylor[2 + k], first.detach())
        close(taylor[4 + k], second)
    assert all(torch.equal(printed[k], taylor[k]) for k in (0, 1, 2, 3, 4))
    assert torch.equal(printed.second2, -taylor.second2)


def test_coefficients_at_zero_s1() -> None:
    printed = spof_loss.coefficients(GRID)
    torch.testing.assert_close(printed.constant, torch.full_like(GRID, math.log(2)))
    torch.testing.assert_close(printed.linear, 0.5 - GRID)
    torch.testing.assert_close(printed.quadratic, 0.5 * GRID - 0.25)
    taylor = spof_loss.coefficients(GRID, form="taylor")
    assert torch.equal(taylor.quadratic, torch.full_like(GRID, 1 / 8))
    torch.testing.assert_close(taylor.linear, printed.linear)


@pytest.mark.parametrize("a", [-1.0, 0.0, 0.9057])
def test_coefficients_anywhere_are_those_of_11(a: float) -> None:
    e = math.exp(a)
    printed = spof_loss.coefficients(GRID, a)
    logs = torch.log(((1 + 1 / e) / (1 + e)) ** GRID * (1 + e))
    torch.testing.assert_close(printed.constant, logs)
    torch.testing.assert_close(printed.linear, 1 / (1 + 1 / e) - GRID)
    torch.testing.assert_close(printed.quadratic, (2 * GRID - 1) / (2 + e + 1 / e))
    s = 1 / (1 + 1 / e)
    taylor = spof_loss.coefficients(GRID, a, form="taylor").quadratic
    torch.testing.assert_close(taylor, torch.full_like(GRID, s * (1 - s) / 2))


def test_printed_quadratic_is_minus_half_the_linear_coefficient_v6() -> None:
    printed = spof_loss.coefficients(GRID)
    assert (printed.quadratic + printed.linear / 2).abs().max() < 1e-16
    taylor = spof_loss.coefficients(GRID, form="taylor")
    assert (taylor.quadratic + taylor.linear / 2).abs().max() > 0.3


def test_printed_loss_turns_at_one_and_falls_without_bound_s2() -> None:
    low, high = real(0.0, 0.2, 0.499), real(0.501, 0.8, 1.0)
    for x, unbounded in ((low, True), (high, False)):
        alpha = spof_loss.coefficients(x)
        torch.testing.assert_close(remainder.stationary_point(alpha), torch.ones_like(x))
        assert bool((remainder.unbounded_below(alpha) == unbounded).all())
        at = [spof_loss.polynomial(alpha, torch.full_like(x, z)) for z in (0.9, 1.0, 1.1)]
        turns_down = (at[0] < at[1]) & (at[2] < at[1])
        assert bool((turns_down == unbounded).all())
    half = spof_loss.coefficients(real(0.5))
    assert remainder.stationary_point(half).isnan().all()
    assert not remainder.unbounded_below(half).any()
    ten = real(10.0)
    found = spof_loss.polynomial(spof_loss.coefficients(real(0.0)), ten).item()
    assert found == near(-19.306853, rel=1e-6)
    assert spof_loss.cross_entropy(ten, real(0.0)).item() == near(10.0000454)

    taylor = spof_loss.coefficients(GRID, form="taylor")
    torch.testing.assert_close(remainder.stationary_point(taylor), 4 * (GRID - 0.5))
    assert not remainder.unbounded_below(taylor).any()


def test_printed_polynomial_is_off_in_the_second_order_s3() -> None:
    z = real(0.01)
    for x in (real(0.0), real(0.4), real(1.0)):
        exact = spof_loss.cross_entropy(z, x)
        printed = spof_loss.polynomial(spof_loss.coefficients(x), z) - exact
        torch.testing.assert_close(printed / z**2, 0.5 * x - 0.375, atol=1e-5, rtol=0)
        taylor = spof_loss.polynomial(spof_loss.coefficients(x, form="taylor"), z) - exact
        assert taylor.abs().item() <= remainder.taylor_error_bound_corrected(0.01)
        assert taylor.item() == pytest.approx(1e-8 / 192, rel=1e-3)


def test_no_constant_bounds_the_derivatives_s3() -> None:
    found = [remainder.softplus_derivative(r) for r in range(2, 19, 2)]
    listed = (0.25, -0.125, 0.25, -1.0625, 7.75, -86.375, 1365.25, -29049.03, 800572.8)
    assert [float(f) for f in found] == pytest.approx(listed, rel=1e-6)
    assert found[:4] == [Fraction(1, 4), Fraction(-1, 8), Fraction(1, 4), Fraction(-17, 16)]
    assert remainder.softplus_derivative(1) == Fraction(1, 2)
    assert not any(remainder.softplus_derivative(r) for r in (3, 5, 7))
    at = torch.linspace(-4, 4, 8_001, dtype=REAL)
    s = torch.sigmoid(at)
    second = s * (1 - s)
    assert (second * (1 - 2 * s)).abs().max().item() == near(remainder.THIRD)
    fourth = second * (1 - 6 * s + 6 * s**2)
    assert fourth.abs().max().item() == near(remainder.FOURTH)


@pytest.mark.parametrize(
    ("delta", "observed"), [(0.1, 5.20e-7), (0.5, 3.20e-4), (1.0, 0.004885493)]
)
def test_taylor_error_and_its_bounds_v13(delta: float, observed: float) -> None:
    z = torch.linspace(-delta, delta, 2001, dtype=REAL)
    alpha = spof_loss.coefficients(torch.full_like(z, 0.3), form="taylor")
    error = (spof_loss.polynomial(alpha, z) - spof_loss.cross_entropy(z, real(0.3))).abs()
    assert error.max().item() == pytest.approx(observed, rel=1e-6 if delta == 1 else 4e-3)
    assert remainder.taylor_error(delta) == pytest.approx(error.max().item(), rel=1e-8)
    bound = remainder.taylor_error_bound_corrected(delta)
    assert remainder.taylor_error(delta) <= bound
    assert bound == near(delta**4 / 192)
    # Proposition 1 with the first of its derivatives would be below the error of what is printed.
    printed = spof_loss.coefficients(torch.zeros_like(z))
    wrong = (spof_loss.polynomial(printed, z) - torch.nn.functional.softplus(z)).abs().max().item()
    claimed = remainder.taylor_error_bound_published(remainder.THIRD, delta)
    assert wrong > claimed
    assert claimed == near(2 * remainder.THIRD * (math.exp(delta) - 1 - delta - delta**2 / 2))


def test_error_bounds_far_out_and_at_nothing() -> None:
    assert remainder.taylor_error_bound_corrected(10) == near(1000 / (36 * math.sqrt(3)))
    assert remainder.taylor_error(10) <= remainder.taylor_error_bound_corrected(10)
    assert remainder.taylor_error_bound_published(3, 2) == near(6 * (math.e**2 - 5))
    assert remainder.taylor_error_bound_published(1, 1e-4) == near(1e-12 / 3, rel=1e-4)
    assert remainder.taylor_error_bound_published(1, 0) == 0
    assert remainder.taylor_error_bound_published(1, 1 + 1e-9) == near(
        remainder.taylor_error_bound_published(1, 1)
    )
    with pytest.raises(InvalidInput, match="delta"):
        remainder.taylor_error_bound_corrected(-1)


def test_printed_rewriting_of_the_shift_is_another_function_v7_s5() -> None:
    net = Network()
    alpha = spof_loss.coefficients(net.x)
    rewritten = partial(spof_loss.stabilised, alpha, net.z)
    direct = rewritten(1.7)
    expanded = (alpha.constant + alpha.linear * (net.z + 1.7)) + alpha.quadratic * (
        net.z + 1.7
    ) ** 2
    torch.testing.assert_close(direct, expanded.sum(-1))
    assert (rewritten(1.7, rewriting="correct") - direct).abs().max() < 1e-12
    assert (rewritten(1.7, rewriting="printed") - direct).abs().min() > 0.1
    printed = N * math.log(2) + (
        1.7**2 * alpha.quadratic + alpha.linear * 4.4 * net.z + alpha.quadratic * net.z**2
    ).sum(-1)
    torch.testing.assert_close(rewritten(1.7, rewriting="printed"), printed)
    linear = alpha.linear + 2 * 1.7 * alpha.quadratic
    torch.testing.assert_close(linear, alpha.linear * (1 - 1.7))
    assert torch.equal(rewritten(0.0, rewriting="printed"), rewritten(0.0, rewriting="correct"))

    each = spof_loss.shift(net.hidden, 2.5)
    assert each.shape == (5,)
    torch.testing.assert_close(each, 2.5 * net.hidden.sum(-1))
    by_record = rewritten(each)
    torch.testing.assert_close(by_record, rewritten(each, rewriting="correct"))
    torch.testing.assert_close(by_record[1], rewritten(each[1].item())[1])
    # The decoder with c on all its weights gives the same logits.
    torch.testing.assert_close(net.hidden @ (net.decoder + 2.5), net.z + each.unsqueeze(-1))


# Sensitivities and scales: (14)-(27), (32), (57), (58).


@pytest.mark.parametrize(("form", "each"), [("printed", 1.5), ("taylor", 1.0)])
def test_dbar_is_the_exact_l1_sensitivity_v4(form: str, each: float) -> None:
    alpha = spof_loss.coefficients(GRID, form=form)
    pairs = torch.stack([alpha.linear, alpha.quadratic], -1)
    exact = torch.cdist(pairs, pairs, p=1).max().item()
    assert exact == near(each)
    assert spof_sensitivity.coefficient_sensitivity(N, form=form) == near(N * exact)
    if form == "printed":
        summed = alpha.linear + alpha.quadratic
        spread = (summed.max() - summed.min()).item()
        assert spof_sensitivity.summed_query_sensitivity(N) == near(N * spread)


def test_dhat_v4() -> None:
    assert spof_sensitivity.coefficient_sensitivity(N) == 21
    found = [spof_sensitivity.stabilised_sensitivity(N, c) for c in SHIFTS]
    assert found == pytest.approx([21, 56, 134.75, 801.9375, 2654.75])
    by_record = spof_sensitivity.stabilised_sensitivity(N, real(*SHIFTS))
    torch.testing.assert_close(by_record, real(*found))


def test_scales_of_both_mechanisms_s4() -> None:
    assert spof_sensitivity.fm_scale(N, 1.0) == near(14.849242)
    assert spof_sensitivity.fm_scale(N, 2.0, joint=True) == 10.5
    step = spof_sensitivity.spof_scale(N, 1.0, 2.5)
    assert step == near(134.75 / math.sqrt(2))
    # Half of M_i's variance 2 Dhat^2 is Dhat^2 = 2 scale^2; the text says Dhat^2 for the whole.
    assert 2 * step**2 == near(134.75**2)
    text = spof_sensitivity.spof_scale(N, 1.0, 2.5, statement="variance")
    assert 2 * text**2 == near(134.75**2 / 2)
    assert spof_sensitivity.local_scale(N, 0.5) == 28
    assert spof_sensitivity.coefficient_scale(N, 2.0) == 10.5
    assert spof_sensitivity.coefficient_scale(N, 2.0, form="taylor") == 7


def test_audited_factor_v5() -> None:
    found = [spof_sensitivity.audited_factor(c) for c in SHIFTS]
    assert found == pytest.approx([1.414214, 0.530330, 0.220397, 0.037033, 0.011187], abs=5e-7)
    assert spof_sensitivity.audited_epsilon(0.5, 0.0, visits=20) == near(10 * math.sqrt(2))


def spent(scale: float) -> float:
    """The worst likelihood ratio of all 2n coefficients, one record replaced by its opposite."""
    y = torch.linspace(-400, 400, 801, dtype=REAL)
    ends = spof_loss.coefficients(real(0.0, 1.0))
    pairs = [(c[0].item(), c[1].item()) for c in (ends.linear, ends.quadratic)]
    return N * sum(spof_sensitivity.log_ratio(y, p, scale, q, scale).max().item() for p, q in pairs)


def test_step_5_costs_root_two_epsilon_and_the_joint_scale_epsilon_s4() -> None:
    assert spent(spof_sensitivity.fm_scale(N, 1.0)) == near(math.sqrt(2))
    assert spent(spof_sensitivity.coefficient_scale(N, 1.0)) == near(1)


@pytest.mark.parametrize("shift", SHIFTS)
def test_scales_that_grow_with_the_shift_are_not_needed_s5(shift: float) -> None:
    # What is released does not contain the shift: Dbar / epsilon costs epsilon at each of them.
    found = spent(spof_sensitivity.spof_scale(N, 1.0, shift))
    assert found == near(spof_sensitivity.audited_factor(shift))
    assert found > 1 if shift == 0 else found < 0.54


def test_two_halves_of_a_laplace_variable_are_no_laplace_variable_s4() -> None:
    # Kurtosis 6 of Lap; of a sum of two independent copies 6 / 2: variances and cumulants add.
    uniform = torch.rand(2, 400_000, generator=seeded(1), dtype=REAL) - 0.5
    halves = -uniform.sign() * torch.log1p(-2 * uniform.abs()) / math.sqrt(2)

    def excess(v: torch.Tensor) -> float:
        return ((v**4).mean() / (v**2).mean() ** 2 - 3).item()

    assert halves.sum(0).var().item() == pytest.approx(2, rel=0.02)
    assert excess(halves.sum(0)) == pytest.approx(1.5, abs=0.2)
    assert excess(halves[0]) == pytest.approx(3, abs=0.4)


def test_scales_that_depend_on_the_record_have_no_epsilon_s6() -> None:
    net = Network()
    shifts = spof_loss.shift(net.hidden, 2.5)
    one, other = spof_sensitivity.spof_scale(N, 1.0, shifts)[:2].tolist()
    assert one != other
    far = real(1e4, 1e6, 1e8)
    ratios = spof_sensitivity.log_ratio(far, 0.0, max(one, other), 0.0, min(one, other))
    assert (ratios.diff() > 0).all()
    assert ratios[-1] > 1000
    # A public bound in place of c_j: the ratio stays below epsilon wherever one looks.
    bound = 2.5 * CODES
    assert bound == 17.5
    assert (shifts < bound).all()
    public = spof_sensitivity.spof_scale(N, 1.0, bound)
    held = spof_sensitivity.log_ratio(far, 0.5, public, -0.5, public).abs().max().item()
    assert held == near(1 / public, rel=1e-3)


def test_the_branch_of_d_sgd_is_the_records_own_s6() -> None:
    norms = real(0.0, 3.9999, 4.0, 9.0)
    assert spof_sensitivity.sgd_sensitivity(N, 4.0, norms).tolist() == [14, 14, 112, 112]
    noisy = spof_sensitivity.sgd_sensitivity(N, 4.0, norms, real(3, 0.5, 3, 0.5))
    assert noisy.tolist() == [42, 7, 112, 112]
    # Neither printed gradient reaches the bound of 4.
    assert (0.5 - torch.ones(N)).norm().item() == near(1.8708287)
    assert torch.ones(N).norm().item() == near(3.7416574)
    bounds = [
        spof_sensitivity.sgd_bound(N, 4.0, output_gradient=kind)
        for kind in spof_sensitivity.OUTPUT_GRADIENTS
    ]
    assert bounds == pytest.approx([14, 29.933259, 28])
    assert spof_sensitivity.sgd_bound(N, 1.0) == near(2 * math.sqrt(14))
    assert spof_sensitivity.sgd_bound(N, 4.0, environmental=True) == near(29.933259)


def test_constant_bounds_hold_for_clipped_gradients() -> None:
    draw = partial(torch.rand, 500, N, generator=seeded(6), dtype=REAL)

    def clipped(g: torch.Tensor, clip: float) -> torch.Tensor:
        return g.renorm(2, 0, clip)

    for clip in (0.2, 1.0, 4.0):
        x, other, s, t = (draw().round() if k < 2 else draw() for k in range(4))
        pairs = {"at_a": (0.5 - x, 0.5 - other), "exact": (s - x, t - other)}
        for kind, (g, h) in pairs.items():
            found = (clipped(g, clip) - clipped(h, clip)).abs().sum(-1).max().item()
            assert found <= spof_sensitivity.sgd_bound(N, clip, output_gradient=kind)
    opposite = clipped(torch.full((1, N), 0.5), 1.0) - clipped(torch.full((1, N), -0.5), 1.0)
    assert opposite.abs().sum().item() == near(spof_sensitivity.sgd_bound(N, 1.0))


def test_gradients_carry_the_code_unprotected_s7() -> None:
    # However much noise is on the coefficients, the decoder's gradient is h times a row.
    net = Network(users=1)
    decoder = net.decoder.clone().requires_grad_()
    noisy = spof_loss.TaylorCoefficients(
        *(c + 1e3 * torch.randn(N, generator=seeded(k), dtype=REAL)
          for k, c in enumerate(spof_loss.coefficients(net.x)))
    )  # fmt: skip
    loss = spof_loss.stabilised(noisy, net.hidden @ decoder, 0.0).sum()
    (gradient,) = torch.autograd.grad(loss, decoder)
    code = net.hidden[0] / net.hidden[0].norm()
    assert (gradient - torch.outer(code, code @ gradient)).norm() / gradient.norm() < 1e-14
    # Every visit with fresh noise costs again, which is not counted in print.
    once = spof_sensitivity.audited_epsilon(1.0, 2.5)
    assert spof_sensitivity.audited_epsilon(1.0, 2.5, visits=20) == near(20 * once)
    assert 20 * once > 4


def test_local_release_costs_epsilon_once_s7() -> None:
    # The whole record is what is released, so that encoder and target see nothing else.
    scale = spof_sensitivity.local_scale(N, 1.0)
    y = torch.linspace(-60, 60, 601, dtype=REAL)
    worst = N * spof_sensitivity.log_ratio(y, 0.0, scale, 1.0, scale).max().item()
    assert worst == near(1)


def test_printed_curve_v2_s11() -> None:
    found = expansion.minimum(expansion.spof_curve, -1, 4)
    assert found.at == near(0.9056884)
    assert found.value == near(4.0347750)
    start = expansion.spof_curve(0.0)
    assert start == near(4.6931472)
    assert start / found.value - 1 == near(0.163174, rel=1e-5)
    listed = {-1: 10.0220, 0.5: 4.1324, 2: 4.4278, 3: 5.1663}
    found_there = [expansion.spof_curve(a) for a in listed]
    assert found_there == pytest.approx(list(listed.values()), abs=5e-5)


def test_corrected_curve_is_lowest_at_zero_v3_s11() -> None:
    curve = partial(expansion.spof_curve, form="correct")
    found = expansion.minimum(curve, -1, 4)
    assert found.at == pytest.approx(0, abs=1e-9)
    assert found.value == near(2.8862944)
    assert [curve(a) for a in (-0.5, 0.5, -1, 1)] == pytest.approx(
        [3.6630801, 3.6630801, 4.4818644, 4.4818644], rel=1e-6
    )
    assert curve(0.9057) == pytest.approx(4.3247, abs=5e-5)


@pytest.mark.parametrize("a", [-1.0, 0.0, 0.9057, 3.0])
def test_the_definition_57_is_the_corrected_curve_and_not_58_s11(a: float) -> None:
    alpha = spof_loss.coefficients(GRID, a)
    defined = 2 * torch.stack(alpha).abs().sum(0).max().item()
    assert expansion.spof_curve(a, form="correct") == near(defined)
    assert expansion.spof_curve(a) != near(defined, rel=1e-2)


def test_gradient_curve() -> None:
    assert expansion.sgd_curve(0.0) == 1
    for a in (-2.0, 0.0, 2.0):
        largest = (torch.sigmoid(real(a)) - GRID).abs().max().item()
        assert expansion.sgd_curve(a, form="correct") == near(2 * largest)
        printed = expansion.sgd_curve(a)
        assert printed == near(2 * math.exp(a) / (1 + math.exp(a)))
        assert (printed == near(2 * largest)) == (a >= 0)


def test_log_ratio_is_that_of_two_densities() -> None:
    y = torch.linspace(-5, 5, 21, dtype=REAL)
    one, other = (-(y - m).abs() / b - math.log(2 * b) for m, b in ((0.5, 2.0), (-1.0, 3.0)))
    found = spof_sensitivity.log_ratio(y, 0.5, 2.0, -1.0, 3.0)
    torch.testing.assert_close(found, one - other)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: spof_loss.coefficients(GRID, form="correct"), "form"),
        (lambda: remainder.softplus_derivative(0), "order"),
        (lambda: spof_loss.shift(GRID, -1.0), "constant"),
        (lambda: spof_sensitivity.spof_scale(0, 1.0, 0.0), "n"),
        (lambda: spof_sensitivity.spof_scale(N, 0.0, 0.0), "epsilon"),
        (lambda: spof_sensitivity.sgd_bound(N, 4.0, output_gradient="z"), "output_gradient"),
        (lambda: expansion.minimum(expansion.spof_curve, 1, 1), "length"),
    ],
)
def test_numbers_out_of_range_are_refused(call: object, name: str) -> None:
    assert callable(call)
    with pytest.raises(InvalidInput, match=f"^{name}: "):
        call()
