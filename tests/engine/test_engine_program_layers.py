"""Layers of replayed steps: attention, biases, and what is asked about tensors and sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern.base.errors import DPKernError
from dpkern.engine.program import attention
from dpkern.engine.program.unchanged import Unchanged
from dpkern.ops import direct
from tests.engine.replayed_loops import STEPS, Loop, both, loop


class Attending(nn.Module):
    """Two attentions over the same positions; what a test may ask of the first one."""

    def __init__(self, dropout: float = 0.0, time_first: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=not time_first)
        self.again = nn.MultiheadAttention(8, 4, bias=False, batch_first=not time_first)
        self.head = nn.Linear(8, 3)
        self.time_first = time_first
        self.asked: dict[str, Any] = {"need_weights": False}
        self.crosses = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y.transpose(0, 1) if self.time_first else y
        y = y + self.attend(y, y * 2 if self.crosses else y, y, **self.asked)[0]
        y = y + self.again(y, y, y, need_weights=False)[0]
        y = y.transpose(0, 1) if self.time_first else y
        return self.head(y).mean(1)


def ask(**asked: Any) -> Callable[[Loop], None]:
    def change(run: Loop) -> None:
        run.module.asked = {"need_weights": False} | asked

    return change


def cross(run: Loop) -> None:
    run.module.crosses = True


def stop_training(run: Loop) -> None:
    run.module.attend.eval()


def freeze_output(run: Loop) -> None:
    run.module.attend.out_proj.weight.requires_grad_(False)


HIDDEN = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
QUESTIONS = {
    "a mask": ask(attn_mask=HIDDEN),
    "a causal mask": ask(attn_mask=HIDDEN, is_causal=True),
    "padding": ask(key_padding_mask=torch.zeros(8, 4, dtype=torch.bool)),
    "weights": ask(need_weights=True),
    "other keys": cross,
    "no dropout any more": stop_training,
    "a frozen projection": freeze_output,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_attention_that_changes_in_the_middle_gives_the_same_bits(name: str) -> None:
    torch.manual_seed(1)
    both(QUESTIONS[name], make=Attending)


@pytest.mark.parametrize("time_first", [False, True])
def test_attention_is_replayed(time_first: bool) -> None:
    run = both(make=lambda: Attending(time_first=time_first))
    assert run.replays >= STEPS - 3
    assert run.reasons[-1] == ""


def test_dropout_of_attention_draws_what_the_recorded_step_draws() -> None:
    run = both(make=lambda: Attending(dropout=0.5))
    assert run.replays >= STEPS - 3


def test_an_attention_that_does_not_look_at_its_mask_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_read", lambda _: attention._WANTED)
    with pytest.raises(AssertionError):
        both(QUESTIONS["a mask"], make=Attending)


class Normed(nn.Module):
    """RMS norms over one and over two dimensions, with and without a given epsilon."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.one = nn.RMSNorm(6)
        self.two = nn.RMSNorm([4, 6], eps=1e-3)
        self.head = nn.Linear(6, 3)
        self.turns = self.centres = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = F.layer_norm(y, (6,), self.one.weight, None) if self.centres else self.one(y)
        y = self.two(y.transpose(1, 2).contiguous().transpose(1, 2) if self.turns else y)
        return self.head(torch.tanh(y)).mean(1)


def other_epsilon(run: Loop) -> None:
    run.module.two.eps = 0.1


def turn(run: Loop) -> None:
    run.module.turns = True


def centre(run: Loop) -> None:
    run.module.centres = True


@pytest.mark.parametrize("change", [None, other_epsilon, turn, centre])
def test_rms_norm_is_replayed(change: Callable[[Loop], None] | None) -> None:
    run = both(change, make=Normed)
    assert run.replays > 2


class Shapes(nn.Module):
    """Linear layers whose biases are summed over few positions, over one, over many and in one
    column."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 7)
        self.column = nn.Linear(7, 1)
        self.wide = nn.Linear(1, 33)
        self.head = nn.Linear(33, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wide(torch.tanh(self.column(torch.tanh(self.one(x)))))
        return self.head(y.mean(1))


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 40])
def test_biases_are_summed_as_on_the_recorded_path(length: int) -> None:
    run = both(make=Shapes, length=length, steps=6)
    assert run.replays >= 3


def test_double_precision_is_replayed() -> None:
    class Wide(Shapes):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.double())

    run = both(make=lambda: Wide().double(), steps=6)
    assert run.replays >= 3


@pytest.mark.parametrize("name", ["head", "norm", "groups", "conv"])
def test_weights_changed_between_the_passes_are_refused(name: str) -> None:
    run = loop(True)
    run.train(5)
    x, y = next(run.batches())
    loss = F.cross_entropy(run.module(x), y)
    assert run.engine.capture.program.run.live
    with torch.no_grad():
        getattr(run.module, name).weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_was_recorded_is_cleared_after_replays() -> None:
    """A recorded step between replayed ones leaves no gradient and no count with parameters."""

    def twice(run: Loop) -> None:
        run.module.twice = not run.module.twice

    run = loop(True)
    for steps in (5, 1, 5):
        run.train(steps)
        twice(run)
    capture = run.engine.capture
    assert not any(slot.arrivals for slot in capture.slots)
    run.module.twice = False
    run.train(5)
    assert not capture.recorded
    assert not any(slot.uses or slot.indirect for slot in capture.slots)


def moved(p: nn.Parameter) -> None:
    p.data = p.data.clone()


def turned(p: nn.Parameter) -> None:
    p.data = torch.as_strided(p.data, (4, 4), (1, 4))


def widened(p: nn.Parameter) -> None:
    p.data = p.data.double()


def cut(p: nn.Parameter) -> None:
    p.data = p.data[:3]


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("change", [moved, turned, widened, cut, lambda p: p.requires_grad_(False)])
def test_tensors_that_change_are_noticed(change: Callable[[nn.Parameter], Any], seen: bool) -> None:
    tensors = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    unchanged = Unchanged(tensors)
    if not seen:
        unchanged._seen = None
    with torch.no_grad():
        tensors[1].mul_(2)
    x = torch.ones(2, 4)
    assert unchanged.holds()
    assert unchanged.holds_beside(x, (2, 4), torch.float32, False)
    change(tensors[1])
    assert not unchanged.holds()
    assert not unchanged.holds_beside(x, (2, 4), torch.float32, False)


OPERANDS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x[:1],
    "dimensions": lambda x: x[0],
    "dtype": Tensor.double,
    "integers": Tensor.int,
    "a gradient": lambda x: x.clone().requires_grad_(),
    "a parameter": nn.Parameter,
    "a subclass": lambda x: x.as_subclass(type("Own", (Tensor,), {})),
    "a device": lambda x: x.to("meta"),
    "no tensor": Tensor.tolist,
}


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("name", OPERANDS)
def test_other_operands_are_noticed(name: str, seen: bool) -> None:
    unchanged = Unchanged([nn.Parameter(torch.ones(4, 4))])
    if not seen:
        unchanged._seen = None
    x = torch.ones(2, 4)
    trained = x.clone().requires_grad_() * 1
    assert unchanged.holds_beside(x, (2, 4), torch.float32, False)
    assert unchanged.holds_beside(trained, (2, 4), torch.float32, True)
    assert not unchanged.holds_beside(trained, (2, 4), torch.float32, False)
    assert not unchanged.holds_beside(OPERANDS[name](x), (2, 4), torch.float32, False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 7, 8, 16, 100_002])
def test_sums_that_are_not_finite_are_found(value: float, place: int) -> None:
    calls = direct.replayed_step(torch.float32, exact=False)
    calls.begin(1, 2)
    numbers = torch.full((100_003,), 3e38)
    assert calls.is_finite(numbers.data_ptr(), len(numbers))
    numbers[place] = value
    assert not calls.is_finite(numbers.data_ptr(), len(numbers))


class Frozen(nn.Module):
    """Layers of each kind whose biases are frozen before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.LayerNorm([4, 6])
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.groups = nn.GroupNorm(2, 4)
        self.head = nn.Linear(6, 3)
        for layer in self.children():
            layer.bias.requires_grad_(False)
            with torch.no_grad():
                layer.bias.normal_()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.groups(self.conv(self.norm(self.first(x)))))
        return self.head(y).mean(1)


def replace_bias(run: Loop) -> None:
    run.module.conv.bias = nn.Parameter(torch.ones(4), requires_grad=False)


def drop_bias(run: Loop) -> None:
    run.module.first.bias = None


def move_bias(run: Loop) -> None:
    for layer in (run.module.head, run.module.norm):
        layer.bias.data = layer.bias.data.clone() + 1


def write_bias(run: Loop) -> None:
    with torch.no_grad():
        run.module.head.bias.add_(1)


def freeze_more(run: Loop) -> None:
    run.module.norm.weight.requires_grad_(False)


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
@pytest.mark.parametrize(
    "change", [None, replace_bias, drop_bias, move_bias, write_bias, freeze_more]
)
def test_frozen_biases_are_replayed(change: Callable[[Loop], None] | None, arithmetic: str) -> None:
    def publicly(run: Loop) -> None:
        assert change is not None
        with run.engine.public():  # frozen values may come from public data alone
            change(run)

    made = publicly if change is not None else None
    run = both(made, make=Frozen, arithmetic=arithmetic, steps=STEPS + 3)
    assert run.replays >= (STEPS if change is None else 5)


def test_biases_that_are_frozen_during_training_are_replayed() -> None:
    def freeze_biases(run: Loop) -> None:
        for layer in (run.module.first, run.module.norm, run.module.conv, run.module.head):
            layer.bias.requires_grad_(False)

    def thaw(run: Loop) -> None:
        run.module.head.bias.requires_grad_(True)

    for change in (freeze_biases, thaw):
        runs = []
        for replayed in (True, False):
            run = loop(replayed)
            if change is thaw:
                freeze_biases(run)
            run.train(12, change, at=5)
            runs.append(run)
        assert runs[0].reasons[-1] == ""
        assert all(map(torch.equal, runs[0].weights, runs[1].weights))


def test_a_frozen_bias_of_another_shape_is_refused() -> None:
    run = loop(True, make=Frozen)
    run.train(6)
    with run.engine.public():
        run.module.head.bias = nn.Parameter(torch.ones(2), requires_grad=False)
    with pytest.raises((RuntimeError, DPKernError), match=r"shape|size"):
        run.train(1)
