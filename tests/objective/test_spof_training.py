"""The trainer of autoencoders: gradients, order, guard, resume; what it equals without noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dpkern import PrivacyEngine
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.rng import Key, Purpose
from dpkern.objective import (
    Method,
    NonPrivate,
    VisitSchedule,
    autoencoder,
    descent,
    pooled,
    release,
)
from dpkern.objective.autoencoder import Gradients
from dpkern.objective.dpsgd import ParameterNoise
from dpkern.objective.records import Records as UserTables
from dpkern.objective.rules import Plain
from dpkern.ops import noise, testing
from dpkern.ops._draws import Draws
from dpkern.ops.backends import cuda
from dpkern.privacy.mechanisms import FM, SPOF, OutputSGD
from dpkern.privacy.theory import environment, spof_loss
from dpkern.step.noise_tables import CdtTable, RingPrefetch, SampleTable
from tests.objective.user_records import (
    CODES,
    N,
    Records,
    direction,
    flat,
    in_float64,
    records,
    training,
)

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET: dict[str, Any] = {"epsilon": math.inf}


def trained(method: Method, data: Records | None = None, **options: Any) -> Tensor:
    run = training(method, data, **options)
    run.run()
    return values(run)


def values(run: Any) -> Tensor:
    return torch.cat([w.flatten(1) for w in (run.weights.encoder, run.weights.decoder)], 1)


@pytest.mark.parametrize(
    ("private", "plain"),
    [
        (SPOF(mode="published", **QUIET), NonPrivate(loss="printed", constant=2.5)),
        (SPOF(mode="corrected", **QUIET), NonPrivate(loss="taylor", constant=2.5)),
        (SPOF(mode="corrected", constant=0.0, **QUIET), NonPrivate(loss="taylor")),
        (
            SPOF(mode="published", noise_schedule="once_per_record", **QUIET),
            NonPrivate(loss="printed", constant=2.5),
        ),
        (OutputSGD(mode="published", **QUIET), NonPrivate()),
        (OutputSGD(mode="corrected", full_parameter=False, **QUIET), NonPrivate()),
        (OutputSGD(mode="corrected", max_grad_norm=math.inf, **QUIET), NonPrivate()),
        (
            OutputSGD(mode="published", output_gradient="polynomial", **QUIET),
            NonPrivate(loss="printed"),
        ),
    ],
    ids=lambda m: m.name,
)
def test_without_noise_and_clipping_a_method_is_its_plain_trainer(
    private: Method, plain: NonPrivate
) -> None:
    torch.testing.assert_close(trained(private), trained(plain), rtol=1e-5, atol=1e-6)


def test_fm_without_noise_is_the_polynomial_on_all_records() -> None:
    data = pooled(records())
    private = trained(FM(mode="published", **QUIET), data)
    torch.testing.assert_close(private, trained(NonPrivate(loss="printed"), data))


class Single(nn.Module):
    """One user's autoencoder in plain torch."""

    def __init__(self, encoder: Tensor, decoder: Tensor) -> None:
        super().__init__()
        self.encoder = nn.Linear(N, CODES, bias=False)
        self.decoder = nn.Linear(CODES, N, bias=False)
        with torch.no_grad():
            self.encoder.weight.copy_(encoder.T)
            self.decoder.weight.copy_(decoder.T)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.decoder(torch.sigmoid(self.encoder(x)))
        return z

    def values(self) -> Tensor:
        weights = self.encoder.weight.detach(), self.decoder.weight.detach()
        return torch.cat([w.T.flatten() for w in weights])


def test_the_plain_trainer_is_torch_one_record_after_the_other() -> None:
    run = training(seeds=(3, 9))
    singles = [
        [Single(run.weights.encoder[r, u], run.weights.decoder[r, u]) for u in range(2)]
        for r in range(2)
    ]
    while run.step_number < run.steps:
        visit = run._visit()
        for pair, x in enumerate(visit.clean):
            model = singles[pair // 2][pair % 2]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(x), x, reduction="sum").backward()
            optimizer.step()
        run.step()
    for r in range(2):
        for u in range(2):
            pair = [run.weights.encoder[r, u], run.weights.decoder[r, u]]
            found = torch.cat([w.flatten() for w in pair])
            torch.testing.assert_close(found, singles[r][u].values(), rtol=1e-4, atol=1e-6)


LOSSES: dict[str, tuple[Method, float]] = {
    "bce": (NonPrivate(constant=0.3), 0.0),
    "printed": (NonPrivate(loss="printed", constant=0.3), 0.0),
    "taylor": (NonPrivate(loss="taylor", constant=0.3), 0.0),
    "bce, environment": (NonPrivate(constant=0.3), 1.0),
    "evaluated": (SPOF(mode="published", noisy_loss="evaluated", constant=0.3, **QUIET), 1.0),
    "theorem 1": (SPOF(mode="published", constant=0.3, **QUIET), 1.0),
    "theorem 1, kept": (
        SPOF(mode="published", constant=0.3, noise_schedule="once_per_record", **QUIET),
        1.0,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_autograds(name: str) -> None:
    method, sigma = LOSSES[name]
    run = training(method, sigma=sigma)
    visit = run._visit()
    _, found = direction(run, visit)
    encoder, decoder = in_float64(run.weights)
    x = visit.clean.double()
    seen = x if visit.noise is None else x + visit.noise.double()
    hidden = torch.sigmoid(torch.einsum("bn,bnl->bl", seen, encoder))
    z = torch.einsum("bl,bln->bn", hidden, decoder) + 0.3 * hidden.sum(1, keepdim=True)
    if name.startswith("bce"):
        loss = spof_loss.cross_entropy(z, x).sum()
    else:
        alpha = spof_loss.coefficients(x, form="taylor" if name == "taylor" else "printed")
        loss = spof_loss.polynomial(alpha, z).sum()
        if name.startswith("theorem 1"):
            assert visit.noise is not None
            clean = torch.sigmoid(torch.einsum("bn,bnl->bl", x, encoder))
            v = torch.einsum("bn,bnl->bl", visit.noise.double(), encoder)
            b = environment.multipliers(clean, v).sum(1).detach()
            loss = environment.noisy_loss(alpha, z / b[:, None], b, torch.zeros_like(z)).sum()
    wanted = torch.cat([g.flatten(1) for g in torch.autograd.grad(loss, (encoder, decoder))], 1)
    torch.testing.assert_close(flat(found).double(), wanted, rtol=2e-4, atol=2e-5)


def test_a_gradients_norms_come_from_its_factors() -> None:
    _, found = direction(training())
    whole = flat(found)
    assert not isinstance(found, Tensor)
    for p in (1, 2):
        torch.testing.assert_close(found.norms(p), whole.norm(p, 1))


METHODS: dict[str, tuple[Method, float]] = {
    "spof published": (SPOF(epsilon=300.0, mode="published"), 0.0),
    "spof published, environment": (SPOF(epsilon=300.0, mode="published"), 1.0),
    "spof kept": (SPOF(epsilon=300.0, mode="published", noise_schedule="once_per_record"), 0.0),
    "spof corrected": (SPOF(epsilon=2.0), 0.5),
    "spof coefficients": (SPOF(epsilon=9.0, release="coefficients"), 0.0),
    "spof coefficients, printed": (
        SPOF(epsilon=90.0, release="coefficients", form="printed"),
        0.0,
    ),
    "output published": (OutputSGD(epsilon=9.0, mode="published"), 0.5),
    "output corrected": (OutputSGD(epsilon=9.0, full_parameter=False), 0.0),
    "parameters": (OutputSGD(epsilon=9.0), 0.0),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_is_the_same_alone_and_among_others(name: str) -> None:
    method, sigma = METHODS[name]
    alone = trained(method, seeds=(4,), sigma=sigma)
    torch.testing.assert_close(alone, trained(method, sigma=sigma)[1:2], rtol=1e-4, atol=1e-5)
    assert not torch.equal(alone, trained(method, seeds=(6,), sigma=sigma))


SOURCES = {"ring": RingPrefetch, "cdt": CdtTable, "table": SampleTable}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", METHODS)
def test_a_noise_source_serves_every_run_resumed_or_not(name: str, source: str) -> None:
    method, sigma = METHODS[name]
    given: dict[str, Any] = {"sigma": sigma, "noise_source": SOURCES[source]}
    begun = training(method, **given)
    for _ in range(3):
        begun.step()
    resumed = training(method, **given)
    resumed.load_state_dict(begun.state_dict())
    resumed.run()
    whole = trained(method, **given)
    assert torch.equal(values(resumed), whole)
    inline = trained(method, sigma=sigma)
    assert torch.equal(whole, inline) is (source == "ring")
    alone = trained(method, seeds=(4,), **given)
    torch.testing.assert_close(alone, whole[1:2], rtol=1e-4, atol=1e-5)


def test_sources_are_refused_where_there_is_no_noise_and_states_know_them() -> None:
    for method in (NonPrivate(), SPOF(epsilon=math.inf, mode="published")):
        with pytest.raises(InvalidInput, match="draws noise"):
            training(method, noise_source=CdtTable)
    method = SPOF(epsilon=2.0)
    begun = training(method, noise_source=CdtTable)
    begun.step()
    for other in (None, SampleTable, lambda: CdtTable(word_bits=40)):
        with pytest.raises(InvalidInput, match="Resume with the settings"):
            training(method, noise_source=other).load_state_dict(begun.state_dict())
    ring = training(method, noise_source=RingPrefetch)
    ring.step()
    training(method).load_state_dict(ring.state_dict())


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupted_run_ends_as_one_that_was_not(name: str) -> None:
    method, sigma = METHODS[name]
    run = training(method, sigma=sigma)
    for _ in range(17):
        run.step()
    later = training(method, sigma=sigma)
    later.load_state_dict(run.state_dict())
    later.run()
    assert torch.equal(values(later), trained(method, sigma=sigma))
    assert later.visits == 2


FITTING: dict[str, tuple[Method, float]] = {
    "printed": (NonPrivate(loss="printed", constant=2.5), 0.0),
    "taylor, environment": (NonPrivate(loss="taylor"), 1.0),
    "spof, no noise": (SPOF(mode="published", **QUIET), 0.0),
    "spof kept, no noise": (SPOF(mode="published", noise_schedule="once_per_record", **QUIET), 0.0),
    "spof, public scale": (SPOF(epsilon=300.0, mode="published", shift="bound"), 0.0),
    "spof evaluated": (SPOF(epsilon=300.0, mode="published", noisy_loss="evaluated"), 1.0),
    **{name: METHODS[name] for name in ("spof published", "spof corrected", "spof coefficients")},
}


@pytest.mark.parametrize("source", [None, *SOURCES])
@pytest.mark.parametrize("name", FITTING)
def test_one_kernel_takes_the_steps_that_operations_on_tensors_take(
    name: str, source: str | None
) -> None:
    method, sigma = FITTING[name]
    given: dict[str, Any] = {"sigma": sigma}
    if source is not None:
        if isinstance(method, NonPrivate) or not method.noised:
            return
        given["noise_source"] = SOURCES[source]
    run = training(method, **given)
    begun = values(run)
    assert run.fused
    assert not training(method, fused=False, **given).fused
    run.run()
    apart = trained(method, fused=False, **given)
    torch.testing.assert_close(values(run), apart, rtol=1e-3, atol=2e-4)
    assert (apart - begun).abs().max() > 0.01


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_no_kernel_takes_stay_apart(name: str) -> None:
    method, sigma = METHODS[name]
    fused = name in ("spof published", "spof corrected", "spof coefficients")
    assert training(method, sigma=sigma).fused is fused
    if not fused:
        with pytest.raises(InvalidInput, match="Leave the device out"):
            training(method, sigma=sigma, device="meta")


def test_many_runs_are_bit_for_bit_the_same_runs_alone() -> None:
    for name in ("spof published", "spof corrected", "spof coefficients"):
        method, sigma = METHODS[name]
        keys = [Key.fresh() for _ in range(5)]
        together = training(method, seeds=range(5), sigma=sigma, keys=keys)
        together.run()
        for r in range(5):
            alone = training(method, seeds=[r], sigma=sigma, keys=[keys[r]])
            while alone.step_number < alone.steps:
                alone.advance(5)
            assert torch.equal(values(alone)[0], values(together)[r])


def test_runs_go_to_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in without values: no run has been on a real one."""
    seen: list[Tensor] = []

    def watched(*weights: Tensor, **given: Any) -> None:
        seen.extend([*weights, *(t for t in given.values() if isinstance(t, Tensor))])

    monkeypatch.setattr(descent.coef, "descend", watched)
    # These ask for values.
    monkeypatch.setattr(autoencoder, "tensor", lambda **_: None)
    monkeypatch.setattr(release, "_zeros", lambda marks: range(len(marks)))
    for name in ("spof published", "spof corrected"):
        method, sigma = METHODS[name]
        training(method, sigma=sigma, device="meta").step()
    assert len(seen) == 8 + 7
    assert {one.device.type for one in seen} == {"meta"}


def test_runs_on_emulated_kernels_are_those_of_the_processor() -> None:
    if isinstance(cuda._emulated(), str):
        pytest.skip(f"cuda {cuda._emulated()}")
    method, sigma = METHODS["spof published"]
    on_processor = trained(method, sigma=sigma)
    with testing.emulated("cuda"):
        assert torch.equal(trained(method, sigma=sigma), on_processor)


def test_noise_does_not_depend_on_how_much_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("spof published, environment", "parameters"):
        method, sigma = METHODS[name]
        many = trained(method, sigma=sigma)
        monkeypatch.setattr(release, "_AT_ONCE", 500)
        assert release.PrefetchedDraws([Key.fresh()], width=28, parts=2)._steps == 8
        assert torch.equal(trained(method, sigma=sigma), many)
        monkeypatch.undo()


def test_a_resumed_run_with_secret_keys_keeps_its_release() -> None:
    """A second release of the same records would cost epsilon again."""
    run = training(SPOF(epsilon=1.0), seeds=(3,), keys=[Key.fresh()])
    run.step()
    later = training(SPOF(epsilon=1.0), seeds=(3,), keys=[Key.fresh()])
    assert not run.seeded
    assert not later.seeded
    later.load_state_dict(run.state_dict())
    for each in (run, later):
        each.run()
    assert torch.equal(values(run), values(later))
    with pytest.raises(PrivacyError, match="same keys"):
        later.load_state_dict(run.state_dict())


def test_the_state_of_another_training_is_refused() -> None:
    state = training(SPOF(epsilon=1.0)).state_dict()
    with pytest.raises(InvalidInput, match="state"):
        training(SPOF(epsilon=2.0)).load_state_dict(state)


def test_a_run_that_diverges_is_marked_and_stopped_and_the_others_go_on() -> None:
    run = training(seeds=(3, 4, 5))
    run.weights.decoder[1, 0] = 1000.0
    stopped = values(run)[1]
    others = trained(NonPrivate(), seeds=(3, 5))
    outcome = run.run()
    assert outcome.diverged.tolist() == [False, True, False]
    assert torch.equal(values(run)[1], stopped)
    torch.testing.assert_close(values(run)[[0, 2]], others)


def test_logits_that_are_no_numbers_stop_a_run() -> None:
    run = training()
    run.weights.encoder[2] = math.nan
    run.step()
    assert run.diverged.tolist() == [False, False, True]
    assert bool(values(run)[:2].isfinite().all())


def test_s2_the_printed_loss_diverges_and_taylors_does_not() -> None:
    """Without noise: no lower bound where targets are below 1/2."""
    low = records()
    low = Records(low.train * 0.4, low.test * 0.4)
    printed = training(
        NonPrivate(loss="printed"), low, schedule=VisitSchedule(lr=0.5, epochs=20)
    ).run()
    taylor = training(
        NonPrivate(loss="taylor"), low, schedule=VisitSchedule(lr=0.5, epochs=20)
    ).run()
    assert printed.diverged.all()
    assert not taylor.diverged.any()


def test_the_outcome_is_measured_on_held_out_records() -> None:
    data = records()
    run = training(SPOF(epsilon=math.inf, constant=0.4), data)
    outcome = run.outcome()
    pairs = zip(run.weights.encoder[1], run.weights.decoder[1], data.test, strict=True)
    z = torch.stack([torch.sigmoid(x @ w) @ (v + 0.4) for w, v, x in pairs])
    error = (data.test - torch.sigmoid(z)).abs().double()
    assert outcome.accuracy[1].item() == pytest.approx(100 * (1 - error.mean().item()))
    assert outcome.mse[1].item() == pytest.approx(error.square().sum(-1).mean().item())
    bce = binary_cross_entropy_with_logits(z, data.test, reduction="none").sum(-1).mean()
    assert outcome.bce[1].item() == pytest.approx(bce.item(), rel=1e-5)
    assert outcome.visits == 0
    bare = training(SPOF(epsilon=math.inf, constant=0.4, constant_at_inference=False), data)
    plain = training(NonPrivate(), data)
    assert torch.equal(bare.outcome().accuracy, plain.outcome().accuracy)


def test_the_environment_is_at_the_encoders_input_in_training_and_in_tests() -> None:
    run = training(sigma=5.0, seeds=(1,), schedule=VisitSchedule(epochs=20))
    seen = [run._nature.take(step) for step in range(200)]  # type: ignore[union-attr]
    assert torch.stack(seen).std().item() == pytest.approx(5.0, rel=0.05)
    assert not torch.equal(run.outcome().accuracy, training(seeds=(1,)).outcome().accuracy)
    assert torch.equal(run.outcome().accuracy, run.outcome().accuracy)


def test_every_epoch_visits_every_record_once_in_an_order_of_the_runs_own() -> None:
    run = training()
    first, second = run._ordered(0), run._ordered(1)
    rows, places = (order.view(12, 3, 2) for order in first)
    for r in range(3):
        for u in range(2):
            assert sorted(rows[:, r, u].tolist()) == list(range(12 * u, 12 * (u + 1)))
            assert (places[:, r, u] - rows[:, r, u]).unique().tolist() == [24 * r]
    assert not torch.equal(rows[:, 0], rows[:, 1])
    assert not torch.equal(first[0], second[0])


class EngineDraws:
    """The draws of the engine's plan, where the trainer expects those of its own."""

    distribution: str

    def __init__(self, key: Key, mechanism: Any) -> None:
        blocks = mechanism.plan([(CODES, N), (N, CODES)]).blocks
        self.key, self.positions = key, [block.first_position for block in blocks]
        self.distribution = "laplace" if mechanism.name == "laplace_sgd" else "gaussian"
        self.streams = self.roundings = [key.stream(Purpose.TABLES, 0)]

    def take(self, step: int) -> Draws:
        purpose = Purpose.LAPLACE if self.distribution == "laplace" else Purpose.NOISE
        values, bits = [], []
        step += 1  # the engine counts from 1
        for place, rows in zip(self.positions, (CODES, N), strict=True):
            kind: dict[str, Any] = {"position": place, "count": CODES * N}
            stream = self.key.stream(purpose, step)
            drawn = noise.lattice_draws(stream, distribution=self.distribution, **kind)
            rounded = noise.rounding_bits(self.key.stream(Purpose.ROUNDING, step), **kind)
            values.append(drawn.view(rows, -1).T.flatten())
            bits.append(rounded.view(rows, -1).T.flatten())
        return Draws(0, torch.cat(values), torch.cat(bits))


@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
def test_corrected_sgd_is_the_engines_run_with_its_noise(distribution: str) -> None:
    method = OutputSGD(epsilon=4.0, max_grad_norm=2.0, distribution=distribution)
    data = pooled(records())
    run = training(method, data, seeds=(5,))
    assert isinstance(run._rule, ParameterNoise)
    run._rule._ahead = EngineDraws(Key.from_unsafe_seed(5), method.mechanism)  # type: ignore[assignment]
    model = Single(run.weights.encoder[0, 0], run.weights.decoder[0, 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=None,
        mechanism=method.mechanism,
        unsafe_seed=5,
        sample_rate=1 / run.records_each,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    bound = 0
    for _ in range(20):
        visit = run._visit()
        x = visit.clean
        _, clean = Plain(NonPrivate()).direction(run.weights, visit)
        assert isinstance(clean, Gradients)
        bound += int(clean.norms(1 if distribution == "laplace" else 2).item() > 2.0)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(x), x, reduction="sum").backward()
        optimizer.step()
        run.step()
    torch.testing.assert_close(values(run)[0], model.values(), rtol=1e-5, atol=1e-5)
    assert bound == 20 if distribution == "laplace" else 0 < bound < 20


BAD: dict[str, Any] = {
    "NaN": lambda x: x.masked_fill(x > 0.9, math.nan),
    "above 1": lambda x: x + 0.5,
    "negative": lambda x: x - 0.5,
}


@pytest.mark.parametrize("name", BAD)
def test_records_that_no_sensitivity_holds_for_are_refused(name: str) -> None:
    good = records()
    for bad in (
        Records(BAD[name](good.train), good.test),
        Records(good.train, BAD[name](good.test)),
    ):
        with pytest.raises(InvalidInput, match="records"):
            training(SPOF(epsilon=1.0), bad)


def test_settings_that_do_not_fit_are_refused() -> None:
    good = records()
    with pytest.raises(InvalidInput, match="one user with FM"):
        training(FM(epsilon=1.0))
    with pytest.raises(InvalidInput, match="keys"):
        training(seeds=(1, 2), keys=[Key.fresh()])
    with pytest.raises(InvalidInput, match="seeds"):
        training(seeds=())
    with pytest.raises(InvalidInput, match="float32"):
        training(data=Records(good.train.double(), good.test))
    with pytest.raises(InvalidInput, match="records of each user"):
        training(data=Records(good.train, good.test[:, :0]))
    with pytest.raises(InvalidInput, match="shape"):
        training(data=Records(good.train, good.test[:1]))


@pytest.mark.parametrize("mode", ["published", "corrected"])
def test_kept_coefficients_serve_all_samples_of_a_record(mode: str) -> None:
    each = records()
    rows = torch.randint(0, 6, (2, 12), generator=torch.Generator().manual_seed(1))
    train = torch.stack([each.train[user, rows[user]] for user in range(2)])
    names = tuple(map(str, range(N)))
    data = UserTables(train, each.test, names, "generated", True, "public", (), rows)
    release_kind = {"release": "coefficients", "form": "printed"} if mode == "corrected" else {}
    kind: dict[str, Any] = {"noise_schedule": "once_per_record", **release_kind}
    run = training(SPOF(epsilon=50.0, mode=mode, **kind), data)  # type: ignore[arg-type]
    known, seen = torch.zeros(72, dtype=torch.bool), torch.zeros(72, 2 * N)
    while run.step_number < run.steps:
        run.step()
        state = run.state_dict()["rule"]
        now = torch.cat(state["coefficients"], 1)
        assert torch.equal(now[known], seen[known])
        known, seen = state["known"], now
    assert known.sum() == 3 * sum(len(of_user.unique()) for of_user in rows)
