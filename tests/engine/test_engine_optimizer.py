"""The private optimizer: the same object, torch's state, and the gradient of ``DPStep``."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dpkern import DPStep
from dpkern.base.errors import DPKernError, InvalidInput, PrivacyError
from dpkern.ops import testing
from dpkern.privacy.mechanisms import DPSGD
from tests.engine.engine_bare import (
    BATCH,
    FUSED,
    NOISY,
    OPTIMIZERS,
    PLAIN,
    Ordinary,
    Run,
    batch,
    network,
)


def assert_state_equal(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert list(ours["state"][index]) == list(state)
        for name, value in state.items():
            got = ours["state"][index][name]
            assert type(got) is type(value)
            assert (got.shape, got.dtype, got.device) == (value.shape, value.dtype, value.device)
            testing.assert_close(f"{name}[{index}]", got.double(), value.double(), tolerance)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_noise_it_is_torch(kind: str) -> None:
    ours, theirs = Run(kind), Ordinary(kind)
    ours.train(1, 2, 3)
    theirs.train(1, 2, 3)
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        testing.assert_close(kind, p.detach(), q.detach(), 1e-4)
        assert p.grad is None
    assert_state_equal(ours.optimizer.state_dict(), theirs.optimizer.state_dict(), 1e-3)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_which_optimizers_are_fused(kind: str) -> None:
    run = Run(kind)
    own = run.adapter._own_step
    calls: list[int] = []
    run.adapter._own_step = lambda: (calls.append(1), own())
    run.train(1)
    assert len(calls) == (kind not in FUSED)


@pytest.mark.filterwarnings("ignore:The optimizer holds the state of earlier steps")
@pytest.mark.parametrize("kind", ["momentum", "adam", "adam fused", "rmsprop"])
def test_state_moves_to_plain_torch_and_back(kind: str) -> None:
    ours, theirs = Run(kind), Ordinary(kind)
    ours.train(1, 2)
    theirs.model.load_state_dict(ours.model.state_dict())
    theirs.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    again = Run(kind)
    theirs.train(3)
    again.model.load_state_dict(theirs.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(theirs.optimizer.state_dict()))
    again.train(4)
    ours.train(3, 4)
    for p, q in zip(again.model.parameters(), ours.model.parameters(), strict=True):
        testing.assert_close(kind, p.detach(), q.detach(), 1e-4)
    assert_state_equal(again.optimizer.state_dict(), ours.optimizer.state_dict(), 1e-3)


@pytest.mark.parametrize("kind", ["momentum", "adam", "rmsprop"])
@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_the_rule_sees_the_private_gradient(kind: str, arithmetic: str) -> None:
    mechanism = DPSGD(noise_multiplier=1.0, max_grad_norm=0.5, arithmetic=arithmetic)
    run = Run(kind, mechanism)
    twin = copy.deepcopy(run.model)
    own = OPTIMIZERS[kind](list(twin.parameters()))
    step = DPStep(
        mechanism, list(twin.parameters()), expected_batch_size=BATCH, sample_rate=0.1,
        unsafe_seed=3,
    )  # fmt: skip
    for seed in (1, 2):
        x, y = batch(seed)
        rows: list[list[torch.Tensor]] = []
        for i in range(BATCH):
            twin.zero_grad()
            nn.functional.cross_entropy(twin(x[i : i + 1]), y[i : i + 1]).backward()
            rows.append([p.grad.clone() for p in twin.parameters() if p.grad is not None])
        step.add([torch.stack(each) for each in zip(*rows, strict=True)])
        for p, g in zip(twin.parameters(), step.finish() or [], strict=True):
            p.grad = g
        own.step()
    run.train(1, 2)
    assert run.step.steps == 2
    for p, q in zip(run.model.parameters(), twin.parameters(), strict=True):
        # Adam divides by the root of tiny numbers: a lattice step may tip either way. The engine's
        # integers are products of vectors, further from the gradient than those of its entries.
        testing.assert_close(kind, p.detach(), q.detach(), 2e-2 if arithmetic == "float" else 2e-3)


def test_parameters_at_different_counts_share_a_group() -> None:
    ours, theirs = Run("adam"), Ordinary("adam")
    for run in (ours, theirs):
        run.train(1)
        state = run.optimizer.state
        del state[next(iter(run.model.parameters()))]
        run.train(2)
    assert_state_equal(ours.optimizer.state_dict(), theirs.optimizer.state_dict(), 1e-3)


def test_groups_have_their_own_numbers() -> None:
    def grouped(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": params[2:], "lr": 0.5, "momentum": 0.5}, {"params": params[:2]}]
        return torch.optim.SGD(groups, lr=0.1)

    OPTIMIZERS["grouped"] = grouped
    ours, theirs = Run("grouped"), Ordinary("grouped")
    del OPTIMIZERS["grouped"]
    ours.train(1, 2)
    theirs.train(1, 2)
    assert_state_equal(ours.optimizer.state_dict(), theirs.optimizer.state_dict(), 1e-3)


@pytest.mark.parametrize("kind", ["sgd", "rmsprop"])
@pytest.mark.parametrize("before", [True, False])
def test_learning_rate_schedulers(kind: str, before: bool) -> None:
    run = Run(kind)
    run.adapter.detach()
    schedule = None
    if before:
        schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
    run.adapter.attach()
    if schedule is None:
        schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
    theirs = Ordinary(kind)
    other = torch.optim.lr_scheduler.StepLR(theirs.optimizer, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            run.train(seed)
            schedule.step()
            theirs.train(seed)
            other.step()
    assert schedule.get_last_lr() == other.get_last_lr()
    for p, q in zip(run.model.parameters(), theirs.model.parameters(), strict=True):
        testing.assert_close(kind, p.detach(), q.detach(), 1e-4)


@pytest.mark.parametrize("kind", ["sgd", "rmsprop"])
def test_hooks_and_closures_run_once(kind: str) -> None:
    run = Run(kind)
    seen: list[str] = []
    run.optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    def closure() -> str:
        assert torch.is_grad_enabled()
        seen.append("closure")
        run.optimizer.zero_grad()
        run.backward(1)
        return "loss"

    before = run.values()
    with torch.no_grad():
        assert run.optimizer.step(closure) == "loss"
    assert sorted(seen) == ["closure", "post", "pre"]
    assert not torch.equal(before[0], run.values()[0])


@pytest.mark.parametrize("kind", ["sgd", "rmsprop"])
def test_hooks_see_the_noisy_gradient(kind: str) -> None:
    run = Run(kind, NOISY)
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.append(all(p.grad is not None for p in run.model.parameters()))

    def forget(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p in run.model.parameters():
            assert p.grad is not None
            p.grad.zero_()

    run.optimizer.register_step_pre_hook(look)
    run.optimizer.register_step_pre_hook(forget)
    run.optimizer.register_step_post_hook(look)
    before = run.values()
    run.train(1)
    assert seen == [True, True]
    assert all(map(torch.equal, run.values(), before))
    assert all(p.grad is None for p in run.model.parameters())


def test_physical_batches_add_up_and_only_the_last_one_updates() -> None:
    split, whole = Run("momentum", NOISY), Run("momentum", NOISY)
    whole.adapter.begin_batch(9)
    parts = [batch(1, 4), batch(2, 5)]
    x, y = (torch.cat(part) for part in zip(*parts, strict=True))
    nn.functional.cross_entropy(whole.model(x), y).backward()
    whole.optimizer.step()
    before = split.values()
    for k, (x, y) in enumerate(parts):
        split.adapter.begin_batch(len(x), first=k == 0, final=k == 1)
        split.optimizer.zero_grad()
        nn.functional.cross_entropy(split.model(x), y).backward()
        if k == 0:
            split.optimizer.step()
            split.optimizer.zero_grad()
            assert split.step.steps == 0
            assert all(map(torch.equal, split.values(), before))
            assert not split.optimizer.state
    split.optimizer.step()
    assert split.step.steps == 1
    for a, b in zip(split.values(), whole.values(), strict=True):
        testing.assert_close("parameters", a, b, 1e-3)


def test_zero_grad_forgets_the_current_samples_only() -> None:
    run = Run(mechanism=PLAIN)
    before = run.values()
    run.backward(1)
    run.optimizer.zero_grad()
    run.optimizer.step()
    assert all(map(torch.equal, run.values(), before))
    assert run.step.steps == 1


def test_an_empty_batch_releases_noise() -> None:
    run = Run(mechanism=NOISY)
    before = run.values()
    run.adapter.begin_batch(0)
    run.optimizer.zero_grad()
    run.model(torch.empty(0, 4)).sum().backward()
    run.optimizer.step()
    assert run.step.steps == 1
    assert not torch.equal(run.values()[0], before[0])


def test_public_gradients_join_without_clipping() -> None:
    for kind in ("momentum", "rmsprop"):
        ours, theirs = Run(kind), Ordinary(kind)
        for seed in (1, 2):
            ours.optimizer.zero_grad()
            with ours.capture.public():
                (0.5 * sum(p.square().sum() for p in ours.model.parameters())).backward()
            ours.backward(seed)
            ours.optimizer.step()
            x, y = batch(seed)
            theirs.optimizer.zero_grad()
            (0.5 * sum(p.square().sum() for p in theirs.model.parameters())).backward()
            nn.functional.cross_entropy(theirs.model(x), y).backward()
            theirs.optimizer.step()
        for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            testing.assert_close(kind, p.detach(), q.detach(), 1e-4)
        assert_state_equal(ours.optimizer.state_dict(), theirs.optimizer.state_dict(), 1e-3)


@pytest.mark.parametrize("kind", ["sgd", "adam fused", "rmsprop"])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_gradient_scaler_never_skips(kind: str, explicit: bool) -> None:
    mechanism = DPSGD(noise_multiplier=2.0**-4, max_grad_norm=0.1, arithmetic="float")
    scaled, plain = Run(kind, mechanism), Run(kind, mechanism)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for seed in (1, 2, 3):
        x, y = batch(seed)
        scaled.optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(scaled.model(x), y)).backward()
        if explicit:
            scaler.unscale_(scaled.optimizer)
        scaler.step(scaled.optimizer)
        scaler.update()
        plain.train(seed)
    assert scaler.get_scale() == 1024.0
    assert scaled.step.steps == 3
    for p, q in zip(scaled.model.parameters(), plain.model.parameters(), strict=True):
        testing.assert_close(kind, p.detach(), q.detach(), 2e-2)
    scaled.optimizer.zero_grad()
    scaler.scale(scaled.model(torch.full((2, 4), math.nan)).sum()).backward()
    scaler.step(scaled.optimizer)
    scaler.update()
    assert (scaled.step.steps, scaled.step.nonfinite) == (4, 2)
    ordinary = Ordinary("sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(ordinary.model(torch.full((2, 4), math.nan)).sum()).backward()
    scaler.step(ordinary.optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_half_precision_and_strided_parameters_take_the_unfused_way() -> None:
    model = network().to(torch.bfloat16)
    run = Run("momentum", model=model)
    x, y = batch(1)
    nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
    run.optimizer.step()
    assert run.step.steps == 1
    strided = nn.Sequential(nn.Linear(4, 3))
    strided[0].weight = nn.Parameter(torch.randn(4, 3).t())
    run = Run("momentum", model=strided)
    run.backward(1)
    before = strided[0].weight.detach().clone()
    run.optimizer.step()
    assert not torch.equal(strided[0].weight.detach(), before)
    assert strided[0].weight.stride() == (1, 3)


def test_noise_and_bound_may_be_set_like_a_learning_rate() -> None:
    run = Run(mechanism=NOISY)
    assert (run.optimizer.noise_multiplier, run.optimizer.max_grad_norm) == (1.0, 0.5)
    run.train(1)
    run.optimizer.noise_multiplier = 3.0
    run.optimizer.max_grad_norm = 0.25
    run.train(2)
    assert run.step.plan.scales[0] == pytest.approx(0.75)
    assert len(run.step.ledger.state_dict()["entries"]) == 2
    run.optimizer.noise_multiplier = -1.0
    run.backward(3)
    with pytest.raises(InvalidInput, match="noise_multiplier"):
        run.optimizer.step()
    assert run.step.steps == 2
    run.optimizer.noise_multiplier = 3.0
    run.optimizer.step()
    assert run.step.steps == 3


def test_frozen_parameters_keep_their_values() -> None:
    run = Run("adam", NOISY)
    run.train(1)
    frozen = run.model[0].weight  # type: ignore[index]
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    run.train(2)
    assert torch.equal(frozen.detach(), before)


def test_detach_gives_the_optimizer_back() -> None:
    run = Run("adam fused", NOISY)
    run.train(1)
    run.adapter.detach()
    run.capture.detach()
    assert not {"step", "zero_grad", "noise_multiplier"} & set(run.optimizer.__dict__)
    assert run.optimizer._step_supports_amp_scaling
    run.train(2)
    assert run.step.steps == 1
    assert float(run.optimizer.state_dict()["state"][0]["step"]) == 2


def foreign() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam"),
        (lambda p: "sgd", "str"),
        (lambda p: torch.optim.SGD(p[1:], lr=0.1), "0.weight"),
        (lambda p: torch.optim.SGD([*p, nn.Parameter(torch.zeros(2))], lr=0.1), "1 others"),
        (lambda p: Run().optimizer, "another make_private"),
    ],
    ids=["lbfgs", "sparse", "text", "missing", "foreign", "twice"],
)
def test_refused_optimizers(made: Callable[..., Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as raised:
        Run(made)
    assert raised.value.name == "optimizer"


def stepped_twice(run: Run) -> None:
    run.adapter.begin_batch(BATCH)
    run.train(1)
    run.train(1)


def grown(run: Run) -> None:
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    run.train(1)


def accumulated(run: Run) -> None:
    run.adapter.begin_batch(BATCH)
    run.backward(1)
    run.adapter.begin_batch(BATCH)


def half_a_batch(run: Run) -> None:
    run.adapter.begin_batch(BATCH, final=False)
    run.train(1)
    run.adapter.begin_batch(BATCH)


def bad_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = math.nan
    run.train(1)


@pytest.mark.parametrize(
    ("act", "error", "steps"),
    [
        (stepped_twice, PrivacyError, 1),
        (grown, PrivacyError, 0),
        (accumulated, PrivacyError, 0),
        (half_a_batch, PrivacyError, 0),
        (bad_rate, InvalidInput, 0),
    ],
)
def test_what_would_be_wrong_is_refused(
    act: Callable[[Run], None], error: type[DPKernError], steps: int
) -> None:
    run = Run(mechanism=NOISY)
    with pytest.raises(error):
        act(run)
    assert run.step.steps == run.step.ledger.steps == steps
