"""Training on AdLM's releases: stacked runs against single networks, divergence, resume."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern.base.errors import InvalidInput, UnsupportedModule
from dpkern.base.rng import Key, Purpose
from dpkern.nn import polynomial
from dpkern.nn.normalise import BoundedResponseNorm
from dpkern.objective import adlm_loss, adlm_stack
from dpkern.objective.adlm import AdlmSchedule, AdlmTraining, monte_carlo
from dpkern.objective.adlm_networks import ARCHITECTURES, build, first_layer, setting
from dpkern.objective.adlm_norm import bounded_response_norm
from dpkern.objective.adlm_release import ReleasedDataset, release
from dpkern.objective.adlm_stack import Stack
from dpkern.privacy.mechanisms import ILM, AdLM
from dpkern.privacy.theory.adlm import CIFAR10, MNIST
from tests.objective.adlm_data import CLASSES, labelled

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = labelled()
BATCH = 20


def networks(architecture: str, seeds: range) -> list[nn.Sequential]:
    return [build(architecture, DATA.row_shape, CLASSES, seed=seed) for seed in seeds]


def clean(architecture: str) -> ReleasedDataset:
    network = networks(architecture, range(1))[0]
    sizes = setting(network, DATA.row_shape, records=len(DATA.x), batch=BATCH)
    return release(ILM(epsilon=math.inf, setting=sizes), DATA, Key.from_unsafe_seed(0))


def wide(released: ReleasedDataset) -> ReleasedDataset:
    """In float64, where rounding leaves no doubt."""
    assert released.targets is not None
    return replace(released, inputs=released.inputs.double(), targets=released.targets.double())


def one_by_one(
    network: nn.Sequential, training: AdlmTraining, run: int, steps: int, loss: str
) -> None:
    """The plain trainer: a network, autograd, the loss of ``nn.polynomial``."""
    network.train()
    for step in range(steps):
        epoch, place = divmod(step, training.steps_per_epoch)
        rows = training._order(training.seeds[run], epoch)[place]
        x, y = DATA.x[rows].flatten(1), nn.functional.one_hot(DATA.y[rows], CLASSES)
        x, y = x.double(), y.double()
        scores = network(x)
        if loss == "polynomial":
            losses = polynomial.label_scalar(scores, polynomial.label_coefficients(y))
        else:
            losses = polynomial.cross_entropy(scores, y)
        gradients = torch.autograd.grad(losses.mean(), list(network.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(network.parameters(), gradients, strict=True):
                weight -= training.schedule.lr * gradient


@pytest.mark.parametrize("loss", adlm_loss.LOSSES)
@pytest.mark.parametrize("architecture", ["digits", "dense"])
def test_v40_without_noise_it_is_the_plain_trainer(architecture: str, loss: str) -> None:
    released = wide(clean(architecture))
    runs = range(3)
    schedule = AdlmSchedule(lr=0.5, epochs=2, loss=loss)
    training = AdlmTraining(
        DATA,
        [released] * 3,
        [network.double() for network in networks(architecture, runs)],
        schedule,
        seeds=list(runs),
    )
    outcome = training.run()
    for run, network in enumerate(networks(architecture, runs)):
        one_by_one(network.double(), training, run, training.total_steps, loss)
        network.eval()
        stacked = training.stack.network(run)
        for mine, plain in zip(stacked.parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-11)
        x = DATA.x_test.flatten(1).double()
        found = training.stack.scores(x.expand(3, -1, -1), training=False, ranges="running")
        torch.testing.assert_close(found[run], network(x), rtol=1e-9, atol=1e-10)
        right = (network(x).argmax(1) == DATA.y_test).double().mean()
        assert float(outcome.accuracy[run, -1]) == pytest.approx(100 * float(right))


def test_coefficients_without_noise_are_the_targets_loss() -> None:
    released = clean("dense")
    assert released.targets is not None
    made = polynomial.label_coefficients(released.targets)
    as_coefficients = replace(released, targets=None, coefficients=made)
    expanded = replace(released, visit_scale=0.0)
    found = []
    for each in (released, as_coefficients, expanded):
        training = AdlmTraining(
            DATA,
            [each] * 2,
            networks("dense", range(2)),
            AdlmSchedule(lr=0.5, epochs=1),
            seeds=[0, 1],
            keys=[Key.from_unsafe_seed(0)] * 2,
        )
        outcome = training.run()
        found.append((outcome.loss, training.stack.state_dict()))
    for loss, state in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-5, atol=1e-6)
        for name, weight in state.items():
            torch.testing.assert_close(weight, found[0][1][name], rtol=1e-4, atol=1e-5)


def test_expanded_coefficients_get_noise_of_their_own_at_every_visit() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(1, 40, 4, generator=generator)
    weights = torch.randn(1, CLASSES, 4, generator=generator)
    targets = nn.functional.one_hot(torch.arange(40) % CLASSES, CLASSES).float()[None]
    key = Key.from_unsafe_seed(1)

    def at(step: int, scale: float) -> tuple[float, Tensor]:
        w = weights.clone().requires_grad_()
        h = hidden.clone().requires_grad_()
        pair = (key.stream(Purpose.LAPLACE, step), key.stream(Purpose.ROUNDING, step))
        loss = adlm_loss.expanded(h, w, targets, scale=scale, streams=[pair])
        assert w.grad is not None
        return float(loss), w.grad

    none, first, again, second = at(1, 0.0), at(1, 0.5), at(1, 0.5), at(2, 0.5)
    assert first[0] == again[0] != second[0]
    assert not torch.equal(first[1], second[1])
    # phi1's noise alone is Lap(0.5) / 40 summed over 40 records in each weight's gradient.
    spread = float((first[1] - none[1]).abs().mean())
    assert 0.02 < spread < 1.5


def test_normalisation_by_hand_is_the_printed_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for maps, layer in ((7, BoundedResponseNorm()), (2, BoundedResponseNorm(1.0, 3, 0.01, 0.4))):
        h = (4 * torch.rand(3, maps, 5, 4, generator=generator, dtype=torch.float64) - 1).relu()
        h[0, 0] = 60.0  # cut at 1
        upstream = torch.randn(h.shape, generator=generator, dtype=torch.float64)
        found = []
        for norm in (layer, lambda x, layer=layer: bounded_response_norm(x, layer)):
            x = h.clone().requires_grad_()
            out = norm(x)
            (slope,) = torch.autograd.grad(out, x, upstream)
            found.append((out.detach(), slope))
        torch.testing.assert_close(found[1][0], found[0][0])
        torch.testing.assert_close(found[1][1], found[0][1])
        assert float(found[1][0].max()) == 1.0
        assert float(found[1][1].abs().max()) > 0.1


def test_a_diverged_run_stops_and_the_others_go_on() -> None:
    released = clean("dense")
    assert released.targets is not None
    good = polynomial.label_coefficients(released.targets)
    # Noise can turn the curvature around: then the loss has no lower bound.
    bad = polynomial.PowerCoefficients(good.constant, good.linear, -good.quadratic)
    both = [replace(released, targets=None, coefficients=made) for made in (good, bad)]
    schedule = AdlmSchedule(lr=2.0, epochs=30, evaluate_every=30)
    pair = AdlmTraining(DATA, both, networks("dense", range(2)), schedule, seeds=[0, 1])
    alone = AdlmTraining(DATA, both[:1], networks("dense", range(1)), schedule, seeds=[0])
    outcome = pair.run()
    assert outcome.diverged.tolist() == [False, True]
    assert bool(outcome.accuracy.isfinite().all())
    assert float(pair.stack.last.detach()[1].abs().max()) < 1e4
    assert float(outcome.accuracy[0, -1]) == pytest.approx(float(alone.run().accuracy[0, -1]))
    assert float(outcome.accuracy[0, -1]) > 80  # three bars are easy
    # Where no run still moves, nothing is computed any more, and the last state is measured.
    lost = AdlmTraining(DATA, both[1:], networks("dense", range(1)), schedule, seeds=[1])
    ended = lost.run()
    assert lost.finished
    assert lost.step < lost.total_steps
    assert ended.epochs == [-(-lost.step // lost.steps_per_epoch)]
    assert ended.accuracy.shape == (1, 1)


def test_resumed_runs_are_the_same() -> None:
    sizes = clean("digits").mechanism.setting
    mechanism = ILM(epsilon=50.0, setting=sizes)
    schedule = AdlmSchedule(lr=0.3, epochs=3)
    whole = monte_carlo(mechanism, DATA, "digits", schedule, seeds=[0, 1])
    expected = whole.run()
    first = monte_carlo(mechanism, DATA, "digits", schedule, seeds=[0, 1])
    for _ in range(4):  # in the middle of the second epoch
        first.advance()
    state = first.state_dict()
    second = monte_carlo(mechanism, DATA, "digits", schedule, seeds=[0, 1])
    second.load_state_dict(state)
    found = second.run()
    assert found.epochs == expected.epochs == [1, 2, 3]
    assert torch.equal(found.accuracy, expected.accuracy)
    assert torch.equal(found.loss, expected.loss)
    for name, weight in whole.stack.state_dict().items():
        assert torch.equal(weight, second.stack.state_dict()[name])
    with pytest.raises(InvalidInput, match="state"):
        monte_carlo(mechanism, DATA, "digits", schedule, seeds=[0, 2]).load_state_dict(state)


def test_every_visit_has_streams_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, int, int]] = []

    def spy(hidden: Tensor, weights: Tensor, targets: Tensor, **given: Any) -> Tensor:
        for pair in given["streams"]:
            seen.extend((stream.key, stream.n0, stream.n1) for stream in pair)
        return plain(hidden, weights, targets, **given)

    plain = adlm_loss.expanded
    monkeypatch.setattr(adlm_loss, "expanded", spy)
    sizes = clean("dense").mechanism.setting
    mechanism = ILM(
        epsilon=9.0, setting=sizes, mode="published", coefficient_form="feature_expanded"
    )
    monte_carlo(mechanism, DATA, "dense", AdlmSchedule(epochs=2), seeds=[0, 1]).run()
    assert len(seen) == len(set(seen)) == 2 * 2 * 6


def test_batches_visit_every_record_once_an_epoch_and_runs_differ() -> None:
    training = AdlmTraining(
        DATA, [clean("dense")] * 2, networks("dense", range(2)), AdlmSchedule(), seeds=[0, 1]
    )
    first, second = training._order(0, 0), training._order(0, 1)
    assert sorted(first.flatten().tolist()) == list(range(len(DATA.x)))
    assert not torch.equal(first, second)
    assert not torch.equal(first, training._order(1, 0))


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "published"},
        {"mode": "published", "noise_sharing": "shared_per_feature"},
        {"mode": "published", "coefficient_form": "feature_expanded"},
        {"labels": "laplace"},
        {"input_range": "unit_l2"},
    ],
)
def test_every_form_trains(options: dict[str, str]) -> None:
    sizes = clean("digits").mechanism.setting
    mechanism = AdLM(epsilon=20.0, setting=sizes, **options)  # type: ignore[arg-type]
    relevance = torch.ones(64, dtype=torch.float64)
    schedule = AdlmSchedule(lr=0.05, epochs=1, ranges="batch")
    training = monte_carlo(mechanism, DATA, "digits", schedule, seeds=[0, 1], relevance=relevance)
    before = training.stack.state_dict()
    outcome = training.run()
    assert outcome.accuracy.shape == outcome.loss.shape == (2, 1)
    assert bool(outcome.loss.isfinite().all())
    assert outcome.seconds_per_epoch > 0
    after = training.stack.state_dict()
    assert not torch.equal(before["5.weight"], after["5.weight"])


def test_a1_shared_noise_is_an_offset_that_a_network_learns_around() -> None:
    """Its accuracy is nearly that of no noise, and it protects nothing; own draws ruin it."""
    sizes = clean("dense").mechanism.setting
    found = {}
    for sharing in ("shared_per_feature", "iid_per_example"):
        mechanism = ILM(epsilon=200.0, setting=sizes, mode="published", noise_sharing=sharing)
        schedule = AdlmSchedule(lr=0.5, epochs=40, evaluate_every=40, ranges="batch")
        found[sharing] = monte_carlo(mechanism, DATA, "dense", schedule, seeds=range(4)).run()
    means = {name: float(outcome.accuracy.mean()) for name, outcome in found.items()}
    assert means["shared_per_feature"] > means["iid_per_example"] + 10


@pytest.mark.parametrize("architecture", ["digits", "dense"])
def test_what_records_share_belongs_to_the_network(architecture: str) -> None:
    """Line 14's noise is a bias of the first layer; a shared draw is added to held-out inputs."""
    made = networks(architecture, range(2))
    first = next(layer for layer in made[0] if isinstance(layer, (nn.Conv2d, nn.Linear)))
    generator = torch.Generator().manual_seed(0)
    released = []
    for _ in made:
        bias = torch.randn(len(first.weight), generator=generator)
        offset = 3 * torch.randn(64, generator=generator)
        released.append(replace(clean(architecture), bias_noise=bias, offset=offset))
    training = AdlmTraining(DATA, released, made, AdlmSchedule(ranges="batch"), seeds=[0, 1])
    found = training.accuracy()
    for run, network in enumerate(made):
        layers = [layer for layer in network if isinstance(layer, (nn.Conv2d, nn.Linear))]
        bias, offset = released[run].bias_noise, released[run].offset
        assert bias is not None
        assert offset is not None
        assert layers[0].bias is not None
        with torch.no_grad():
            layers[0].bias += bias
            right, total = 0, len(DATA.x_test)
            for begin in range(0, total, BATCH):
                x = DATA.x_test[begin : begin + BATCH].flatten(1) + offset
                scores = network.train()(x)  # the range of each batch
                stacked = training.stack.scores(
                    x.expand(2, -1, -1), training=False, ranges="batch"
                )[run]
                torch.testing.assert_close(stacked, scores, rtol=1e-3, atol=1e-3)
                right += int((scores.argmax(1) == DATA.y_test[begin : begin + BATCH]).sum())
        assert float(found[run]) == pytest.approx(100 * right / total)


def test_settings_of_the_source() -> None:
    for name, shape, expected in (
        ("mnist", (28, 28), MNIST),
        ("cifar10", (3, 32, 32), CIFAR10),
    ):
        network = build(name, shape, 10, seed=0)
        made = setting(network, shape, records=60_000, batch=expected.batch, name=expected.name)
        assert made == expected
    assert first_layer(build("dense", (5,), 2, seed=0), (5,)).maps == 32
    assert set(ARCHITECTURES) == {"mnist", "cifar10", "digits", "dense"}


def test_hidden_layer_is_bounded() -> None:
    stack = Stack(networks("digits", range(2)))
    with torch.no_grad():
        hidden = stack.hidden(50 * DATA.x.flatten(1).expand(2, -1, -1), training=False)
    assert float(hidden.min()) == 0
    assert float(hidden.max()) == 1


def test_refused() -> None:
    released = clean("dense")
    made = networks("dense", range(2))
    with pytest.raises(InvalidInput, match="released"):
        AdlmTraining(DATA, [released], made, AdlmSchedule(), seeds=[0, 1])
    other = replace(released, mechanism=replace(released.mechanism, epsilon=1.0))
    with pytest.raises(InvalidInput, match="released"):
        AdlmTraining(DATA, [released, other], made, AdlmSchedule(), seeds=[0, 1])
    expanded = replace(released, visit_scale=1.0)
    with pytest.raises(InvalidInput, match="keys"):
        AdlmTraining(DATA, [expanded] * 2, made, AdlmSchedule(), seeds=[0, 1])
    with pytest.raises(InvalidInput, match="networks"):
        Stack([*made, *networks("digits", range(1))])
    with pytest.raises(UnsupportedModule):
        Stack([nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))])
    with pytest.raises(InvalidInput, match="row_shape"):
        build("digits", (64,), 3, seed=0)
    with pytest.raises(InvalidInput, match="architecture"):
        build("lenet", (8, 8), 3, seed=0)
    with pytest.raises(InvalidInput, match="lr"):
        AdlmSchedule(lr=0)


@pytest.mark.parametrize(("kind", "mode"), [(ILM, "published"), (ILM, "corrected")])
def test_runs_stand_on_their_device(kind: type[ILM], mode: str) -> None:
    """Releases are made on the processor; all that a step reads goes to the device."""
    network = build("digits", DATA.row_shape, CLASSES, seed=0)
    of = setting(network, DATA.row_shape, records=len(DATA.x), batch=10)
    made = kind(epsilon=10.0, setting=of, mode=mode)
    meta = torch.device("meta")
    training = monte_carlo(made, DATA, "digits", AdlmSchedule(), seeds=[0, 1], device=meta)
    (first, _) = training.released
    read = [first.inputs, training._test, training._truth, training.diverged]
    read += list(training.stack.parameters.values()) + list(training.rule.means.values())
    if first.coefficients is not None:
        read += [first.coefficients.linear, first.coefficients.quadratic]
    read += [each for each in (first.targets, first.bias_noise) if each is not None]
    assert {each.device for each in read} == {meta}


@pytest.mark.parametrize("architecture", ["digits", "dense"])
def test_convolutions_take_some_records_at_a_time(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results and gradients are those of all records at once; min-max sees the whole batch."""
    found = []
    for cached in (1 << 30, 1):
        monkeypatch.setattr(adlm_stack, "CACHED", cached)
        stack = Stack([network.double() for network in networks(architecture, range(2))])
        stack.offset = torch.ones(2, len(next(iter(stack.parameters.values()))[0])).double()
        x = DATA.x[:20].flatten(1).double().expand(2, -1, -1)
        scores = stack.scores(x, training=True)
        scores.square().sum().backward()
        found.append((scores, [each.grad for each in stack.parameters.values()]))
    torch.testing.assert_close(found[0], found[1])
    assert stack._at_once(x) == (20 if architecture == "dense" else 1)
