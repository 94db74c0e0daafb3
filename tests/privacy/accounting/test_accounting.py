"""Certified epsilons: pins, closed forms, guards and calibration."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import privacy_loss_distribution

from dpkern.base.errors import PrivacyError
from dpkern.privacy import accounting
from dpkern.privacy.accounting import Ledger, accountants, events, planning, tails
from dpkern.privacy.mechanisms import DPSGD
from tests.evidence import accounting_grid
from tests.evidence.accounting_grid import Point, Release, epsilon_of, gaussian_delta
from tests.privacy.accounting.accounting_cases import RUN, Event, certify, dpsgd


@pytest.mark.parametrize(
    ("sigma", "changes", "relation", "accountant", "expected"),
    [
        (1.1, {}, "add_remove", "PLD", 5.1926),
        (1.1, {"steps": 600}, "add_remove", "PLD", 1.1803),
        (0.6, {"sample_rate": 0.001, "steps": 5000, "delta": 1e-6}, "add_remove", "PLD", 2.7484),
        (3.0, {"sample_rate": 0.1, "steps": 1000, "delta": 1e-8}, "add_remove", "PLD", 6.4670),
        (1.1, {"sampling": "shuffled"}, "zero_out", "PLD", 79.28),
        (1.1, {"sampling": "fixed", "dataset_size": 60_000}, "replace_one", "PLD", 39.95),
    ],
    ids=["default", "600 steps", "small rate", "small delta", "shuffled", "fixed"],
)
def test_pins(
    sigma: float, changes: dict[str, Any], relation: str, accountant: str, expected: float
) -> None:
    found = certify(dpsgd(sigma), **changes)
    assert expected * (1 - 1e-4) < found.epsilon < expected * 1.005
    assert (found.relation, found.accountant) == (relation, accountant)
    assert found.epsilon == min(found.bounds.values())


def test_rdp_is_only_the_looser_bound() -> None:
    found = certify(dpsgd())
    assert found.bounds["RDP"] == pytest.approx(5.632, abs=1e-3)
    assert found.epsilon == found.bounds["PLD"] < found.bounds["RDP"]


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("steps", [1, 25])
@pytest.mark.parametrize(
    ("sampling", "radius"), [("poisson", 1), ("shuffled", 1), ("fixed", 2)], ids=lambda x: str(x)
)
def test_unsampled_gaussian_is_exact(sigma: float, steps: int, sampling: str, radius: int) -> None:
    mu = radius * math.sqrt(steps) / sigma
    exact = epsilon_of(lambda eps: gaussian_delta(eps, mu), 1e-5)
    found = accounting.epsilon(
        Release(sigma),
        sample_rate=1.0,
        steps=steps,
        delta=1e-5,
        sampling=sampling,
        dataset_size=500,
    )
    assert exact <= found <= exact * 1.001


@pytest.mark.parametrize("sigma", [2.0**-4, 0.2, 1.1])
@pytest.mark.parametrize("steps", [10**4, 10**6])
@pytest.mark.parametrize(("sampling", "rate"), [("poisson", 1.0), ("fixed", 1.0), ("fixed", 0.9)])
def test_losses_too_large_for_a_grid(sigma: float, steps: int, sampling: str, rate: float) -> None:
    """Infinite or the closed form, never an overflow; sampling does not make it worse."""
    run: dict[str, Any] = {"steps": steps, "delta": 1e-5, "dataset_size": 500}
    found = accounting.epsilon(Release(sigma), sample_rate=rate, sampling=sampling, **run)
    mu = (2 if sampling == "fixed" else 1) * math.sqrt(steps) / sigma
    if found < math.inf:
        assert found <= (mu * mu / 2 + 4.3 * mu) * 1.001
        assert rate < 1 or found >= mu * mu / 2 + 4.2 * mu
    else:
        assert sigma < 0.4


QUICK = [point for point in accounting_grid.grid() if point.steps <= 1000][::31]


def test_quick_points_cover_the_grid() -> None:
    assert len(accounting_grid.grid()) == len(set(accounting_grid.grid())) == 500
    assert {point.reference for point in QUICK} == {"prv", "closed", "one step", "optimistic"}
    assert {point.relation for point in QUICK} == set(accounting.RELATIONS)


@pytest.mark.parametrize("point", QUICK, ids=str)
def test_never_underestimates(point: Point) -> None:
    assert point.certified().epsilon >= point.lower_bound()


def test_lower_bounds_would_catch_an_underestimate() -> None:
    """The Poisson number for a uniform subset, and RDP with the wrong sensitivity, are too low."""
    subset = Point("optimistic", "gaussian", "replace_one", "fixed", 1.5, 0.01, 1000, 1e-5)
    assert replace(subset, relation="add_remove").lower_bound() < subset.lower_bound()
    as_poisson = replace(subset, relation="add_remove", sampling="poisson").certified().epsilon
    assert as_poisson < subset.lower_bound()


def test_grid_error_is_below_a_per_cent() -> None:
    event = dp_accounting.PoissonSampledDpEvent(1e-3, dp_accounting.GaussianDpEvent(1.0))
    fine = dp_accounting.pld.PLDAccountant(value_discretization_interval=2e-5)
    fine.compose(event, 10_000)
    reference = fine.get_epsilon(1e-5)
    found = accounting.epsilon(Release(1.0), sample_rate=1e-3, steps=10_000, delta=1e-5)
    assert reference * 0.9999 < found < reference * 1.01


def test_the_same_question_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = certify(dpsgd(), steps=7)
    monkeypatch.setattr(accountants, "_rdp_form", None)
    assert certify(dpsgd(), steps=7) == first
    with pytest.raises(TypeError):
        certify(dpsgd(), steps=8)


def test_bounds_that_a_caller_changes_stay_its_own() -> None:
    leaves = events.leaves(events.gaussian(1.1))
    found = accountants.upper_bounds(leaves, "add_remove", 1e-5, 1)
    found["RDP"] = 0.0
    assert accountants.upper_bounds(leaves, "add_remove", 1e-5, 1)["RDP"] > 0


def test_zero_is_not_computed_twice() -> None:
    found = certify(dpsgd(), steps=10, delta=0.1)
    assert (found.epsilon, found.bounds) == (0.0, {"RDP": 0.0})


def test_zero_steps_cost_nothing() -> None:
    assert certify(dpsgd(), steps=0).epsilon == 0
    assert Ledger().epsilon(1e-5) == 0


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_certified_for(arithmetic: str) -> None:
    expected = {"exact": "released bits", "float": "real-number sums"}[arithmetic]
    assert certify(dpsgd(arithmetic=arithmetic)).certified_for == expected


@pytest.mark.parametrize(
    ("mechanism", "changes"),
    [
        (dpsgd(0.0), {}),
        (DPSGD(noise_multiplier=1.0, max_grad_norm=math.inf), {}),
        (dpsgd(), {"sampling": "with_replacement", "dataset_size": 60_000}),
        (dpsgd(), {"delta": 1e-40}),
        (Event({"event": "UnsupportedDpEvent"}), {}),
        (Event(events.composed([events.gaussian(1.0), events.non_private()])), {}),
    ],
    ids=[
        "no noise",
        "no clip",
        "with replacement",
        "tiny delta",
        "unsupported",
        "part unprotected",
    ],
)
def test_infinite_where_nothing_is_certified(mechanism: Any, changes: dict[str, Any]) -> None:
    found = certify(mechanism, **changes)
    assert found.epsilon == math.inf
    assert (found.accountant, found.certified_for) == ("none", "nothing")
    assert found.notes
    assert found.to_dict()["epsilon"] == "inf"


def test_claims_of_the_published_mode_ignore_the_sampling() -> None:
    changes = {**RUN, "sampling": "shuffled"}
    claimed = accounting.claimed_epsilon(dpsgd(mode="published"), **changes)
    assert claimed == pytest.approx(5.1926, rel=5e-3)
    corrected = accounting.claimed_epsilon(dpsgd(), **changes)
    assert corrected == accounting.epsilon(dpsgd(), **changes) > 79


def replace_one_epsilon(accountant: Any) -> float:
    return float(accountant.compose(dp_accounting.GaussianDpEvent(1.0)).get_epsilon(1e-5))


def test_replace_one_trap_of_dp_accounting() -> None:
    """Upstream RDP halves the sensitivity: 4.728 where 9.997 is exact. Ours is never below."""
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    upstream_rdp = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    assert replace_one_epsilon(upstream_rdp) == pytest.approx(4.728, abs=1e-3)
    assert replace_one_epsilon(dp_accounting.pld.PLDAccountant(relation)) == pytest.approx(
        9.997, abs=1e-3
    )
    exact = epsilon_of(lambda eps: gaussian_delta(eps, 2.0), 1e-5)
    assert exact == pytest.approx(9.997, abs=1e-3)
    found = accounting.certify(
        Release(1.0, neighbouring="replace_one"), sample_rate=1.0, steps=1, delta=1e-5
    )
    assert exact <= found.epsilon <= exact * 1.001
    assert found.bounds["RDP"] > exact
    assert accountants.rdp_replace_one_factor() == 0.5
    assert accountants.rdp_replace_one_factor(subset=True) == 0.5


def test_probe_notices_an_upstream_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(dp_accounting.rdp.RdpAccountant):  # type: ignore[misc]
        def compose(self, event: Any, count: int = 1) -> Any:
            if isinstance(event, dp_accounting.GaussianDpEvent):
                event = dp_accounting.GaussianDpEvent(event.noise_multiplier / 2)
            return super().compose(event, count)

    monkeypatch.setattr(dp_accounting.rdp, "RdpAccountant", Fixed)
    assert accountants.rdp_replace_one_factor.__wrapped__() == 1.0


def test_laplace_only_through_pld() -> None:
    found = certify(Event(events.laplace(4.0)), steps=100)
    assert set(found.bounds) == {"PLD"}
    assert 0 < found.epsilon < 1


def test_laplace_replace_one_doubles_the_distance() -> None:
    once: dict[str, Any] = {"sample_rate": 1.0, "steps": 1, "delta": 1e-9}
    removed = accounting.epsilon(Event(events.laplace(2.0)), **once)
    replaced = accounting.epsilon(Event(events.laplace(2.0), "replace_one"), **once)
    assert removed == pytest.approx(0.5, rel=1e-3)
    assert replaced == pytest.approx(1.0, rel=1e-3)
    assert replaced >= 1.0 * (1 - 1e-7)


def test_randomized_response_needs_a_replacement_relation() -> None:
    spec = {"event": "RandomizedResponseDpEvent", "noise_parameter": 0.5, "num_buckets": 2}
    once: dict[str, Any] = {"sample_rate": 1.0, "steps": 1, "delta": 1e-9}
    assert accounting.epsilon(Event(spec), **once) == math.inf
    found = accounting.epsilon(Event(spec, "replace_one"), **once)
    assert found == pytest.approx(math.log(3), rel=1e-3)


@pytest.mark.parametrize("count", [3, 20, 300])
def test_randomized_responses_are_composed_as_often_as_given(count: int) -> None:
    spec = {"event": "RandomizedResponseDpEvent", "noise_parameter": 0.5, "num_buckets": 2}
    run: dict[str, Any] = {"sample_rate": 1.0, "steps": count, "delta": 1e-9}
    found = accounting.epsilon(Event(spec, "replace_one"), **run)
    # n - 2 k of the losses of log 3 are left with k lies, of probability 1/4 each.
    law = [math.comb(count, k) * 0.25**k * 0.75 ** (count - k) for k in range(count + 1)]
    losses = [(count - 2 * k) * math.log(3) for k in range(count + 1)]

    def delta(epsilon: float) -> float:
        above = zip(law, losses, strict=True)
        return math.fsum(p * -math.expm1(epsilon - loss) for p, loss in above if loss > epsilon)

    assert delta(found) <= 1e-9
    assert delta(found * 0.9 - 0.1) > 1e-9


def test_what_each_accountant_takes_is_given_to_it() -> None:
    """Poisson samples under replacement are PLD's, more than 256 responses Renyi's."""
    response = {"event": "RandomizedResponseDpEvent", "noise_parameter": 0.9, "num_buckets": 2}
    ledger = Ledger()
    ledger.record(Event(response, "replace_one"), sample_rate=1.0, count=300)
    parts = [ledger.epsilon(1e-5)]
    ledger.record(Release(2.0, neighbouring="replace_one"), sample_rate=0.01, count=200)
    parts.append(
        accounting.epsilon(
            Release(2.0, neighbouring="replace_one"), sample_rate=0.01, steps=200, delta=1e-5
        )
    )
    found = ledger.certify(1e-5)
    assert set(found.bounds) == {"RDP without amplification", "PLD + RDP"}
    assert found.accountant == "PLD + RDP"
    assert max(parts) < found.epsilon < math.inf


def test_gaussians_of_one_step_are_amplified_as_one() -> None:
    two = events.composed([events.gaussian(2.0), events.gaussian(2.0)])
    found = certify(Event(two))
    assert found.epsilon == pytest.approx(certify(Release(math.sqrt(2))).epsilon, rel=1e-6)


def test_unknown_amplification_is_not_claimed() -> None:
    mixed = Event(events.composed([events.gaussian(5.0), events.laplace(50.0)]))
    found = certify(mixed, steps=10)
    assert set(found.bounds) == {"PLD without amplification"}
    assert found.epsilon == pytest.approx(certify(mixed, steps=10, sample_rate=1.0).epsilon)


def test_upstream_excluding_orders_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="absl"):
        certify(dpsgd(20.0), sample_rate=0.5)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("law", "first", "log2_mass"), [("Gaussian", 781, -109.25), ("Laplace", 4335, -96.8)]
)
def test_where_the_laws_are_cut(law: str, first: int, log2_mass: float) -> None:
    found, mass = tails.tail_cutoff(f"{law}DpEvent")
    assert found == first
    assert math.log2(mass) == pytest.approx(log2_mass, abs=0.05)
    assert law != "Gaussian" or mass <= 2.0**-109.2


@pytest.mark.parametrize("target", [1e-3, 1e-4])
@pytest.mark.parametrize("mass", [0.0, 1e-30, 1e-9])
def test_reserve_comes_out_of_delta(target: float, mass: float) -> None:
    def reserve(epsilon: float) -> float:
        return mass * (1 + math.exp(epsilon))

    found = accountants._with_reserve(lambda delta: -math.log(delta), target, reserve)
    assert math.exp(-found) + reserve(found) <= target * (1 + 1e-12)
    assert -math.log(target) <= found < -math.log(target) + 0.2


@pytest.mark.parametrize("spent", [10.0, 800.0, math.inf])
def test_reserve_above_delta_certifies_nothing(spent: float) -> None:
    found = accountants._with_reserve(lambda _: spent, 1e-5, lambda _: 1e-4)
    assert found == math.inf


def escape(multiplier: float, dimension: int, epsilon: float, **options: Any) -> float:
    leaf = events.leaves(events.gaussian(multiplier), options.get("steps", 1))[0]
    return tails.tail_delta(leaf, options.get("relation", "add_remove"), dimension, epsilon)


def test_escape_mass() -> None:
    tau = 2.0**-109.25
    assert escape(1.0, 10**6, 2.0) == pytest.approx((1 + math.exp(2)) * 1e6 * tau, rel=0.05)
    assert escape(1.0, 10**6, 2.0, steps=7) == pytest.approx(7 * escape(1.0, 10**6, 2.0))
    # For large epsilon the probability of an outcome that tells counts, not e^epsilon.
    assert escape(1.0, 10**6, 300.0) == escape(1.0, 10**6, 900.0) < 1e-20
    assert escape(1.0, 10**9, 300.0) > escape(1.0, 10**6, 300.0)
    assert escape(0.1, 10**6, 300.0) > escape(1.0, 10**6, 300.0, relation="replace_one")


@pytest.mark.parametrize(
    ("rate", "sigma", "steps"), [(1e-5, 0.5, 1000), (1e-3, 0.6, 100_000), (0.01, 1.1, 10_000)]
)
def test_convolution_noise_stays_within_its_reserve(rate: float, sigma: float, steps: int) -> None:
    """Beyond the epsilon where less than 1e-20 can be left, all that is left is rounding."""
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    renyi = dp_accounting.rdp.RdpAccountant().compose(event, steps)
    empty = renyi.get_epsilon(1e-20)
    composed = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=3e-4
    ).self_compose(steps)
    reserve = accountants.FFT_MASS_ONCE + accountants.FFT_MASS_PER_STEP * steps
    rest = [abs(composed.get_delta_for_epsilon(empty * factor)) for factor in (1.0, 1.1, 1.3)]
    assert max(rest) < reserve / 3


def test_calibrate_is_tight_and_never_above() -> None:
    noise = []
    for target, expected in ((2.0, 2.12744), (8.0, 0.8825)):
        found = accounting.calibrate(dpsgd(), target_epsilon=target, **RUN)
        spent = accounting.epsilon(found, **RUN)
        assert target * 0.995 < spent <= target
        less = found.with_noise_multiplier(found.noise_multiplier * (1 - 1e-3))
        assert accounting.epsilon(less, **RUN) > target
        assert found.noise_multiplier == pytest.approx(expected, rel=1e-3)
        noise.append(found.noise_multiplier)
    assert noise[0] > noise[1]


CURVES: dict[str, Callable[[float], float]] = {
    "inverse": lambda sigma: 3 / sigma,
    "steep": lambda sigma: sigma**-6,
    "infinite below": lambda sigma: math.inf if sigma < 5.3 else 1.0 / sigma,
    "zero above": lambda sigma: 0.0 if sigma > 17.3 else 9.0,
    "steps": lambda sigma: math.ceil(300 / sigma) / 100,
}


@pytest.mark.parametrize("target", [0.02, 0.9, 1.7])
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_least_noise_of_any_decreasing_curve(
    curve: Callable[[float], float], target: float
) -> None:
    asked: list[float] = []

    def spent(sigma: float) -> float:
        asked.append(sigma)
        return curve(sigma)

    found = planning._least_noise(spent, target)
    assert found is not None
    assert found in asked
    assert curve(found) <= target < curve(found * (1 - 1e-3))
    assert len(asked) < 45


@pytest.mark.parametrize("target", [0.3, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("amplified", [1.0, 0.05])
def test_least_noise_of_a_smooth_curve_takes_few_questions(amplified: float, target: float) -> None:
    """Each question is a composition, which takes tenths of a second."""
    asked: list[float] = []

    def spent(sigma: float) -> float:
        asked.append(sigma)
        mu = 3 / sigma
        return math.log1p(amplified * math.expm1(mu * mu / 2 + 4 * mu))

    found = planning._least_noise(spent, target)
    assert found is not None
    assert len(asked) <= 9
    assert spent(found) <= target < spent(found * (1 - 1e-3))


def test_least_noise_stays_in_the_certified_range() -> None:
    assert planning._least_noise(lambda _: 0.0, 1.0) == 2.0**-4
    assert planning._least_noise(lambda _: 2.0, 1.0) is None


@pytest.mark.parametrize("sampling", ["shuffled", "fixed"])
def test_calibrate_under_other_samplings(sampling: str) -> None:
    run = {**RUN, "steps": 300, "sampling": sampling, "dataset_size": 10_000}
    found = accounting.calibrate(dpsgd(), target_epsilon=3.0, **run)
    assert 2.97 < accounting.epsilon(found, **run) <= 3.0


def test_calibrate_refuses_the_unreachable() -> None:
    with pytest.raises(PrivacyError) as raised:
        accounting.calibrate(dpsgd(), target_epsilon=1e-3, sample_rate=1.0, steps=10**6, delta=1e-9)
    assert raised.value.name == "target_epsilon"


def test_calibrate_keeps_the_rest_of_the_configuration() -> None:
    mechanism = dpsgd(clipping="per_layer", arithmetic="float")
    found = accounting.calibrate(
        mechanism, target_epsilon=5.0, sample_rate=1.0, steps=1, delta=1e-5
    )
    assert found == mechanism.with_noise_multiplier(found.noise_multiplier)
