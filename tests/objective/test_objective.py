"""SPOF, FM and algorithm 2: what is claimed, what is certified, and every defect of theirs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.laws import SCALE_UNITS
from dpkern.base.rng import Key, Purpose
from dpkern.objective import Method, release, rules
from dpkern.ops import coef, noise
from dpkern.privacy.accounting import accountants, events
from dpkern.privacy.mechanisms import FM, SPOF, ObjectivePerturbation, OutputSGD
from dpkern.privacy.mechanisms.objective import MOST_TAIL
from dpkern.privacy.theory import environment, spof_sensitivity
from tests.objective.user_records import CODES, N, Records, direction, flat, records, training

PUBLISHED: dict[str, Any] = {"epsilon": 1.0, "mode": "published"}

CLAIMS: list[tuple[str, ObjectivePerturbation, float, float, set[str]]] = [
    ("spof", SPOF(**PUBLISHED), math.inf, math.inf, {"S1", "S2", "S4", "S5", "S6", "S7", "S8"}),
    ("spof, c = 0", SPOF(**PUBLISHED, constant=0.0), math.inf, math.inf, {"S4", "S6", "S7"}),
    (
        "spof, public scale",
        SPOF(**PUBLISHED, shift="bound", noisy_loss="evaluated"),
        math.inf,
        math.inf,
        {"S4", "S5", "S7"},
    ),
    ("spof, corrected", SPOF(epsilon=1.0), 1.0, 1.0, set()),
    ("spof, corrected, (12)", SPOF(epsilon=1.0, form="printed"), 1.0, 1.0, {"S1", "S2"}),
    ("spof, target", SPOF(epsilon=1.0, release="coefficients"), math.inf, math.inf, {"S7"}),
    ("fm", FM(**PUBLISHED), math.inf, math.inf, {"S4", "S7"}),
    ("fm, joint", FM(**PUBLISHED, joint=True), math.inf, math.inf, {"S1", "S7"}),
    ("fm, corrected", FM(epsilon=1.0), 1.0, 1.0, set()),
    ("algorithm 2", OutputSGD(**PUBLISHED), math.inf, math.inf, {"S6", "S7", "S12"}),
    ("outputs", OutputSGD(epsilon=1.0, full_parameter=False), math.inf, math.inf, {"S7"}),
    ("parameters", OutputSGD(epsilon=1.0), 1.0, 20.0, set()),
    ("no noise", SPOF(epsilon=math.inf), math.inf, math.inf, set()),
]


@pytest.mark.parametrize(("name", "mechanism", "one", "twenty", "ids"), CLAIMS)
def test_claimed_and_certified(
    name: str, mechanism: ObjectivePerturbation, one: float, twenty: float, ids: set[str]
) -> None:
    assert mechanism.epsilon_claimed() == mechanism.epsilon
    for visits, wanted in ((0, 0.0), (1, one), (20, twenty)):
        found = mechanism.epsilon_certified(visits=visits)
        assert found >= wanted
        assert found == pytest.approx(wanted, rel=1e-4)
    assert (mechanism.event_spec() == events.non_private()) == (one == math.inf)
    assert (mechanism.certified_for == "nothing") == (one == math.inf)
    found_ids = {note.id for note in mechanism.notes}
    assert ids <= found_ids if ids else not found_ids
    if name == "fm, joint":
        assert "S4" not in found_ids
    stated = mechanism.certificate(visits=20, seeded=True)
    assert stated.epsilon == math.inf
    assert "known seed" in stated.notes[-1]
    stated = mechanism.certificate(visits=20, seeded=False)
    assert stated.epsilon == mechanism.epsilon_certified(visits=20)
    assert 0 <= stated.delta < 1e-15
    json.dumps(stated.to_dict() | mechanism.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "mechanism", [SPOF(epsilon=1.5), OutputSGD(epsilon=0.3)], ids=lambda m: m.name
)
def test_the_event_costs_what_is_certified(mechanism: ObjectivePerturbation) -> None:
    """Two records differ by twice what one contributes."""
    visits = 5
    leaves = events.leaves(mechanism.event_spec(visits=visits))
    bounds = accountants.upper_bounds(leaves, "replace_one", 1e-11, dimension=N)
    certified = mechanism.epsilon_certified(visits=visits)
    assert min(bounds.values()) == pytest.approx(certified, rel=0.02)


def test_gaussian_noise_on_parameters_is_accounted_over_visits() -> None:
    mechanism = OutputSGD(epsilon=2.0, distribution="gaussian")
    assert mechanism.epsilon_certified(visits=1) == pytest.approx(2.0, rel=0.01)
    assert mechanism.epsilon_certified(visits=1) <= 2.0
    several = mechanism.epsilon_certified(visits=4)
    assert 4.0 < several < 8.0
    assert mechanism.certificate(visits=4, seeded=False).delta == 1e-5


@pytest.mark.parametrize("n", [1, 3, 14, 784])
@pytest.mark.parametrize("epsilon", [0.003, 0.1, 1.0, 2.3, 10.0, 700.0])
def test_two_records_are_at_most_epsilon_apart_in_whole_units(n: int, epsilon: float) -> None:
    reach = SPOF(epsilon=epsilon).record_reach(n)
    assert Fraction(n * reach, SCALE_UNITS) <= Fraction(epsilon)
    assert Fraction(n * (reach + 1), SCALE_UNITS) > Fraction(epsilon)


def test_a_release_is_of_integers_from_0_to_the_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, seen = SPOF(epsilon=2.2), []

    def watched(x: Tensor, **options: Any) -> Tensor:
        seen.append((x.clone(), options["distribution"]))
        return x

    monkeypatch.setattr(noise, "add_noise", watched)
    x = torch.tensor([[0.0, 1.0, 0.5]])
    release.record(mechanism, x, Key.fresh())
    ((counts, law),) = seen
    reach = mechanism.record_reach(3)
    assert counts.dtype == torch.int64
    assert law == "laplace"
    # Rounding to the nearest would go beyond.
    assert round(2.2 * SCALE_UNITS / 3) == reach + 1
    assert counts.tolist() == [[0, reach, round(2.2 * SCALE_UNITS / 6)]]


def test_a_release_has_its_scale_and_no_bias() -> None:
    x = torch.full((20_000, 4), 0.3)
    mechanism = SPOF(epsilon=2.0)
    released = release.record(mechanism, x, Key.from_unsafe_seed(1), clip=False)
    assert (released - x).abs().mean().item() == pytest.approx(2.0, rel=0.03)
    assert (released - x).mean().item() == pytest.approx(0.0, abs=0.04)
    clipped = release.record(mechanism, x, Key.from_unsafe_seed(1))
    assert torch.equal(clipped, released.clamp(0, 1))


def loss_of(scale: float, form: str = "printed") -> float:
    """Return the log ratio of a corner of both coefficients for x = 0 over x = 1."""
    counts = []
    for run, x in enumerate((0.0, 1.0)):
        key = Key.from_unsafe_seed(run)
        given = coef.Noise(
            scale=scale,
            stream=key.stream(Purpose.LAPLACE, 0),
            rounding=key.stream(Purpose.ROUNDING, 0),
        )
        made = coef.perturb(torch.full((400_000, 1), x), form=form, noise=given)
        counts.append(int(((made.linear >= 0.5) & (made.quadratic <= -0.25)).sum()))
    return math.log(counts[0] / counts[1])


def test_s4_a_visit_costs_sqrt_2_epsilon_and_a_joint_scale_epsilon() -> None:
    printed = SPOF(**PUBLISHED, constant=0.0)
    assert printed.epsilon_audited() == pytest.approx(math.sqrt(2))
    assert printed.epsilon_audited(visits=20) == pytest.approx(20 * math.sqrt(2))
    assert replace(printed, noise_schedule="once_per_record").epsilon_audited(
        visits=20
    ) == pytest.approx(math.sqrt(2))
    assert FM(**PUBLISHED, joint=True).epsilon_audited() == pytest.approx(1.0)
    assert loss_of(float(printed.scale(1))) == pytest.approx(math.sqrt(2), abs=0.03)
    joint = SPOF(epsilon=1.0, release="coefficients", form="printed")
    assert joint.epsilon_audited(visits=20) == 1.0
    assert loss_of(float(joint.scale(1))) == pytest.approx(1.0, abs=0.03)


def test_scales_are_the_printed_and_the_corrected_ones() -> None:
    root = math.sqrt(2)
    assert SPOF(**PUBLISHED).scale(14, 2.5) == pytest.approx(134.75 / root)
    assert FM(**PUBLISHED).scale(14) == pytest.approx(14.8492, rel=1e-5)
    assert FM(**PUBLISHED, joint=True).scale(14) == 21.0
    total = torch.tensor([3.0])
    assert FM(**PUBLISHED, joint=True).scale(14, 0.0, total) == torch.tensor([63.0])
    assert SPOF(epsilon=2.0).scale(14) == 7.0
    assert SPOF(epsilon=2.0, release="coefficients").scale(14) == 7.0
    assert SPOF(epsilon=2.0, release="coefficients", form="printed").scale(14) == 10.5
    norm = torch.tensor([1.0, 5.0])
    printed = OutputSGD(**PUBLISHED)
    assert torch.as_tensor(printed.scale(14, norm)).tolist() == [14.0, 112.0]
    assert torch.as_tensor(printed.scale(14, norm, total)).tolist() == [42.0, 112.0]
    assert OutputSGD(epsilon=1.0, full_parameter=False).scale(14, norm) == 28.0


def scales_used(
    monkeypatch: pytest.MonkeyPatch, method: Method, **options: Any
) -> tuple[Any, Tensor, Tensor]:
    """The noise scale of a step, with the codes of its records and b_j."""
    seen: list[Any] = []
    quadratic = coef.quadratic

    def watched(*args: Any, noise: coef.Noise | None = None, **kwargs: Any) -> Any:
        seen.append(None if noise is None else noise.scale)
        return quadratic(*args, noise=noise, **kwargs)

    monkeypatch.setattr(rules.coef, "quadratic", watched)
    run = training(method, **options)
    visit = run._visit()
    direction(run, visit)
    encoder = run.weights.encoder.flatten(0, 1)
    hidden = torch.sigmoid(torch.einsum("bn,bnl->bl", visit.clean, encoder))
    if visit.noise is None:
        return seen[-1], hidden, torch.ones(())
    v = torch.einsum("bn,bnl->bl", visit.noise, encoder)
    return seen[-1], hidden, environment.multipliers(hidden, v).sum(1)


def test_s5_s6_the_printed_scale_follows_every_record_and_corrected_steps_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scale, hidden, _ = scales_used(monkeypatch, SPOF(**PUBLISHED))
    wanted = spof_sensitivity.spof_scale(N, 1.0, 2.5 * hidden.sum(1))
    torch.testing.assert_close(scale, wanted)
    assert scale.max() > scale.min() * 1.01
    public, _, _ = scales_used(monkeypatch, SPOF(**PUBLISHED, shift="bound"))
    assert public == spof_sensitivity.spof_scale(N, 1.0, 2.5 * CODES)
    assert public > scale.max()
    without, _, _ = scales_used(monkeypatch, SPOF(**PUBLISHED, constant=0.0))
    assert without == spof_sensitivity.spof_scale(N, 1.0, 0.0)
    for corrected in (SPOF(epsilon=1.0), SPOF(epsilon=1.0, release="coefficients")):
        assert scales_used(monkeypatch, corrected)[0] is None


def test_s6_with_an_environment_the_printed_scale_is_that_of_theorem_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scale, hidden, b = scales_used(monkeypatch, SPOF(**PUBLISHED), sigma=1.0)
    printed = environment.noisy_sensitivity(N, b, 2.5 * hidden.sum(1)) / math.sqrt(2)
    # The kernel's polynomial has the factor b_j outside.
    torch.testing.assert_close(scale * b, printed)
    scale, _, _ = scales_used(monkeypatch, SPOF(**PUBLISHED, noisy_loss="evaluated"), sigma=1.0)
    assert scale.shape == (6,)


def test_s7_published_gradients_show_the_code_and_corrected_weights_the_release_only() -> None:
    ends = records()
    ends = Records(torch.zeros_like(ends.train), ends.test)
    ends.train[:, 6:] = 1.0
    run = training(SPOF(**PUBLISHED), ends)
    visit = run._visit()
    _, found = direction(run, visit)
    decoder = flat(found)[:, N * CODES :].view(-1, CODES, N)
    # One column, of any noise, is proportional to the code; an input of 0 has the code 1/2.
    halves = [bool(torch.allclose(d[:, 0] / d[0, 0], torch.ones(CODES))) for d in decoder]
    assert halves == (visit.clean[:, 0] == 0).tolist()
    assert 0 < sum(halves) < len(halves)

    first = training(SPOF(epsilon=1.0), records(seed=1))
    first.step()
    again, other = (training(SPOF(epsilon=1.0), records(seed=s)) for s in (1, 2))
    for later in (again, other):
        later.load_state_dict(first.state_dict())
        later.run()
    assert torch.equal(again.weights.decoder, other.weights.decoder)


def test_s8_theorem_1_jumps_where_the_environment_is_still_and_corrected_does_not() -> None:
    def moved(method: Method) -> float:
        still, moving = training(method), training(method, sigma=1e-6)
        a, b = (flat(direction(run)[1]) for run in (still, moving))
        return float((a - b).norm() / a.norm())

    quiet: dict[str, Any] = {"epsilon": math.inf}
    assert moved(SPOF(mode="published", **quiet)) > 0.05
    assert moved(SPOF(mode="published", noisy_loss="evaluated", **quiet)) < 1e-4
    assert moved(SPOF(**quiet)) < 1e-4
    assert moved(OutputSGD(mode="published", **quiet)) > 1.0
    assert moved(OutputSGD(full_parameter=False, **quiet)) < 1e-4


def test_s12_the_printed_gradient_ignores_the_weights_and_4_never_clips() -> None:
    gradients = {}
    for kind in ("at_a", "exact"):
        run = training(OutputSGD(epsilon=math.inf, mode="published", output_gradient=kind))
        shown = []
        for factor in (1.0, -3.0):
            run.weights.decoder.mul_(factor)
            found = direction(run)[1]
            assert not isinstance(found, Tensor)
            shown.append(found.output.clone())
            assert float(found.output.norm(2, 1).max()) <= math.sqrt(N) < 4
        gradients[kind] = shown
    assert torch.equal(*gradients["at_a"])
    assert not torch.allclose(*gradients["exact"])
    run = training(OutputSGD(epsilon=math.inf, max_grad_norm=0.1))
    torch.testing.assert_close(flat(direction(run)[1]).norm(1, 1), torch.full((6,), 0.1))


def test_s13_the_constant_moves_logits_by_its_product_with_the_code_and_is_no_part_of_what() -> (
    None
):
    shown, moved = [], []
    for constant in (0.0, 2.5):
        run = training(SPOF(mode="published", epsilon=math.inf, constant=constant))
        shown.append(direction(run)[0])
        before = run.weights.decoder.clone()
        run.step()
        moved.append(float((run.weights.decoder - before).abs().max()))
    run = training()
    encoder = run.weights.encoder.flatten(0, 1)
    hidden = torch.sigmoid(torch.einsum("bn,bnl->bl", run._visit().clean, encoder))
    wanted = 2.5 * hidden.sum(1, keepdim=True).expand(-1, N)
    torch.testing.assert_close(shown[1] - shown[0], wanted, rtol=1e-4, atol=1e-4)
    # Step 3 makes a temporary, step 7 updates What: the constant does not stay in it.
    assert 0 < max(moved) < 1.0


def test_whether_a_certified_run_stops_does_not_depend_on_its_records() -> None:
    shown = [direction(training(OutputSGD(epsilon=1.0), records(seed=seed)))[0] for seed in (1, 2)]
    assert torch.equal(*shown)
    run = training(OutputSGD(epsilon=1.0))
    z = training()._rule.direction(run.weights, run._visit())[0]
    assert bool((z.abs() <= direction(run)[0]).all())


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (SPOF, {"epsilon": 0.0}, "epsilon"),
        (SPOF, {"epsilon": "1"}, "epsilon"),
        (SPOF, {"epsilon": 1.0, "mode": "fixed"}, "mode"),
        (SPOF, {**PUBLISHED, "form": "taylor"}, "form"),
        (SPOF, {**PUBLISHED, "release": "record"}, "release"),
        (SPOF, {"epsilon": 1.0, "noise_schedule": "per_visit"}, "noise_schedule"),
        (SPOF, {"epsilon": 1.0, "noisy_loss": "printed"}, "noisy_loss"),
        (SPOF, {"epsilon": 1.0, "shift": "current"}, "shift"),
        (SPOF, {**PUBLISHED, "shift": "none"}, "shift"),
        (SPOF, {"epsilon": 1.0, "constant": -1.0}, "constant"),
        (FM, {"epsilon": 1.0, "joint": True}, "joint"),
        (OutputSGD, {**PUBLISHED, "full_parameter": True}, "full_parameter"),
        (OutputSGD, {"epsilon": 1.0, "output_gradient": "at_a"}, "output_gradient"),
        (OutputSGD, {**PUBLISHED, "distribution": "gaussian"}, "distribution"),
        (OutputSGD, {"epsilon": 1.0, "max_grad_norm": 0.0}, "max_grad_norm"),
        (OutputSGD, {"epsilon": 1.0, "delta": 0.0}, "delta"),
    ],
)
def test_options_that_a_mode_does_not_have_are_refused(
    kind: Any, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidInput, match=name):
        kind(**options)


def test_epsilons_that_no_lattice_can_hold_are_refused() -> None:
    with pytest.raises(InvalidInput, match="epsilon"):
        SPOF(epsilon=1e-6).record_reach(14)
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        OutputSGD(epsilon=100.0)


def test_the_fingerprint_knows_every_option() -> None:
    assert SPOF(epsilon=1.0).fingerprint == SPOF(epsilon=1.0).fingerprint
    assert SPOF(epsilon=1.0).fingerprint != SPOF(epsilon=1.0, constant=1.0).fingerprint
    assert FM(epsilon=1.0).fingerprint != SPOF(epsilon=1.0).fingerprint


def test_large_epsilons_whose_cut_tails_decide_are_certified_for_nothing() -> None:
    assert SPOF(epsilon=30.0).epsilon_certified() == 30.0
    assert 0 < SPOF(epsilon=30.0).certified_delta() < MOST_TAIL
    for made, visits in ((SPOF(epsilon=50.0), 1), (OutputSGD(epsilon=32.0), 100_000)):
        certificate = made.certificate(visits=visits, seeded=False)
        assert certificate.epsilon == math.inf
        assert certificate.delta == 0
        assert certificate.certified_for == "nothing"
        assert made.event_spec(visits=visits) == events.non_private()


def test_a_certificate_counts_its_coordinates_everywhere() -> None:
    made = OutputSGD(epsilon=1.0)
    many = made.certificate(seeded=False, coordinates=1 << 28)
    assert many.epsilon == made.epsilon_certified(coordinates=1 << 28)
    assert many.epsilon > made.certificate(seeded=False).epsilon
    assert json.loads(many.event) == made.event_spec(coordinates=1 << 28)


def test_one_secret_key_serves_one_run() -> None:
    key = Key.fresh()
    with pytest.raises(PrivacyError, match="one key for several runs"):
        training(OutputSGD(epsilon=1.0), seeds=[0, 1], keys=[key, key])
