"""Replayed steps: the same bits as recorded ones, in loops that change everything in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpkern
from benchmarks.step_cases import _loader
from benchmarks.step_models import TASKS
from dpkern.base.errors import DPKernError
from dpkern.base.phase import CLIP, listening
from dpkern.engine.parameter import PrivateParameter
from dpkern.engine.program.flat import Flat
from dpkern.engine.program.packed_update import PackedUpdate
from dpkern.engine.program.unchanged import Unchanged
from tests.engine.replayed_loops import STEPS, Loop, both, loop


def test_loop_without_change_is_replayed() -> None:
    run = both()
    assert run.replays >= STEPS - 3
    assert run.engine.adapter.packed.replays >= STEPS - 3
    assert run.reasons[-1] == ""


ARITHMETICS = ("float", "exact")


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", ["tiny", "narrow", "mlp", "lenet", "resnet", "encoder"])
def test_benchmark_models_are_replayed(name: str, arithmetic: str) -> None:
    small = TASKS[name].small
    assert small is not None
    task = replace(small, batch=8)
    weights = []
    for replayed in (True, False):
        torch.manual_seed(0)
        model = task.model()
        engine = dpkern.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data_loader=_loader(task),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sampling="fixed",
            unsafe_seed=1,
            arithmetic=arithmetic,
        )
        engine.capture.guard._occasions.gap = 1 << 60
        engine.capture.program.enabled = replayed
        criterion = nn.CrossEntropyLoss()
        for _ in range(3):
            for x, y in loader:
                task.loss(criterion, model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        program = engine.capture.program
        if replayed:
            assert (program.replays, program.reason) >= (8, ""), program.reason
            assert engine.adapter.packed.replays >= 8, engine.adapter.packed.reason
        weights.append([p.detach().clone().as_subclass(Tensor) for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def set_flag(name: str) -> Callable[[Loop], None]:
    def change(run: Loop) -> None:
        setattr(run.module, name, True)

    return change


def freeze(run: Loop) -> None:
    run.module.extra.weight.requires_grad_(False)


def add_hook(run: Loop) -> None:
    run.module.first.register_forward_hook(lambda m, a, out: out * 0.5)


def evaluate(run: Loop) -> None:
    run.module.eval()
    with torch.no_grad():
        run.module(torch.randn(3, 4, 5))
    run.module.train()


def learning_rate(run: Loop) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.01


def momentum(run: Loop) -> None:
    run.optimizer.param_groups[0]["momentum"] = 0.5


def no_momentum(run: Loop) -> None:
    run.optimizer.param_groups[0]["momentum"] = 0.0


def weight_decay(run: Loop) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.1


def split_groups(run: Loop) -> None:
    group = run.optimizer.param_groups[0]
    moved = group["params"].pop()
    run.optimizer.param_groups.append({**group, "params": [moved], "lr": 0.02})


def load_weights(run: Loop) -> None:
    state = {k: v.clone() for k, v in run.module.state_dict().items()}
    run.module.load_state_dict(state)


def load_optimizer(run: Loop) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def forget_momentum(run: Loop) -> None:
    run.optimizer.state.clear()


def move_buffer(run: Loop) -> None:
    for state in run.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].clone()


def move_parameter(run: Loop) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        run.module.first.weight.data = run.module.first.weight.data.clone()


def bound(run: Loop) -> None:
    run.optimizer.max_grad_norm = 0.3


def noise(run: Loop) -> None:
    run.optimizer.noise_multiplier = 0.7


def two_losses(run: Loop) -> None:
    run.losses = 2


def retain(run: Loop) -> None:
    run.retains = True


def optimizer_hook(run: Loop) -> None:
    run.optimizer.register_step_post_hook(lambda *_: None)


def public_pass(run: Loop) -> None:
    with run.engine.public():
        run.module(torch.randn(2, 4, 5)).square().mean().backward()


CHANGES = {
    "a branch is skipped": set_flag("skips"),
    "a layer is used twice": set_flag("twice"),
    "a segment is checkpointed": set_flag("again"),
    "an activation is written in place": set_flag("edits"),
    "a parameter is frozen": freeze,
    "a forward hook": add_hook,
    "an evaluation pass": evaluate,
    "another learning rate": learning_rate,
    "another momentum": momentum,
    "no momentum": no_momentum,
    "weight decay": weight_decay,
    "other groups": split_groups,
    "weights are loaded": load_weights,
    "optimizer state is loaded": load_optimizer,
    "momentum is forgotten": forget_momentum,
    "momentum moves": move_buffer,
    "a parameter moves": move_parameter,
    "parameters move in every forward pass": set_flag("moves"),
    "another bound": bound,
    "another noise": noise,
    "two losses over one pass": two_losses,
    "the graph is retained": retain,
    "a hook of the optimizer": optimizer_hook,
    "a public pass": public_pass,
}


class MaxNorm(nn.Linear):
    """Bounds its rows before each use, by setting its weight's data."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


def test_weight_set_in_every_forward_pass_is_recorded() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), MaxNorm(6, 3))

    assert both(replays=False, make=make).replays == 0


class Masked(nn.Module):
    """Its first weight is an expression of a parameter where it is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(20, 6), nn.Linear(6, 3)
        self.register_buffer("mask", (torch.arange(20) % 3 > 0).float())
        self.masked = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight * self.mask if self.masked else self.first.weight
        return self.head(F.relu(F.linear(x.flatten(1), weight, self.first.bias)))


def test_no_use_in_front_of_those_of_a_program_is_lost() -> None:
    run = both(set_flag("masked"), make=Masked, steps=14)
    assert run.reasons[-1] == "linear uses an expression of parameters, first.weight"


def test_parameters_that_are_told_again_to_need_gradients_stay_what_they_are() -> None:
    run = both(lambda run: run.module.requires_grad_(True))
    assert all(type(p) is PrivateParameter for p in run.module.parameters())
    assert run.reasons[-1] == ""


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", CHANGES)
def test_change_in_the_middle_gives_the_same_bits(name: str, arithmetic: str) -> None:
    both(CHANGES[name], arithmetic=arithmetic)


def test_back_from_two_uses_to_one() -> None:
    def once(run: Loop) -> None:
        run.module.twice = False

    runs = []
    for replayed in (True, False):
        run = loop(replayed)
        run.module.twice = True
        run.train(10, once, at=4)
        runs.append(run)
    assert runs[0].replays > 0
    assert runs[0].reasons[3] == ""
    assert runs[0].reasons[4] != ""
    assert all(map(torch.equal, runs[0].weights, runs[1].weights))


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_layer_with_a_frozen_bias_is_used_twice(arithmetic: str) -> None:
    def make() -> nn.Module:
        shared = nn.Linear(5, 5)
        shared.bias.requires_grad_(False)
        return nn.Sequential(shared, nn.ReLU(), shared, nn.Flatten(), nn.Linear(20, 3))

    assert both(make=make, arithmetic=arithmetic).reasons[-1] == ""


def test_unfreezing_a_parameter() -> None:
    def thaw(run: Loop) -> None:
        run.module.extra.weight.requires_grad_(True)

    runs = []
    for replayed in (True, False):
        run = loop(replayed)
        freeze(run)
        run.train(10, thaw, at=5)
        runs.append(run)
    assert all(map(torch.equal, runs[0].weights, runs[1].weights))


LOOPS: dict[str, dict[str, Any]] = {
    "Poisson batches of every size": {"sampling": "poisson", "steps": 24},
    "empty draws": {"sampling": "poisson", "rows": 12, "batch": 2, "steps": 40},
    "physical batches": {"max_physical_batch_size": 3, "steps": 24},
    "a smaller last batch": {"sampling": "shuffled", "rows": 60, "steps": 17},
    "a sample that is not finite": {"nan": True, "steps": 16},
    "automatic clipping": {"clipping": "automatic"},
    "without noise": {"noise_multiplier": 0.0},
    "plain SGD": {"numbers": {"lr": 0.1}},
    "Nesterov": {"numbers": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "Adam": {"optimizer": torch.optim.Adam, "numbers": {"lr": 0.01}},
    "an optimizer without a rule": {"optimizer": torch.optim.Adagrad, "numbers": {"lr": 0.01}},
    "two groups": {
        "groups": lambda net: [
            {"params": list(net.head.parameters()), "lr": 0.01},
            {"params": [p for n, p in net.named_parameters() if "head" not in n]},
        ]
    },
    "no budget": {"keep_budget": 0},
}


FLOAT_ALONE = ("automatic clipping", "without noise")
"""Loops without integers that are made in place."""


@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [
        (n, a)
        for n in LOOPS
        for a in ARITHMETICS
        if (n, a) not in {(f, "exact") for f in FLOAT_ALONE}
    ],
)
def test_other_loops_give_the_same_bits(name: str, arithmetic: str) -> None:
    options = dict(LOOPS[name])
    steps = options.pop("steps", STEPS)
    run = both(steps=steps, arithmetic=arithmetic, **options)
    assert run.replays > 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"clipping": "per_layer", "arithmetic": "float"}, "several clip groups of floats"),
        ({"arithmetic": "exact", "clipping": "automatic"}, "gradients that are written out"),
    ],
)
def test_what_is_not_held_is_recorded_and_says_why(options: dict[str, Any], why: str) -> None:
    run = both(replays=False, **options)
    assert why in run.reasons[-1]


class Long(nn.Sequential):
    """Linear layers over many positions, whose gradients are smaller than their operands."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out.mean(1)


def test_gradients_kept_for_the_sum_are_replayed() -> None:
    run = both(keep_budget=10.0, make=Long, length=128)
    assert any(site.kept for site in run.engine.capture.program.flat.sites)


def test_operand_changed_after_the_backward_pass_is_refused() -> None:
    run = loop(True)
    run.train(5)
    held: list[Tensor] = []

    def edit() -> None:
        program = run.engine.capture.program
        assert program.run.live
        held.append(next(h[0] for h in program.run.held if h and h[0] is not None))
        with torch.no_grad():
            held[0].mul_(2)

    run.between = edit
    steps = run.engine.adapter.dp_step.steps
    with pytest.raises(DPKernError, match="changed in place"):
        run.train(1)
    assert run.engine.adapter.dp_step.steps == steps


def test_ordinary_gradient_is_found_in_a_replayed_step() -> None:
    run = loop(True)
    run.train(5)

    def leak() -> None:
        assert run.engine.capture.program.run.live
        with torch._C.DisableTorchFunctionSubclass():
            run.module.head.weight.grad = torch.ones_like(run.module.head.weight)

    run.between = leak
    with pytest.raises(DPKernError, match="no ordinary gradient"):
        run.train(1)


def test_backward_pass_of_earlier_samples_is_refused() -> None:
    run = loop(True)
    run.train(5)
    batches = run.batches()
    x, y = next(batches)
    old = F.cross_entropy(run.module(x), y)
    run.optimizer.zero_grad()
    old.backward()
    run.optimizer.step()
    x, y = next(batches)
    other = F.cross_entropy(run.module(x), y)
    del other
    with pytest.raises((DPKernError, RuntimeError)):
        old.backward()


def test_who_listens_is_told_the_phase_of_replayed_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    own = Flat.close

    def close(flat: Flat, *given: Any, **named: Any) -> int:
        seen.append(running())
        return own(flat, *given, **named)

    monkeypatch.setattr(Flat, "close", close)
    with listening() as running:
        loop(True).train(6)
    assert seen
    assert set(seen) == {CLIP}


def test_create_graph_is_refused_in_a_replayed_step() -> None:
    run = loop(True)
    run.train(5)
    x, y = next(run.batches())
    with pytest.raises(DPKernError, match="create_graph"):
        F.cross_entropy(run.module(x), y).backward(create_graph=True)


@pytest.mark.parametrize(("arithmetic", "streams_each"), [("float", 2), ("exact", 1)])
def test_noise_is_never_used_twice(arithmetic: str, streams_each: int) -> None:
    run = loop(True, arithmetic=arithmetic)
    streams = []
    step = run.engine.adapter.dp_step
    own = step.key.packed_stream

    def packed_stream(purpose: Any, number: int, *more: int) -> Any:
        streams.append((purpose, number, *more))
        return own(purpose, number, *more)

    step.key.packed_stream = packed_stream
    run.train(8)
    assert run.replays > 3
    assert len(set(streams)) == len(streams) == 8 * streams_each  # noise, and rounding of floats
    assert step.steps == 8
    assert step.ledger.steps == 8


def test_a_key_that_looks_at_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of both ways fails where a program replays what has changed."""
    monkeypatch.setattr(PackedUpdate, "_take_numbers", lambda self: True)
    with pytest.raises(AssertionError):
        both(CHANGES["another learning rate"])


@pytest.mark.parametrize("name", ["a parameter moves", "parameters move in every forward pass"])
def test_a_program_that_does_not_look_where_parameters_are_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unchanged, "holds", lambda self: True)
    monkeypatch.setattr(Unchanged, "holds_beside", lambda self, x, shape, *_: x.shape == shape)
    with pytest.raises(AssertionError):
        both(CHANGES[name])
