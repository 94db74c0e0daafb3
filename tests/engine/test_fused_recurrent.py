"""Recurrent layers in one call inside the engine: who goes that way, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from dpkern.base.errors import UnsupportedModule
from dpkern.engine import routes
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums, prepare
from dpkern.engine.layers import fused_recurrent, recurrent
from dpkern.engine.merge import merge
from dpkern.engine.per_sample_gradients import ExplicitGradients, LinearGradients
from dpkern.ops import clip, ghost, testing
from tests.engine.engine_oracle import (
    agree,
    check,
    draw,
    make,
    plan_for,
    reference_gradients,
    sample_losses,
    truth,
)

B, T, D, H = 5, 6, 4, 7
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}
MODULES: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "deep": {"num_layers": 3},
    "both-ways": {"num_layers": 2, "bidirectional": True},
}


class Net(nn.Module):
    """A recurrent layer between linear ones, its start made of the data; everything goes out."""

    def __init__(self, kind: str, *, given: bool = True, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(D, D)
        self.layer = MODULES[kind](D, H, batch_first=True, **options)
        self.count = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        self.start = nn.Linear(D, 2 * self.count * H) if given else None

    def forward(self, x: Tensor) -> Tensor:
        hx: Any = None
        if self.start is not None:
            made = self.start(x[:, 0]).unflatten(1, (2, self.count, H)).permute(1, 2, 0, 3)
            hx = (made[0], made[1]) if isinstance(self.layer, nn.LSTM) else made[0]
        y, ends = self.layer(self.before(x), hx)
        ends = ends if isinstance(ends, tuple) else (ends,)
        return torch.cat([y.flatten(1), *(h.transpose(0, 1).flatten(1) for h in ends)], dim=1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operations that went through one call."""
    seen: list[str] = []
    original = fused_recurrent.run

    def run(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["operation"])
        return original(*args, **kwargs)

    monkeypatch.setattr(fused_recurrent, "run", run)
    return seen


def per_sample(module: nn.Module, x: Tensor) -> list[Tensor]:
    """``[B, *shape]`` for each trainable parameter, by ``torch.func``."""
    trainable = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}

    def loss(values: dict[str, Tensor], one: Tensor) -> Tensor:
        return sample_losses(functional_call(module, values, (one[None],)))[0]

    return list(vmap(grad(loss), in_dims=(None, 0))(trainable, x).values())


def captured(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The same from the engine's records."""
    capture = Capture(module, loss_reduction="sum")
    capture.norms_on_arrival = False
    capture.attach()
    try:
        sample_losses(module(x)).sum().backward()
        records = [merge([a.record for a in slot.arrivals]) for slot in capture.slots]
        return [
            r.per_sample().reshape(len(x), *s.shape)
            for r, s in zip(records, capture.slots, strict=True)
        ]
    finally:
        capture.detach()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", MODULES)
def test_per_sample_gradients(
    kind: str, options: dict[str, Any], dtype: torch.dtype, calls: list[str]
) -> None:
    module = make(lambda: Net(kind, **options)).to(dtype)
    x = draw(B, T, D)
    found = captured(module, x.to(dtype))
    assert len(calls) == module.count
    wanted = per_sample(module.double(), x)
    for mine, other in zip(found, wanted, strict=True):
        testing.assert_close("per sample", mine, other, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", MODULES)
def test_each_weight_has_one_record_of_all_time_steps(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "CACHED", 0)
    module = make(lambda: Net(kind, given=False))
    capture = Capture(module)
    capture.attach()
    try:
        module(draw(B, T, D).float()).sum().backward()
        arrivals = {slot.name: list(slot.arrivals) for slot in capture.slots}
    finally:
        capture.detach()
    for name, width in (("ih", D), ("hh", H)):
        (weight,), (bias,) = arrivals[f"layer.weight_{name}_l0"], arrivals[f"layer.bias_{name}_l0"]
        assert isinstance(weight.record, LinearGradients)
        assert weight.record.a.shape == (B, T, width)
        assert isinstance(bias.record, ExplicitGradients)


@pytest.mark.parametrize("style", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("kind", MODULES)
def test_clipped_sums(kind: str, style: str) -> None:
    module = make(lambda: Net(kind, num_layers=2, bidirectional=True))
    options: dict[str, Any] = {"clipping": style}
    if style == "per_layer":
        options["bound"] = [0.3] * len(list(module.parameters()))
    check(module, (draw(B, T, D),), **options)


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Widths of both operands of every norm of a linear record of several positions."""
    seen: list[tuple[int, int]] = []
    original = ghost.linear_norm

    def linear_norm(a: Tensor, g: Tensor, **options: Any) -> Tensor:
        if a.shape[1] > 1:
            seen.append((a.shape[2], g.shape[2]))
        return original(a, g, **options)

    monkeypatch.setattr(ghost, "linear_norm", linear_norm)
    return seen


class Wide(nn.Module):
    """A layer so wide that norms go by tables of products, once or twice over."""

    def __init__(self, kind: str, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = MODULES[kind](D, 24, batch_first=True), times

    def forward(self, x: Tensor) -> Tensor:
        y = [self.layer(x * (i + 1))[0] for i in range(self.times)]
        return torch.cat(y, dim=2)


def clipped(module: nn.Module, x: Tensor, plan: Any) -> clip.ClipResult:
    """A step as an optimizer prepares it."""
    capture = Capture(module, loss_reduction="sum")
    prepare(capture, lambda: plan)
    capture.attach()
    try:
        sample_losses(module(x)).sum().backward()
        result = clipped_sums(capture, plan)
        assert isinstance(result, clip.ClipResult)
        return result
    finally:
        capture.detach()


CLIPPED: dict[str, tuple[str, int, dict[str, Any], list[tuple[int, int]]]] = {
    "lstm": ("lstm", 1, {}, [(D + 24, 96)]),
    "rnn": ("tanh", 1, {}, [(D + 24, 24)]),
    "gru": ("gru", 1, {}, [(D, 72), (24, 72)]),
    "twice": ("lstm", 2, {}, [(D, 96), (24, 96)]),
    "per-layer": ("lstm", 1, {"clipping": "per_layer"}, [(D, 96), (24, 96)]),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_one_norm_for_both_weights_where_they_are_clipped_together(
    name: str, norms: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, times, options, widths = CLIPPED[name]
    monkeypatch.setattr(routes, "CACHED", 0)
    monkeypatch.setattr(fused_recurrent.linear, "norm_route", lambda a, g: "gram")
    module = make(lambda: Wide(kind, times)).double()
    x = draw(B, T, D)
    bound = [0.5] * len(list(module.parameters())) if options else 0.7
    plan = plan_for(module, bound, **options)
    result = clipped(module, x, plan)
    assert sorted(norms) == sorted(widths)
    agree(result, truth(reference_gradients(module, (x,)), plan), 1e-9)


def test_no_common_norm_where_one_weight_is_frozen(norms: list[tuple[int, int]]) -> None:
    module = make(lambda: Wide("lstm")).double()
    module.get_parameter("layer.weight_ih_l0").requires_grad_(False)
    x = draw(B, T, D)
    plan = plan_for(module, 0.7)
    agree(clipped(module, x, plan), truth(reference_gradients(module, (x,)), plan), 1e-9)
    assert norms == [(24, 96)]


def outputs_of(module: nn.Module, x: Tensor, private: bool) -> tuple[Tensor, Tensor]:
    """Outputs and the gradient by the input."""
    capture = Capture(module, loss_reduction="sum")
    if private:
        capture.attach()
    try:
        x = x.clone().requires_grad_()
        y = module(x)
        (gx,) = torch.autograd.grad(sample_losses(y).sum(), [x])
        return y.detach(), gx
    finally:
        capture.detach()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", MODULES)
def test_outputs_and_input_gradients_of_torch(
    kind: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    module = make(lambda: Net(kind, **options)).to(dtype)
    x = draw(B, T, D).to(dtype)
    for mine, other in zip(
        outputs_of(module, x, True), outputs_of(module.double(), x.double(), False), strict=True
    ):
        testing.assert_close("output or gradient", mine, other, TOLERANCE[dtype])


def frozen(kind: str, *names: str) -> nn.Module:
    module = make(lambda: Net(kind))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    return module


@pytest.mark.parametrize(
    "names",
    [("weight_hh",), ("weight_ih", "bias"), ("weight",), ("before", "start")],
    ids=lambda names: "-".join(names),
)
@pytest.mark.parametrize("kind", MODULES)
def test_frozen_parts(kind: str, names: tuple[str, ...], calls: list[str]) -> None:
    module = frozen(kind, *names)
    check(module, (draw(B, T, D),))
    assert calls


class Twice(Net):
    """One layer at two places."""

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(self.before(x))
        z, _ = self.layer(y[..., :D].flip(1))
        return torch.cat([y, z], dim=2)


@pytest.mark.parametrize("kind", MODULES)
def test_a_layer_that_is_used_twice(kind: str, calls: list[str]) -> None:
    check(make(lambda: Twice(kind, given=False)), (draw(B, T, D),))
    assert len(calls) >= 2


class Folded(Net):
    """Several sequences of each sample."""

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(self.before(x).unflatten(1, (3, 2)).flatten(0, 1))
        return y.unflatten(0, (len(x), 3))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", MODULES)
def test_several_sequences_of_each_sample(kind: str, calls: list[str]) -> None:
    check(make(lambda: Folded(kind, given=False)), (draw(B, T, D),))
    assert calls


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        inner = super().forward
        out: Tensor = checkpoint(inner, self.before(x), use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_checkpoints(kind: str, reentrant: bool, calls: list[str]) -> None:
    module = make(lambda: Checkpointed(kind, num_layers=2))
    assert isinstance(module, Checkpointed)
    module.reentrant = reentrant
    check(module, (draw(B, T, D),))
    assert calls


class InPlace(Net):
    """Outputs and last states are changed where they are."""

    def forward(self, x: Tensor) -> Tensor:
        y, ends = self.layer(self.before(x))
        y.mul_(2).relu_()
        ends = ends if isinstance(ends, tuple) else (ends,)
        return torch.cat([y.flatten(1), *(h.add_(1).squeeze(0) for h in ends)], dim=1)


@pytest.mark.parametrize("kind", MODULES)
def test_consumers_in_place(kind: str, calls: list[str]) -> None:
    """torch's own functions do not allow it; compare with copies."""

    class Copied(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            y, ends = self.layer(self.before(x))
            ends = ends if isinstance(ends, tuple) else (ends,)
            return torch.cat([(2 * y).relu().flatten(1), *(h[0] + 1 for h in ends)], dim=1)

    module = make(lambda: InPlace(kind, given=False))
    plain = make(lambda: Copied(kind, given=False))
    plain.load_state_dict(module.state_dict())
    check(module, (draw(B, T, D),), plain=plain)
    assert calls


class Packed(Net):
    def forward(self, x: Tensor) -> Tensor:
        given = pack_padded_sequence(x, torch.full((len(x),), T - 1), batch_first=True)
        y, _ = self.layer(given)
        return pad_packed_sequence(y, batch_first=True)[0]


OTHERS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "packed": (lambda: Packed("lstm", given=False), {}),
    "projected": (lambda: Net("lstm", given=False, proj_size=2), {}),
    "autocast": (lambda: Wide("gru"), {"autocast": True}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_goes_the_other_way(name: str, calls: list[str]) -> None:
    build, options = OTHERS[name]
    module = make(build)
    capture = Capture(module)
    capture.attach()
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in options):
            module(draw(B, T, D).float()).float().sum().backward()
        assert clipped_sums(capture, plan_for(module)) is not None
    finally:
        capture.detach()
    assert calls == []


def test_bfloat16_goes_the_other_way(calls: list[str]) -> None:
    module = make(lambda: Net("lstm", given=False)).bfloat16()
    capture = Capture(module)
    capture.attach()
    try:
        module(draw(B, T, D).bfloat16()).float().sum().backward()
    finally:
        capture.detach()
    assert calls == []


def test_evaluation_is_torchs_own(calls: list[str]) -> None:
    module = make(lambda: Net("lstm")).eval()
    x = draw(B, T, D).float()
    want = module(x)
    capture = Capture(module)
    capture.attach()
    try:
        with torch.no_grad():
            got = module(x)
    finally:
        capture.detach()
    assert torch.equal(got, want.detach())
    assert calls == []


def test_gradients_of_inputs_alone_leave_no_record() -> None:
    module = make(lambda: Net("gru")).double()
    capture = Capture(module)
    capture.attach()
    try:
        x = draw(B, T, D).requires_grad_()
        torch.autograd.grad(module(x).sum(), [x])
        assert not any(slot.arrivals for slot in capture.slots)
    finally:
        capture.detach()


def test_samples_that_mix_are_found() -> None:
    class Mixing(Net):
        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.layer(self.before(x))
            return y + y.sum(0)  # type: ignore[no-any-return]

    module = make(lambda: Mixing("lstm", given=False))
    capture = Capture(module)
    capture.attach()
    try:
        with pytest.raises(UnsupportedModule, match="lstm"):
            module(draw(B, T, D).float())
    finally:
        capture.detach()


def records_of(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Operands of all records, each with the samples first."""
    capture = Capture(module, loss_reduction="sum")
    capture.norms_on_arrival = False
    capture.attach()
    try:
        (module(x) ** 2).sum().backward()
        found: list[Tensor] = []
        for slot in capture.slots:
            for arrival in slot.arrivals:
                record: Any = arrival.record
                found += (
                    [record.grads]
                    if isinstance(record, ExplicitGradients)
                    else [record.a, record.g]
                )
        return found
    finally:
        capture.detach()


@pytest.mark.parametrize("kind", MODULES)
def test_bits_of_a_records_gradient_depend_on_it_alone(kind: str) -> None:
    """A model of recurrent layers alone: in other batches, at other places, on other threads."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MODULES[kind](D, 33, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0]  # type: ignore[no-any-return]

    module = make(Alone)
    x = draw(23, T, D).float()
    with testing.threads(1):
        want = records_of(module, x)
    others = torch.cat([1e3 * draw(3, T, D, seed=5).float(), x[11:12], draw(7, T, D).float()])
    for batch, place in ((x[11:12], 0), (x[4:14], 7), (others, 3)):
        for threads in (1, 2):
            with testing.threads(threads):
                got = records_of(module, batch)
            for mine, other in zip(got, want, strict=True):
                assert torch.equal(mine[place], other[11])


def test_dropout_between_layers_draws_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed drops the same numbers, whichever way a layer goes."""
    module = make(lambda: Net("gru", given=False, num_layers=3, dropout=0.5))
    x = draw(B, T, D).float()
    capture = Capture(module)
    capture.attach()
    results: list[Tensor] = []
    ways: Sequence[Any] = (fused_recurrent.fits, lambda *_: False)
    try:
        for fits in ways:
            monkeypatch.setattr(recurrent.fused, "fits", fits)
            torch.manual_seed(3)
            results.append(module(x).detach())
            capture.discard()
    finally:
        capture.detach()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    assert not torch.equal(results[0], module.eval()(x))


class Learned(nn.Module):
    """A start that is learned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = MODULES[kind](D, H, batch_first=True)
        self.start = nn.Parameter(torch.randn(1, 1, H))

    def forward(self, x: Tensor) -> Tensor:
        h = self.start.expand(-1, len(x), -1)
        return self.layer(x, (h, h) if isinstance(self.layer, nn.LSTM) else h)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", MODULES)
def test_a_learned_start_is_refused(kind: str, calls: list[str]) -> None:
    capture = Capture(make(lambda: Learned(kind)))
    capture.attach()
    try:
        with pytest.raises(UnsupportedModule, match=r"start: .* the same for all samples"):
            capture.module(draw(B, T, D).float())
    finally:
        capture.detach()
    assert calls == []


def test_who_fits() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(D, H)
            self.register_buffer("shown", torch.zeros(B, T, D))

    module = Constant()
    weights = list(module.layer.parameters())
    x, state = torch.zeros(B, T, D), (torch.zeros(B, H),)
    assert not fused_recurrent.fits(x, state, weights)  # nothing of it is private
    capture = Capture(module)
    capture.attach()
    try:
        assert fused_recurrent.fits(x, state, weights)
        constant, other = torch.zeros(3 * H, D), torch.zeros(3 * H, D, requires_grad=True)
        assert fused_recurrent.fits(x, state, [constant, *weights[1:]])
        assert not fused_recurrent.fits(x, state, [other, *weights[1:]])
        assert not fused_recurrent.fits(module.get_buffer("shown"), state, weights)
        assert not fused_recurrent.fits(x.double(), state, weights)
        assert not fused_recurrent.fits(x[0], state, weights)
        assert not fused_recurrent.fits(x, state, [constant.t().contiguous().t(), *weights[1:]])
    finally:
        capture.detach()
