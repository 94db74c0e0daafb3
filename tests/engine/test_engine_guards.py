"""What the capture refuses, and what it must not refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpkern.base.errors import InvalidInput, PrivacyError, UnsupportedModule
from dpkern.engine import layers  # noqa: F401  (registers the rules)
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums
from dpkern.ops import clip
from tests.engine.engine_oracle import (
    Op,
    agree,
    check,
    draw,
    make,
    plan_for,
    reference_gradients,
    run,
    total,
    truth,
)

B = 4


def step(module: nn.Module, *inputs: Tensor) -> None:
    run(module, inputs, plan_for(module))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def time_first(m: nn.Module, x: Tensor) -> Tensor:
    h = F.linear(x, m.w).transpose(0, 1)
    return F.linear(torch.tanh(h), m.v).transpose(0, 1)


def raw_time_first(m: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x.transpose(0, 1), m.w).transpose(0, 1)


MIXING: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "time-first": time_first,
    "time-first-input": raw_time_first,
    "mean": lambda m, x: F.linear(F.linear(x, m.w) - F.linear(x, m.w).mean(0), m.v),
    "mean-of-the-last-layer": lambda m, x: (lambda h: h - h.mean(0))(F.linear(x, m.w)),
    "neighbours": lambda m, x: F.linear(x, m.w) + F.linear(x, m.w).roll(1, 0),
    "batch-statistics": lambda m, x: F.batch_norm(
        F.linear(x, m.w).mean(1), None, None, training=True
    ),
    "attention-over-samples": lambda m, x: F.linear(
        (lambda h: (h @ h.t()).softmax(-1) @ h)(F.linear(x.mean(1), m.w)), m.v
    ),
    "attention-with-the-batch-second": lambda m, x: F.linear(
        (lambda h: (h @ h.mT).softmax(-1) @ h)(F.linear(x, m.w).transpose(0, 1)).transpose(0, 1),
        m.v,
    ),
    "folded-the-wrong-way": lambda m, x: (
        F.linear(F.linear(x, m.w).transpose(0, 1).flatten(0, 1), m.v)
        .unflatten(0, (x.shape[1], -1))
        .transpose(0, 1)
    ),
    "shared-by-the-batch": lambda m, x: x @ F.linear(x.mean(1), m.w).mean(0).diag(),
    "input-mean": lambda m, x: F.linear(x - x.mean(0), m.w),
    "input-scale": lambda m, x: F.linear(x, m.w * x.std()),
    "frozen-layers-before": lambda m, x: F.linear(
        F.batch_norm(x.mean(1), None, None, training=True), m.w
    ),
    "elementwise": lambda m, x: (F.linear(x, m.w).transpose(0, 1) * m.w[0]).transpose(0, 1),
}


@pytest.mark.parametrize("time", [3, B, 2 * B], ids=["T", "T-is-B", "T-is-2B"])
@pytest.mark.parametrize("function", MIXING.values(), ids=MIXING)
def test_samples_that_mix_are_found(function: Callable[..., Tensor], time: int) -> None:
    module = make(lambda: Op(function, w=(5, 5), v=(5, 5))).double()
    with pytest.raises(UnsupportedModule):
        step(module, draw(B, time, 5))


def test_the_finding_names_parameter_and_operation() -> None:
    module = make(lambda: Op(time_first, w=(5, 5), v=(5, 5))).double()
    with pytest.raises(UnsupportedModule, match="v in linear"):
        step(module, draw(B, B, 5))


def test_mixing_behind_zero_weights_is_found_later() -> None:
    module = make(lambda: Op(time_first, w=(5, 5), v=(5, 5))).double()
    stack = nn.Sequential(module, nn.Linear(5, 2).double())
    nn.init.zeros_(stack[1].weight)
    step(stack, draw(B, B, 5))  # only the head has a gradient
    capture = Capture(stack)
    capture.attach()
    stack(draw(B, B, 5))
    with torch.no_grad():
        nn.init.normal_(stack[1].weight)
    with pytest.raises(UnsupportedModule, match="v in linear"):
        stack(draw(B, B, 5))
    capture.detach()


def test_zero_weights_are_no_obstacle() -> None:
    module = make(lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))).double()
    nn.init.zeros_(module[2].weight)
    x = draw(B, 5)
    for _ in range(2):  # the second time behind weights that are no longer zero
        check(module, (x,))
        nn.init.normal_(module[2].weight)


def test_an_activation_that_is_off_for_the_last_sample_is_no_obstacle() -> None:
    module = make(lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))).double()
    x = draw(B, 5)
    with torch.no_grad():
        module[0].bias.fill_(-100.0)
        x[:3] *= 1000.0
    x[3] = 0.0
    check(module, (x,))


def test_mixing_in_a_second_output_is_found() -> None:
    def both(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.linear(x, m.w)
        return h, h.mean(1) + F.linear(x.mean(1).requires_grad_(), m.w).mean(0)

    module = make(lambda: Op(both, w=(5, 5))).double()
    capture = Capture(module)
    capture.attach()
    with pytest.raises(UnsupportedModule):
        module(draw(B, 3, 5))
    capture.detach()


def test_a_sample_that_is_not_finite_is_no_mixing() -> None:
    module, x = make(mlp).double(), draw(B, 6, 5)
    x[0, 0, 0] = math.nan
    assert run(module, (x,), plan_for(module)).nonfinite == 1


class Watched(nn.Module):
    """Something of everything that the probe must leave as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.b = nn.Linear(6, 6)
        self.calls: list[str] = []

    def forward(self, x: Tensor, up: Tensor, *, reentrant: bool = False) -> Tensor:
        h = F.dropout(self.a(x) * up, 0.5)
        h = checkpoint(lambda t: F.dropout(torch.tanh(self.b(t)), 0.5), h, use_reentrant=reentrant)
        return torch.relu_(h + 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_probe_changes_nothing(reentrant: bool) -> None:
    module, x = make(Watched).double(), draw(B, 5)
    up = draw(6, seed=3).requires_grad_()
    up.grad = torch.full((6,), 7.0, dtype=torch.float64)
    outputs, states, gradients = [], [], []
    capture = Capture(module)
    for attached in (False, True):
        if attached:
            capture.attach()
        torch.manual_seed(5)
        outputs.append(module(x, up, reentrant=reentrant))
        states.append(torch.get_rng_state())
        assert bool((up.grad == 7).all())
        assert all(p.grad is None for p in module.parameters())
        assert not capture.captured
        outputs[-1].sum().backward()
        gradients.append(up.grad.clone())
        up.grad.fill_(7)
        for p in module.parameters():
            p.grad = None
    torch.testing.assert_close(*outputs)  # products may run in another order
    assert torch.equal(*states)
    torch.testing.assert_close(*gradients)
    assert capture.anchor.grad is None
    capture.detach()


CLEAN: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "rows": (mlp, lambda b: draw(b, 5)),
    "as-many-positions-as-samples": (mlp, lambda b: draw(b, b, 5)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        lambda b: draw(b, b, 4),
    ),
    "attention-time-first-inside": (
        lambda: TimeFirstAttention(),
        lambda b: draw(b, b, 4),
    ),
    "lstm-time-first-inside": (lambda: TimeFirstLstm(), lambda b: draw(b, b, 4)),
}


class TimeFirstAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attention(x, x, x)[0].transpose(0, 1)


class TimeFirstLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.transpose(0, 1))[0].transpose(0, 1)


@pytest.mark.parametrize("batch", [1, 2, B])
@pytest.mark.parametrize("case", CLEAN.values(), ids=CLEAN)
def test_clean_models_pass(
    case: tuple[Callable[[], nn.Module], Callable[[int], Tensor]], batch: int
) -> None:
    build, inputs = case
    check(make(build), (inputs(batch),))


@pytest.mark.parametrize("batch", [2, 5, 6, 7])
def test_indices_may_have_the_shape_of_what_they_pick_from(batch: int) -> None:
    def rows(m: nn.Module, x: Tensor) -> Tensor:
        places = (x[:, 0].abs() * 100).long() % 5
        gains = m.g[places % 2][:, None]
        several = m.w[(x.abs() * 100).long() % 5].mean(1)
        return F.linear(m.w[places] * gains + several, m.v)

    check(make(lambda: Op(rows, w=(5, 6), v=(3, 6), g=(2,))), (draw(batch, 6),))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "penalty": (lambda m, x: F.linear(x, m.w) + m.w.square().sum() * x.sum(), "w in mul"),
    "reduced-with-data": (
        lambda m, x: F.linear(x, m.w) + (x.mean(0) * m.w[0]),
        "mul",
    ),
    "unbatched": (lambda m, x: F.linear(x[0], m.w).expand(len(x), -1), "linear"),
    "set": (lambda m, x: set_rows(x, m.w[0]), "__setitem__"),
    "copy": (lambda m, x: torch.empty_like(x).copy_(m.w[0]), "copy_"),
    "places-of-samples": (
        lambda m, x: torch.zeros_like(x).index_put((torch.arange(len(x)),), m.w[0]) + x,
        "index_put.*one sample alone: index",
    ),
    "lerp-in-place": (lambda m, x: x.clone().lerp_(m.w[0], 0.5), "lerp_"),
    "vmap": (lambda m, x: torch.vmap(lambda r: F.linear(r[None], m.w)[0])(x), "vmap"),
    "rows-one-by-one": (lambda m, x: torch.stack([F.linear(r[None], m.w)[0] for r in x]), "linear"),
    "copies-at-odds": (
        lambda m, x: torch.cat([m.w[:1].repeat_interleave(len(x), 0), x], 1),
        "one sample alone|cat",
    ),
    "batch-norm": (
        lambda m, x: F.batch_norm(x, None, None, m.w[0], training=True),
        "batch_norm.*GroupNorm",
    ),
    "max-norm": (
        lambda m, x: F.embedding(torch.zeros(len(x), dtype=torch.long), m.w, max_norm=1.0),
        "w",
    ),
    "several-results": (lambda m, x: torch.max(x @ m.v * m.w[0], 0).values[None] * m.w[0], "mul"),
}


def set_rows(x: Tensor, w: Tensor) -> Tensor:
    x = x.clone()
    x[x[:, 0] > 0] = w
    return x


@pytest.mark.parametrize(("function", "text"), REFUSED.values(), ids=REFUSED)
def test_uses_without_a_part_for_every_sample(function: Callable[..., Any], text: str) -> None:
    module = make(lambda: Op(function, w=(5, 5), v=(5, 5))).double()
    with pytest.raises(UnsupportedModule, match=text):
        step(module, draw(3, 5))


def test_a_loss_of_parameters_alone() -> None:
    module = make(mlp).double()
    capture = Capture(module)
    capture.attach()
    module(draw(B, 5))
    with pytest.raises(UnsupportedModule, match="public"):
        module[0].weight.square().sum().backward()
    with capture.public():
        module[0].weight.square().sum().backward()
    torch.testing.assert_close(capture.public_gradients[0], 2 * module[0].weight.detach())
    capture.detach()


def test_copies_per_sample_that_do_not_fit() -> None:
    module = make(lambda: Op(lambda m, x: torch.einsum("bi,io->bo", x, m.w), w=(2048, 2048)))
    with pytest.raises(UnsupportedModule, match="256 MiB"):
        step(module.float(), draw(17, 2048).float())


def test_a_large_table_of_positions_fits() -> None:
    # One copy per sample is as large as the activations are anyway.
    module = make(lambda: Op(lambda m, x: (x[:, :1] + m.p).mean((1, 2)), p=(2048, 2048)))
    capture = Capture(module)
    capture.attach()
    loss = module(draw(17, 1, 2048).float()).sum()
    loss.backward()
    (arrival,) = capture.slots[0].arrivals
    assert arrival.record.batch == 17
    capture.detach()


class Leaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


def test_a_function_that_leaks_a_gradient() -> None:
    module = make(lambda: Op(lambda m, x: Leaking.apply(F.linear(x, m.v), m.w), w=(5, 5), v=(5, 5)))
    capture = Capture(module)
    capture.attach()
    total(module(draw(B, 5).float())).backward()
    with pytest.raises(PrivacyError, match="one on w"):
        clipped_sums(capture, plan_for(module))
    with pytest.raises(PrivacyError, match="one on w"), capture.public():
        pass  # it would have passed for a public gradient
    assert not capture.public_gradients
    capture.detach()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_leaks() -> None:
    inner = torch.jit.script(nn.Linear(5, 5))
    module = nn.Sequential(nn.Linear(5, 5), inner)
    capture = Capture(module)
    capture.attach()
    total(module(draw(B, 5).float())).backward()
    with pytest.raises(PrivacyError, match=r"1\.weight"):
        clipped_sums(capture, plan_for(module))
    capture.detach()


def test_a_parameter_replaced_later_leaks() -> None:
    module = make(mlp).float()
    capture = Capture(module)
    capture.attach()
    module[2] = nn.Linear(6, 3)
    total(module(draw(B, 5).float())).backward()
    with pytest.raises(PrivacyError, match=r"2\.weight"):
        clipped_sums(capture, plan_for(module))
    capture.detach()


def test_a_second_forward_pass_without_a_loader() -> None:
    module, x = make(mlp).double(), draw(B, 5)
    capture = Capture(module)
    capture.attach()
    first, second = module(x), module(x)
    total(first).backward()
    with pytest.raises(PrivacyError, match="other samples"):
        total(second).backward()
    capture.discard()
    capture.new_samples()
    total(module(x)).backward()
    assert clipped_sums(capture, plan_for(module)) is not None
    capture.detach()


def test_two_passes_in_one_backward_without_a_loader() -> None:
    module, x = make(mlp).double(), draw(B, 5)
    capture = Capture(module)
    capture.attach()
    with pytest.raises(PrivacyError, match="other samples"):
        (total(module(x)) + total(module(2 * x))).backward()
    capture.detach()


def test_stale_graphs() -> None:
    module, x = make(mlp).double(), draw(B, 5)
    plan = plan_for(module, 0.5)
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    capture.begin_batch(B)
    old = total(module(x))
    capture.begin_batch(B)
    new = total(module(2 * x))
    with pytest.raises(PrivacyError, match="other samples"):
        old.backward()
    assert not capture.captured
    new.backward()
    with pytest.raises(PrivacyError, match="step"):
        capture.begin_batch(B)
    result = clipped_sums(capture, plan)
    assert isinstance(result, clip.ClipResult)
    capture.detach()
    agree(result, truth(reference_gradients(module, (2 * x,)), plan), 1e-10)


def test_batches_of_another_size_than_handed_out() -> None:
    module = make(mlp).double()
    capture = Capture(module)
    capture.attach()
    capture.begin_batch(B)
    with pytest.raises(UnsupportedModule, match="batch of 4"):
        module(draw(B + 1, 5))
    module.eval()
    assert module(draw(B + 1, 5)).shape == (B + 1, 3)  # evaluation
    module.train()
    with torch.no_grad():
        assert module(draw(B + 1, 5)).shape == (B + 1, 3)
    capture.detach()


def test_a_use_outside_the_forward_pass() -> None:
    module = make(mlp).double()
    capture = Capture(module)
    capture.attach()
    with pytest.raises(PrivacyError, match="outside"):
        F.linear(draw(B, 5), module[0].weight)
    capture.begin_batch(B)
    total(F.linear(draw(B, 5), module[0].weight)).backward()
    with pytest.raises(PrivacyError, match="validate"):
        clipped_sums(capture, plan_for(module))
    capture.detach()


def test_monitoring_is_free() -> None:
    module, x = make(mlp).double(), draw(B, 5)
    plan = plan_for(module, 0.5)
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    output = module(x)
    norms = [p.norm().item() for p in module.parameters()]
    assert "Private" in repr(module[0].weight)
    assert bool((module[0].weight > 0).any())
    total(output).backward()
    assert len(norms) == 4
    result = clipped_sums(capture, plan)
    assert isinstance(result, clip.ClipResult)
    capture.detach()
    agree(result, truth(reference_gradients(module, (x,)), plan), 1e-10)


def test_bad_arguments() -> None:
    with pytest.raises(InvalidInput, match="module"):
        Capture(torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="loss_reduction"):
        Capture(nn.Linear(2, 2), loss_reduction="median")
    with pytest.raises(InvalidInput, match="keep_budget"):
        Capture(nn.Linear(2, 2), keep_budget=-1)
