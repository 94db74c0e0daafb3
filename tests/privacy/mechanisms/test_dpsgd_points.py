"""DP-SGD's two noise points: once for the batch, or once for every sample as printed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from dpkern import DPStep
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.privacy import accounting
from dpkern.privacy.mechanisms import DPSGD


def points(**changes: Any) -> DPSGD:
    given: dict[str, Any] = {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "mode": "published"}
    return DPSGD(**{**given, "noise_point": "per_sample", **changes})


def noisy_sums(mechanism: DPSGD, samples: int, size: int) -> torch.Tensor:
    param = torch.zeros(size)
    step = DPStep(
        mechanism,
        [param],
        expected_batch_size=1,
        sample_rate=0.1,
        unsafe_seed=3,
        sampling="fixed" if mechanism.batch_size else "poisson",
        dataset_size=10 * samples if mechanism.batch_size else None,
    )
    step.add(per_sample=[torch.zeros(samples, size)])
    released = step.finish()
    assert released is not None
    assert released[0] is not None
    return released[0]


@pytest.mark.parametrize("samples", [1, 9, 25])
def test_noise_grows_with_the_root_of_the_samples(samples: int) -> None:
    size = 4000
    for mechanism in (points(), points(batch_size=samples)):
        sd = noisy_sums(mechanism, samples, size).std().item()
        # The standard deviation of a sample standard deviation is sd / sqrt(2 n): five of them.
        assert sd == pytest.approx(2.0 * 0.5 * math.sqrt(samples), rel=5 / math.sqrt(2 * size))
    once = noisy_sums(points(noise_point="per_batch"), samples, size).std().item()
    assert once == pytest.approx(1.0, rel=5 / math.sqrt(2 * size))


def test_a_poisson_run_is_not_private_and_says_why() -> None:
    mechanism = points()
    plan = mechanism.plan([(3, 4)])
    assert not plan.private
    assert plan.distribution == "gaussian"
    assert plan.noise_point == "per_sample"
    assert plan.samples is None
    assert [note.id for note in plan.notes] == ["G4"]
    numbers: dict[str, Any] = {"sample_rate": 0.01, "steps": 100, "delta": 1e-5}
    assert accounting.epsilon(mechanism, **numbers) == math.inf
    # The claim is DP-SGD's, whatever the noise point.
    plain = DPSGD(noise_multiplier=2.0, max_grad_norm=0.5)
    claim = accounting.claimed_epsilon(mechanism, **numbers)
    assert claim == accounting.claimed_epsilon(points(noise_point="per_batch"), **numbers)
    assert claim == pytest.approx(accounting.epsilon(plain, **numbers), rel=1e-3)


def test_a_fixed_number_of_samples_certifies_root_b_times_the_multiplier() -> None:
    mechanism = points(batch_size=16, noise_multiplier=1.25)
    plan = mechanism.plan([(3, 4), (5,)])
    assert plan.scales == (1.25 * 0.5 * 4,) * 2
    assert plan.noise_multiplier == pytest.approx(5.0, rel=1e-4)
    assert plan.spec == DPSGD(noise_multiplier=5.0, max_grad_norm=0.5).plan([(3, 4), (5,)]).spec
    certificate = accounting.certify(
        mechanism, sample_rate=0.02, steps=10, delta=1e-5, sampling="fixed", dataset_size=800
    )
    assert certificate.relation == "replace_one"
    assert 0 < certificate.epsilon < math.inf


def test_another_number_of_samples_is_refused_before_anything_is_released() -> None:
    step = DPStep(
        points(batch_size=16),
        [torch.zeros(3)],
        expected_batch_size=16,
        sample_rate=0.02,
        sampling="fixed",
        dataset_size=800,
    )
    step.add(per_sample=[torch.zeros(15, 3)])
    with pytest.raises(PrivacyError, match="16"):
        step.finish()
    assert step.steps == 0


def test_poisson_samples_have_no_fixed_size() -> None:
    given: dict[str, Any] = {"sample_rate": 0.02}
    with pytest.raises(PrivacyError, match="sampling"):
        DPStep(points(batch_size=16), [torch.zeros(3)], expected_batch_size=16, **given)
    with pytest.raises(PrivacyError, match="sampling"):
        accounting.epsilon(points(batch_size=16), steps=10, delta=1e-5, **given)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mode": "corrected"}, "noise_point"),
        ({"noise_point": "per_layer"}, "noise_point"),
        ({"noise_point": "per_batch", "batch_size": 4}, "batch_size"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        points(**changes)


def test_noise_beyond_the_certified_law_is_refused() -> None:
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        points(noise_multiplier=1000.0, batch_size=4)


def test_without_noise_nothing_is_claimed() -> None:
    mechanism = points(noise_multiplier=0.0)
    assert mechanism.claimed_event_spec() == {"event": "NonPrivateDpEvent"}
    assert mechanism.plan([(2,)]).distribution is None


def test_old_checkpoints_still_know_their_run() -> None:
    plain = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)
    assert "noise_point" not in plain.fingerprint
    assert "per_sample" in points().fingerprint
    assert dataclasses.replace(points(), noise_point="per_batch").fingerprint.startswith("DPSGD(")
