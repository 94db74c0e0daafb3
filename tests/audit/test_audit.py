"""The audit's own statistics: against closed forms, on laws that are known, and made to fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dpkern import audit
from dpkern.audit import (
    ApproximateDP,
    Claim,
    GaussianDP,
    Laplace,
    NoClaim,
    Pair,
    PureDP,
    covariance,
    of_event,
)
from dpkern.audit.bounds import epsilon_lower, mu_lower, rate_upper
from dpkern.audit.canaries import directions
from dpkern.audit.likelihood import LaplaceRatio, ResponseRatio
from dpkern.audit.scores import learnt
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.privacy.accounting import events
from tests.audit.noisy import Noisy

LEVELS = (1e-4, 0.003, 0.05, 0.2, 0.4, 0.5, 0.7, 0.99)


# claims


@pytest.mark.parametrize("shift", [0.0, 0.4, 1.3, 4.0])
@pytest.mark.parametrize("level", LEVELS)
def test_trade_off_functions_are_those_of_the_laws(shift: float, level: float) -> None:
    gaussian = stats.norm.cdf(stats.norm.ppf(1 - level) - shift)
    laplace = stats.laplace.cdf(stats.laplace.ppf(1 - level) - shift)
    assert GaussianDP(shift).tradeoff(level) == pytest.approx(gaussian, rel=1e-9)
    assert Laplace(shift).tradeoff(level) == pytest.approx(laplace, rel=1e-12)


@pytest.mark.parametrize(
    "claim", [GaussianDP(0.8), Laplace(1.1), PureDP(0.9), ApproximateDP(1.0, 0.01)]
)
def test_a_trade_off_function_is_its_own_mirror_and_its_epsilon(claim: Claim) -> None:
    for level in LEVELS:
        answer = claim.tradeoff(level)
        assert 0 <= answer <= 1 - level + 1e-12
        if 0 < answer < 1:
            assert claim.tradeoff(answer) == pytest.approx(level, rel=1e-9)
    # f(a) >= 1 - delta - e^eps a for every a, and equality is met somewhere.
    delta = 0.02
    slope = math.exp(claim.epsilon(delta))
    slack = [claim.tradeoff(a) - (1 - delta - slope * a) for a in np.linspace(0, 1, 20_001)]
    assert min(slack) >= -1e-12
    if not isinstance(claim, ApproximateDP):
        assert min(slack) < 1e-6


def test_edges_of_the_claims() -> None:
    assert NoClaim().tradeoff(0.0) == 0
    assert NoClaim().epsilon(0.5) == math.inf
    assert ApproximateDP(800.0).tradeoff(0.5) == 0
    assert ApproximateDP(1.0, 1e-3).epsilon(1e-5) == math.inf
    for claim in (GaussianDP(1.0), Laplace(1.0), PureDP(1.0)):
        assert claim.tradeoff(0.0) == 1
        assert claim.tradeoff(1.0) == 0
    with pytest.raises(InvalidInput):
        GaussianDP(-1.0)


def test_events_become_claims() -> None:
    assert of_event(events.gaussian(2.0), steps=4) == GaussianDP(1.0)
    assert of_event(events.gaussian(2.0), neighbouring="replace_one") == GaussianDP(1.0)
    assert of_event(events.laplace(2.0)) == Laplace(0.5)
    assert of_event(events.laplace(2.0), neighbouring="replace_one", steps=3) == PureDP(3.0)
    both = events.composed([events.gaussian(1.0), events.gaussian(0.5)])
    assert of_event(both) == GaussianDP(math.sqrt(5))
    assert of_event(events.non_private()) == NoClaim()
    assert of_event(events.no_op()) == GaussianDP(0.0)
    k, epsilon = 10, 1.5
    spec = {
        "event": events.RANDOMIZED_RESPONSE_EVENT,
        "noise_parameter": k / (math.exp(epsilon) + k - 1),
        "num_buckets": k,
    }
    assert of_event(spec).epsilon(0.0) == pytest.approx(epsilon, rel=1e-12)
    with pytest.raises(PrivacyError, match="all records"):
        of_event(events.poisson_sampled(0.1, events.gaussian(1.0)))
    with pytest.raises(PrivacyError, match="Gaussian releases alone"):
        of_event(events.composed([events.gaussian(1.0), events.laplace(1.0)]))


# bounds


@pytest.mark.parametrize(("events_seen", "runs"), [(0, 50), (3, 50), (49, 50), (500, 1000)])
def test_a_rate_bound_is_the_one_of_clopper_and_pearson(events_seen: int, runs: int) -> None:
    bound = float(rate_upper(events_seen, runs, 1e-3))
    assert stats.binom.cdf(events_seen, runs, bound) == pytest.approx(1e-3, rel=1e-6)
    assert float(rate_upper(runs, runs, 1e-3)) == 1


def test_lower_bounds_from_rates() -> None:
    assert mu_lower(stats.norm.sf(0.5), stats.norm.sf(0.5)) == pytest.approx(1.0)
    assert mu_lower(0.7, 0.4) == 0
    assert epsilon_lower(0.1, 0.5, 1e-3) == pytest.approx(math.log(0.499 / 0.1))
    assert epsilon_lower(0.5, 0.1, 1e-3) == pytest.approx(math.log(0.499 / 0.1))
    assert epsilon_lower(0.5, 0.5, 0.0) == 0


# layer 1


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = torch.randn(300, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values[7, 2] = math.nan
    parts = [covariance.moments(part) for part in values.split([10, 200, 90])]
    whole = np.cov(values.nan_to_num(0.0).numpy().T)
    np.testing.assert_allclose(covariance.together(parts).covariance, whole, rtol=1e-12)


@pytest.mark.parametrize(
    ("sd", "passes"),
    [
        ((1.0,) * 6, True),
        ((1.0,) * 5 + (0.7,), False),
        ((1.0,) * 5 + (0.0,), False),
    ],
)
def test_too_little_noise_in_one_direction_is_seen(sd: tuple[float, ...], passes: bool) -> None:
    found = audit.run(Noisy(sd=sd), runs=10_000, seed=3, layers=["covariance"])
    (check,) = found.checks
    assert check.passed is passes
    if sd[-1] == 0:
        assert check.numbers["without_noise"] == 1


def test_the_weakest_direction_is_found_and_used() -> None:
    found = audit.run(
        replace(Noisy(sd=(1.0, 1.0, 0.5, 1.0, 1.0, 1.0)), certified=NoClaim()), runs=4000, seed=0
    )
    best = max(found.evidence, key=lambda one: one.mu_lower)
    assert best.pair == "weakest"
    assert 1.7 < best.mu_lower < 2.0


def test_noise_without_a_stated_scale_is_shown_and_not_judged() -> None:
    found = audit.run(Noisy(stated=None), runs=1000, seed=0, layers=["covariance"])
    assert found.checks[0].passed is None
    assert len(found.spectrum) == 6


def test_runs_that_cannot_show_a_covariance_do_not_judge_it() -> None:
    few = covariance.moments(torch.zeros(3, 6, dtype=torch.float64))
    assert covariance.spectrum(few, None, 6, 0.01).check.passed is None


# layers 2 and 3


def test_a_sound_release_keeps_its_claim_and_comes_close() -> None:
    found = audit.run(Noisy(), runs=20_000, seed=1)
    assert found.passed
    assert 0.9 < found.mu_lower < 1.0
    assert "Nothing contradicts mu 1" in found.sentence
    assert found.total_runs > 2 * 5 * found.runs


@pytest.mark.parametrize("confidence", [0.9, 0.999])
def test_all_bounds_of_an_audit_share_its_doubt(confidence: float) -> None:
    found = audit.run(Noisy(), runs=2000, seed=1, confidence=confidence)
    counts = [(e.false_positives, e.fpr_upper) for e in found.evidence]
    counts += [(e.false_negatives, e.fnr_upper) for e in found.evidence]
    wrong = [stats.binom.cdf(k, 2000, bound) for k, bound in counts if k < 2000]
    # The other half is the covariance's.
    assert sum(wrong) <= (1 - confidence) / 2 * (1 + 1e-6)
    assert wrong == pytest.approx([(1 - confidence) / 2 / len(counts)] * len(wrong), rel=1e-6)


def test_half_the_variance_contradicts_claim_and_certificate() -> None:
    found = audit.run(Noisy(sd=(0.5**0.5,) * 6), runs=5000, seed=1)
    assert found.contradicts_claim
    assert found.contradicts_certificate
    assert not found.passed
    assert 1.2 < found.mu_lower < 2**0.5
    assert "certificate of noisy is contradicted" in found.sentence


def test_a_claim_of_the_caller_replaces_that_of_the_subject() -> None:
    kept = audit.run(Noisy(), runs=5000, seed=1, claim=ApproximateDP(4.4, 1e-5))
    assert kept.passed
    broken = audit.run(Noisy(), runs=5000, seed=1, claim=ApproximateDP(1.0, 1e-5))
    assert broken.contradicts_claim
    assert not broken.contradicts_certificate
    assert "claim of noisy is contradicted" in broken.sentence


def test_noise_whose_scale_tells_is_seen_without_any_shift() -> None:
    @dataclass(frozen=True)
    class Scaled(Noisy):
        def release(self, data: Any, runs: int, seed: int) -> torch.Tensor:
            grown = 1.0 + float(data.sum() != 0)
            return super().release(0 * data, runs, seed) * grown

    found = audit.run(Scaled(name="scaled"), runs=4000, seed=0, layers=["canary"])
    assert found.contradicts_claim
    assert {one.score for one in found.against(found.claimed)} == {"quadratic"}


def test_what_is_not_finite_tells() -> None:
    @dataclass(frozen=True)
    class Leaking(Noisy):
        def release(self, data: Any, runs: int, seed: int) -> torch.Tensor:
            values = super().release(0 * data, runs, seed)
            if data.sum() != 0:
                values[values.abs() < 0.3] = math.nan
            return values

    found = audit.run(Leaking(name="leaking"), runs=1000, seed=0, layers=["canary"])
    assert found.contradicts_claim
    assert {one.score for one in found.against(found.claimed)} == {"not finite"}


@pytest.mark.parametrize(("claim", "holds"), [(Laplace(1.0), True), (PureDP(0.9), False)])
def test_the_likelihood_ratio_of_laplace_noise(claim: Claim, holds: bool) -> None:
    zero = torch.zeros(1, dtype=torch.float64)

    @dataclass(frozen=True)
    class One(Noisy):
        def pairs(self, weakest: torch.Tensor | None) -> Sequence[Pair]:
            score = LaplaceRatio(zero, zero + 1.0, 1.0)
            return [Pair(name="x", without=zero, present=zero + 1, score=score, layer="likelihood")]

    subject = One(name="laplace", sd=(1.0,), law="laplace", stated=None, claimed=claim)
    found = audit.run(replace(subject, certified=Laplace(1.0)), runs=40_000, seed=0)
    assert found.contradicts_claim is not holds
    assert 0.93 < found.epsilon_lower < 1.0


def test_scores_of_the_likelihood_are_the_log_ratios() -> None:
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 1.0])
    x = torch.tensor([[-1.0, 9.0], [3.0, 0.0], [0.5, 1.0]], dtype=torch.float64)
    want = torch.tensor([-2.0, 2.0, -1.0], dtype=torch.float64) / 0.5
    torch.testing.assert_close(LaplaceRatio(a, b, 0.5)(x), want)
    told = torch.tensor([[0, 1], [1, 2], [2, 2]])
    ratio = math.log(0.5 / 0.25)
    want = torch.tensor([0.0, ratio, 0.0], dtype=torch.float64)
    torch.testing.assert_close(ResponseRatio(0, 1, 0.5, 0.25)(told), want, atol=1e-6, rtol=0)


def test_the_learnt_linear_score_is_fishers() -> None:
    generator = np.random.default_rng(0)
    shape = np.array([[2.0, 0.6], [0.0, 0.5]])
    without = generator.standard_normal((50_000, 2)) @ shape
    present = generator.standard_normal((50_000, 2)) @ shape + np.array([0.3, -0.2])
    linear = learnt(*(covariance.moments(torch.from_numpy(x)) for x in (without, present)))[0]
    want = np.linalg.solve(shape.T @ shape, np.array([0.3, -0.2]))
    np.testing.assert_allclose(linear.weights, want, atol=0.05)


# canaries


def test_directions_are_unit_vectors() -> None:
    found = directions(7, weakest=torch.ones(7))
    assert list(found) == ["weakest", "coordinate", "uniform", "alternating", "random"]
    assert all(float(v.norm()) == pytest.approx(1) for v in found.values())
    assert list(directions(1)) == ["coordinate"]


def test_noise_that_is_added_in_floats_fails_by_its_bits_alone() -> None:
    @dataclass(frozen=True)
    class Floats(Noisy):
        def release(self, data: Any, runs: int, seed: int) -> torch.Tensor:
            drawn = np.random.default_rng(seed).standard_normal((runs, len(self.sd)))
            return data + torch.from_numpy(drawn)

    found = audit.run(Floats(name="floats"), runs=5000, seed=0)
    assert {one.layer for one in found.against(found.certified)} == {"bits"}
    assert audit.run(Noisy(), runs=5000, seed=0, layers=["bits"]).passed


# runs


def test_several_processes_count_like_one() -> None:
    found = audit.run(Noisy(), runs=4000, seed=5, workers=2)
    assert found.passed
    assert found.settings["workers"] == 2
    assert found.mu_lower > 0.8


def test_the_same_seed_gives_the_same_counts() -> None:
    first, second = (audit.run(Noisy(), runs=500, seed=9) for _ in range(2))
    assert first.evidence == second.evidence


def test_every_run_is_counted_once() -> None:
    made: list[int] = []

    @dataclass(frozen=True)
    class Counting(Noisy):
        def release(self, data: Any, runs: int, seed: int) -> torch.Tensor:
            made.append(runs)
            return super().release(data, runs, seed)

    found = audit.run(Counting(name="counting"), runs=777, seed=0)
    assert found.total_runs == sum(made)
    assert all(one.runs == 777 for one in found.evidence)


@pytest.mark.parametrize(
    ("given", "name"),
    [({"runs": 0}, "runs"), ({"confidence": 1.0}, "confidence"), ({"layers": ["x"]}, "layer")],
)
def test_bad_arguments_are_refused(given: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        audit.run(Noisy(), **given)


def test_a_subject_that_releases_something_else_is_refused() -> None:
    @dataclass(frozen=True)
    class Wrong(Noisy):
        def release(self, data: Any, runs: int, seed: int) -> torch.Tensor:
            return super().release(data, runs, seed)[0]

    with pytest.raises(InvalidInput, match="release"):
        audit.run(Wrong(name="wrong"), runs=500)


@dataclass(frozen=True)
class Turning(Noisy):
    """The same variance on both sides, in a direction of each: ``data`` is the angle."""

    stated: float | None = None

    def release(self, data: Any, runs: int, seed: int) -> torch.Tensor:
        drawn = torch.from_numpy(np.random.default_rng(seed).standard_normal((runs, 2)))
        direction = torch.tensor([math.cos(data), math.sin(data)], dtype=torch.float64)
        return drawn[:, :1] * direction + torch.tensor([0.0, 0.3]) * drawn[:, 1:] * (data == 0)

    def pairs(self, weakest: torch.Tensor | None) -> Sequence[Pair]:
        return [Pair(name="turned", without=0.0, present=0.5)]


def test_noise_whose_direction_depends_on_the_data_is_seen() -> None:
    """Without: an ellipse. Present: a line across its axes, on which it has almost no mass."""
    found = audit.run(Turning(), runs=2000, seed=1, layers=("canary",))
    assert found.mu_lower > 2.5


def test_the_mean_takes_a_degree_of_freedom_of_the_covariance() -> None:
    values = torch.arange(11, dtype=torch.float64)[:, None]
    found = covariance.spectrum(covariance.moments(values), np.ones(1), 1, 0.9).check
    spread = (1 + math.sqrt(-2 * math.log(0.9))) / math.sqrt(10)
    assert found.numbers["floor"] == pytest.approx((1 - spread) ** 2)
