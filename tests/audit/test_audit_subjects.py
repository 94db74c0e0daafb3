"""Audit subjects: what they claim, where their canaries stand, and that audits of them can fail."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dpkern.audit.auditing import run
from dpkern.audit.claims import Claim, GaussianDP, Laplace, NoClaim, PureDP
from dpkern.audit.subject import Pair, Subject
from dpkern.audit.subjects import catalogue
from dpkern.audit.subjects.backend import here
from dpkern.audit.subjects.kernel import NoiseKernel
from dpkern.audit.subjects.labelled import LabelledRecord
from dpkern.audit.subjects.local import ReleasedRecordSubject
from dpkern.audit.subjects.step import BATCH, PrivateStep
from dpkern.base.errors import InvalidInput
from dpkern.privacy import mechanisms
from dpkern.privacy.mechanisms import DPSGD, AdLM
from dpkern.privacy.theory.adlm import AdlmSetting, FirstLayer

ROOT2 = 2**0.5
MODES = ("corrected", "published")
TWO_GROUPS = ((3,), (2, 2))


@pytest.fixture
def one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fresh key is the same, so that two releases have the same noise."""
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(count)))


def _moved(subject: Subject, pair: Pair, runs: int = 3) -> torch.Tensor:
    """Return the canary's effect on the release, float64 ``[d]``; with ``one_key`` only."""
    with_it, without = (subject.release(x, runs, 0).double() for x in (pair.present, pair.without))
    return (with_it - without).mean(0)


def _distance(claim: Claim) -> float:
    return claim.epsilon(0) if claim.mu is None else claim.mu


CLAIMS: list[tuple[str, str, dict[str, Any], float, float]] = [
    ("add_noise", "corrected", {"noise_multiplier": 0.5}, 2, 2),
    ("adaclip", "published", {}, 1, 1),
    ("dpsgd", "published", {}, 1, 1),
    # G2 and G3: half the variance for the circulant layer, and a bound of its own for each.
    ("gredp", "published", {}, 1, 3**0.5),
    ("gredp", "published", {"noise_kind": "real"}, 1, float("inf")),
    ("gredp", "corrected", {}, 1, 1),
    # C1: 16 coordinates of an L2 ball have four times its radius as L1 norm.
    ("laplace_sgd", "published", {}, 1, 4),
    ("projected_sgd", "corrected", {}, 2, 2),
    ("pruned", "published", {}, 1, float("inf")),
    ("randomized_response", "corrected", {"epsilon": 0.5}, 0.5, 0.5),
    ("spof", "published", {}, 1, ROOT2),
    ("fm", "published", {"joint": True}, 1, 1),
    ("fm", "corrected", {}, 1, 1),
    ("spof_training", "published", {}, 1, float("inf")),
    ("output_sgd", "corrected", {}, 1.00003, 1.00003),
    # A1: |L| epsilon2 / (2 |h_0|) + 2 |L| epsilon3 / D_F, each half of epsilon.
    ("ilm", "published", {}, 1, 1800 / 64 / 2 + 2 * 1800 / 1812.5 / 2),
    ("ilm", "corrected", {}, 1, 1),
]


@pytest.mark.parametrize(
    ("name", "mode", "settings", "claimed", "certified"),
    CLAIMS,
    ids=[f"{row[0]} {row[1]} {' '.join(map(str, row[2].values()))}".strip() for row in CLAIMS],
)
def test_claims(
    name: str, mode: str, settings: dict[str, Any], claimed: float, certified: float
) -> None:
    made = catalogue.make(name, mode=mode, settings=settings)
    assert _distance(made.claimed) == pytest.approx(claimed, rel=1e-5)
    assert _distance(made.certified) == pytest.approx(certified, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [n for n in catalogue.names() if not n.startswith("peer:")])
def test_every_name_is_released_in_both_modes(name: str, mode: str) -> None:
    made = catalogue.make(name, mode=mode)
    again = pickle.loads(pickle.dumps(made))
    assert (again.name, again.claimed, again.certified) == (made.name, made.claimed, made.certified)
    pairs = again.pairs(None)
    assert 1 <= len(pairs) <= 12
    assert len({pair.name for pair in pairs}) == len(pairs)
    for pair in pairs:
        # Equal by chance: 64 truths among two categories, 0.73^64 < 1e-8.
        runs = 2 if isinstance(again, PrivateStep) else 64
        one, other = again.release(pair.without, runs, 0), again.release(pair.present, runs, 0)
        assert one.shape == other.shape == (runs, one.shape[1])
        assert bool((one != one[0]).any()), "noise is fresh in every run"
    if mode == "corrected":
        assert made.claimed == made.certified
        assert not isinstance(made.certified, NoClaim)


STEPS: dict[str, dict[str, Any]] = {
    "flat": {},
    "two steps": {"steps": 2},
    "float": {"arithmetic": "float"},
    "per layer": {"clipping": "per_layer", "max_grad_norm": (0.5, 2.0)},
    "group, two steps": {"clipping": "group", "groups": (0, 1), "steps": 2},
    "update": {"fused": True},
    "update per layer": {"fused": True, "clipping": "per_layer", "steps": 2},
    "automatic": {"clipping": "automatic"},
    "zero out": {"relation": "zero_out"},
    "replaced": {"relation": "replace_one"},
    "fixed number": {"mode": "published", "noise_point": "per_sample", "batch_size": 4},
}


def _dpsgd(**changes: Any) -> PrivateStep:
    """Little noise, so that distances are exact up to a hundredth."""
    options = {key: changes.pop(key) for key in ("steps", "fused", "relation") if key in changes}
    fields = {"noise_multiplier": 1 / 8, "max_grad_norm": 0.7, **changes}
    return PrivateStep(mechanism=DPSGD(**fields), shapes=TWO_GROUPS, **options)


@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize("changes", STEPS.values(), ids=STEPS)
def test_every_canary_of_a_step_is_at_its_bound(changes: dict[str, Any]) -> None:
    step = _dpsgd(**changes)
    sd, mu = step.noise_sd(), step.certified.mu
    assert sd is not None
    assert mu is not None
    weakest = torch.zeros(7 * step.steps, dtype=torch.float64)
    weakest[1] = -1
    for pair in step.pairs(weakest):
        assert float((_moved(step, pair) / sd).norm()) == pytest.approx(mu, rel=0.02), pair.name
    (last,) = (pair for pair in step.pairs(weakest) if pair.name == "weakest")
    assert float(_moved(step, last)[1]) < 0, "the canary has the direction's sign"


ADAPTIVE = ("adaclip", "directional", "gredp", "spectral_dp", "projected_sgd", "laplace_sgd")


@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize("name", ADAPTIVE)
def test_canaries_of_mechanisms_are_at_their_bounds(name: str) -> None:
    made = catalogue.make(name, settings={"noise_multiplier": 1 / 8})
    assert isinstance(made, PrivateStep)
    best = 0.0
    for pair in made.pairs(None):
        sums = _moved(made, pair) * BATCH
        if made.noise_sd() is not None:
            best = max(best, float((sums / BATCH / made.noise_sd()).norm()))
        else:
            best = max(best, float(sums.norm(made.plan.p)) * 8)
    # Without an sd of every entry the norm is that of the gradient, where low-passed shorter.
    assert best == pytest.approx(_distance(made.certified), rel=0.05)


@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize("op", ["add_noise", "update"])
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64], ids=["exact", "float"])
def test_every_canary_of_a_kernel_is_at_the_bound(op: str, law: str, dtype: torch.dtype) -> None:
    kernel = NoiseKernel(op=op, distribution=law, dtype=dtype, noise_multiplier=1 / 8)
    p = 2 if law == "gaussian" else 1
    for pair in kernel.pairs(None):
        moved = _moved(kernel, pair, runs=200) / kernel._scale
        assert float(moved.norm(p)) == pytest.approx(8, rel=0.01), pair.name


@pytest.mark.usefixtures("one_key")
def test_backends_release_the_same_bits() -> None:
    """All that can run here, emulated or not: the audit of one is the audit of all."""
    # Kernels that are compiled or interpreted first have tests of their own.
    names = [name for name in here() if name not in ("numba", "triton")]
    assert len(names) >= 2
    for op in ("add_noise", "update"):
        kernels = [NoiseKernel(op=op, backend=name, width=5) for name in names]
        released = [each.release(each.null(), 4, 0) for each in kernels]
        assert all(torch.equal(released[0], other) for other in released[1:])


def test_a_record_alone_is_compared_with_nobody() -> None:
    """Noise once per sample is none where nobody came: the source's claim cannot see that."""
    step = _dpsgd(mode="published", noise_point="per_sample")
    assert step.certified == NoClaim()
    alone = step.pairs(None)[0]
    assert not step.release(alone.without, 3, 0).any()
    # A noisy number may be 0: seven in a row by chance, 160^-7 or less.
    assert step.release(alone.present, 3, 0).any(dim=1).all()


def test_real_noise_is_none_on_the_odd_part() -> None:
    """G1: the canary along the direction that the covariance shows stands out of no noise."""
    made = catalogue.make("gredp", mode="published", settings={"noise_kind": "real"})
    odd = torch.zeros(12, dtype=torch.float64)
    odd[1], odd[7] = 0.5**0.5, -(0.5**0.5)
    (pair,) = (pair for pair in made.pairs(odd) if pair.name == "weakest")
    sides = [made.release(data, 20, 0).double() @ odd for data in (pair.without, pair.present)]
    assert all(float(side.std()) < 1e-6 for side in sides)
    assert float((sides[1] - sides[0]).mean()) == pytest.approx(1 / BATCH, rel=1e-4)


@pytest.mark.parametrize("name", ["spof_training", "fm_training", "output_sgd"])
def test_trainings_begin_alike_however_many_runs_there_are(name: str) -> None:
    """Scores and thresholds are learnt on other numbers of runs than those that are counted."""
    made = catalogue.make(name, mode="published", settings={"epsilon": 1e9}, steps=2)
    data = made.pairs(None)[0].present
    few, many = (made.release(data, runs, 0) for runs in (2, 33))
    assert torch.allclose(many, few[:1].expand(33, -1), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "mode", "shown"),
    [
        ("spof_training", "corrected", 0.6),
        ("fm_training", "corrected", 0.2),
        ("output_sgd", "corrected", 0.1),
        ("output_sgd", "published", 3),
        ("ilm", "corrected", 0.3),
        ("adlm", "corrected", 0.3),
    ],
)
def test_canaries_of_records_show_what_is_paid(name: str, mode: str, shown: float) -> None:
    """Seen: 0.85, 0.5, 0.34, 6, 0.6 and 0.6; what is asked is many standard deviations below."""
    runs = 1500 if name == "fm_training" else 5000
    found = run(catalogue.make(name, mode=mode), runs=runs, layers=("canary", "likelihood"))
    assert found.epsilon_lower > shown


LOCAL = ("randomized_response", "spof", "fm", "ilm", "adlm")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOCAL)
def test_likelihood_ratios_are_at_most_what_is_certified(name: str, mode: str) -> None:
    """The logarithm of a likelihood ratio is epsilon at most, and reaches it where one can see."""
    made = catalogue.make(name, mode=mode)
    pair = made.pairs(None)[0]
    assert pair.score is not None
    sides = [pair.score(made.release(data, 200, 0)) for data in (pair.without, pair.present)]
    most, epsilon = float(torch.cat(sides).abs().max()), made.certified.epsilon(0)
    assert most <= epsilon * (1 + 1e-5)
    # The ratio is at an end in a tenth of the runs or more, but for many coordinates: 0.9^400.
    assert name in ("ilm", "adlm") or most >= epsilon * (1 - 1e-4)
    assert float(sides[1].mean()) > float(sides[0].mean())


@pytest.mark.parametrize(("name", "paid"), [("spof_training", 1), ("output_sgd", 3)])
def test_what_sources_claim_of_three_visits(name: str, paid: float) -> None:
    made = catalogue.make(name, mode="published", steps=3)
    assert made.claimed == PureDP(paid)
    assert made.certified == NoClaim()


# Audits at 1 - 1e-7: a sound subject fails less than once in 10^7 runs of a test.
SURE: dict[str, Any] = {"confidence": 1 - 1e-7, "layers": ("covariance", "canary", "likelihood")}

SOUND: dict[str, tuple[Subject, Claim]] = {
    "kernel": (NoiseKernel(width=4), GaussianDP(0.75)),
    "laplace update": (
        NoiseKernel(op="update", distribution="laplace", dtype=torch.float32, width=4),
        Laplace(0.8),
    ),
    "response": (catalogue.make("randomized_response"), PureDP(0.8)),
    "record": (ReleasedRecordSubject(mechanism=mechanisms.SPOF(epsilon=1.0)), Laplace(0.8)),
}


@pytest.mark.parametrize(("subject", "false"), SOUND.values(), ids=SOUND)
def test_sound_releases_pass_and_smaller_claims_fail(subject: Subject, false: Claim) -> None:
    found = run(subject, runs=20_000, **SURE)
    assert found.passed, found.sentence
    assert found.against(false), "an audit that cannot see a false claim shows nothing"


BROKEN: dict[str, tuple[Subject, int]] = {
    "coefficients": (catalogue.make("spof", mode="published"), 50_000),
    "coefficients of three visits": (catalogue.make("fm", mode="published", steps=3), 4000),
    "ilm": (catalogue.make("ilm", mode="published"), 300),
    "spof": (catalogue.make("spof_training", mode="published"), 2000),
}


@pytest.mark.parametrize(("subject", "runs"), BROKEN.values(), ids=BROKEN)
def test_false_claims_of_sources_are_contradicted(subject: Subject, runs: int) -> None:
    found = run(subject, runs=runs, **SURE)
    assert found.contradicts_claim
    assert not found.contradicts_certificate


class _OnePair(PrivateStep):
    """Runs of a step cost more than rows of a kernel."""

    def pairs(self, weakest: torch.Tensor | None) -> Sequence[Pair]:
        return super().pairs(weakest)[-1:]


def test_a_step_passes_and_a_smaller_claim_fails() -> None:
    step = _OnePair(mechanism=DPSGD(noise_multiplier=0.25, max_grad_norm=1.0), shapes=((2,),))
    found = run(step, runs=300, **SURE)
    assert found.passed, found.sentence
    assert found.against(GaussianDP(1.5))


def test_checks_of_a_step_see_a_clip_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    step = _dpsgd()
    asked = step.checks(quick=True)
    assert {"bits", "sensitivity"} <= {check.layer for check in asked}
    assert all(check.passed is not False for check in asked)
    monkeypatch.setattr(PrivateStep, "_summed", lambda self, records: records.sum(0))
    assert any(check.passed is False for check in step.checks(quick=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nobody", {}),
        ("dpsgd", {"mode": "printed"}),
        ("dpsgd", {"settings": {"sigma": 1.0}}),
        ("dpsgd", {"backend": "abacus"}),
        ("randomized_response", {"steps": 2}),
        ("ilm", {"backend": "cpu"}),
        ("ilm", {"shapes": ((4,),)}),
        ("fm", {"mode": "corrected", "steps": 2}),
        ("gredp", {"mode": "published", "shapes": ((2, 1, 3, 3),)}),
        ("spof", {"mode": "corrected", "settings": {"form": "printed"}}),
    ],
)
def test_what_cannot_be_audited_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        catalogue.make(name, **options)


def test_relevances_are_released_with_the_record() -> None:
    layer = FirstLayer(features=2, maps=1)
    small = AdlmSetting(name="small", layer=layer, records=4, batch=2, classes=2, hidden=1)
    made = LabelledRecord(mechanism=AdLM(epsilon=3.0, setting=small))
    assert made.release(made.pairs(None)[0].without, 3, 0).shape == (3, 2 + 2 + 2)
    shared = AdLM(
        epsilon=3.0,
        setting=small,
        mode="published",
        relevance_from="public",
        noise_sharing="shared_per_feature",
    )
    both = LabelledRecord(mechanism=shared)
    found = both.release(both.pairs(None)[0].without, 3, 0)
    # A1: record and bystander have the same inputs here, and with one draw the same release.
    assert torch.equal(found[:, :2], found[:, -2:])
