"""The forward-difference probe: samples that mix where no gradient shows it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dpkern import PrivacyEngine
from dpkern.base.errors import PrivacyError, UnsupportedModule
from dpkern.engine import difference, occasions, zero_gates
from dpkern.engine.capture import Capture
from dpkern.engine.replaced_rows import by_copies, differing, mapped, replaced_rows

B, E = 8, 6
Forward = Callable[..., Any]


class Model(nn.Module):
    """Two layers with a function of the hidden rows and the inputs between them."""

    def __init__(self, middle: Forward, **parts: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(E, E), nn.Linear(E, 3)
        self.table = nn.Embedding(11, E)
        self.middle = middle
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        return self.last(self.middle(self, self.first(x), *more, **named))


def rows(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (B, E)), generator=torch.Generator().manual_seed(seed))


def ids(*shape: int) -> Tensor:
    return torch.randint(11, shape or (B, 4), generator=torch.Generator().manual_seed(2))


def model(middle: Forward, **parts: Any) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(middle, **parts)


def first_pass(module: nn.Module, *inputs: Any, **named: Any) -> Any:
    """One forward pass under a capture."""
    capture = Capture(module)
    capture.attach()
    try:
        return module(*inputs, **named)
    finally:
        capture.detach()


@torch.no_grad()
def standardised(m: Model, h: Tensor) -> Tensor:
    return (h - h.mean(0)) / (h.std(0) + 1e-3)


def no_grad_standardised(m: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        mean, sd = h.mean(0), h.std(0)
    return (h - mean) / (sd + 1e-3)


def fake_quantised(m: Model, h: Tensor) -> Tensor:
    scale = h.detach().abs().max() / 127
    return h + (torch.round(h / scale) * scale - h).detach()


def capacity(m: Model, h: Tensor) -> Tensor:
    kept = h.detach().sum(1).topk(len(h) // 2).indices
    return h * torch.zeros(len(h), 1).index_fill_(0, kept, 1.0)


def experts(m: Model, h: Tensor) -> Tensor:
    chosen, result = h.detach().argmax(1) % 2, torch.zeros_like(h)
    for k in range(2):
        rows = (chosen == k).nonzero()[:3, 0]
        result = result.index_add(0, rows, torch.tanh(h[rows]) * (k + 1))
    return result


def inverse_frequency(m: Model, h: Tensor, tokens: Tensor) -> Tensor:
    present = torch.stack([(tokens == t).any(1).float().mean() for t in range(11)])
    return h + (m.table(tokens) / (present[tokens] + 0.1)[..., None]).mean(1)


def recurrent_over_the_batch(m: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        return h + m.lstm(h[:, None])[0][:, 0]  # one sequence of B steps: batch_first is False


def packed_gate(m: Model, h: Tensor) -> Tensor:
    return h * (torch.rand(()) < h.detach().mean().sigmoid())


MIXING: dict[str, tuple[Forward, tuple[Any, ...], dict[str, Any]]] = {
    "centre": (lambda m, h: h - h.mean(0).detach(), (), {}),
    "standardised-under-no-grad": (no_grad_standardised, (), {}),
    "fake-quantisation": (fake_quantised, (), {}),
    "largest-of-the-batch": (lambda m, h: h / h.detach().abs().amax(), (), {}),
    "capacity": (capacity, (), {}),
    "experts-with-a-capacity": (experts, (), {}),
    "median-gate": (lambda m, h: h * (h > h.detach().median(0).values), (), {}),
    "ranks": (lambda m, h: h + h.detach().argsort(0).argsort(0) / len(h), (), {}),
    "rolled-ids": (lambda m, h, t: h + m.table(t.roll(1, 0)).mean(1), (ids(),), {}),
    "rolled-by-two": (lambda m, h, t: h + m.table(t.roll(2, 0)).mean(1), (ids(),), {}),
    "inverse-document-frequency": (inverse_frequency, (ids(),), {}),
    "second-input": (lambda m, h, y: h + y.mean(0), (rows(seed=3),), {}),
    "keyword": (lambda m, h, y: h + y.mean(0), (), {"y": rows(seed=3)}),
    "nested-dict": (
        lambda m, h, y: h + y["a"][0].float().mean(),
        ({"a": [ids()], "b": 3},),
        {},
    ),
    "gate-at-zero": (lambda m, h: h + m.gate * (h - h.mean(0).detach()), (), {}),
    "most-frequent-class": (lambda m, h, t: h + m.table(t.flatten().mode().values), (ids(),), {}),
    "integers-in-a-float-mask": (
        lambda m, h, y: h * (y.sum() / y.numel()),
        ((rows(B, 3) > 0).float(),),
        {},
    ),
    "time-is-the-batch": (recurrent_over_the_batch, (), {}),
    "python-number": (lambda m, h: h * (1 + abs(h.detach().mean().item())), (), {}),
    "random-but-by-the-batch": (packed_gate, (), {}),
    "cumulative": (lambda m, h: h + h.detach().cumsum(0), (), {}),
}


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_mix_are_refused(name: str) -> None:
    middle, inputs, named = MIXING[name]
    module = model(middle, gate=nn.Parameter(torch.zeros(1)), lstm=nn.LSTM(E, E))
    with pytest.raises(UnsupportedModule, match=r"(Model|LSTM).*depend on that sample alone"):
        first_pass(module, rows(), *inputs, **named)


@pytest.mark.parametrize("name", ["zero biases", "a zero bias that multiplies", "a zero scale"])
def test_only_parameters_that_may_multiply_count_as_gates(name: str) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.last = nn.MultiheadAttention(E, 2), nn.Linear(E, E)
            self.norm = nn.LayerNorm(E)
            for part in (self.attend.in_proj_bias, self.attend.out_proj.bias, self.last.bias):
                nn.init.zeros_(part)
            if name == "a zero bias that multiplies":
                self.gate = self.last.bias
            if name == "a zero scale":
                nn.init.zeros_(self.norm.weight)

    module = Layers()
    trained = list(module.parameters())
    found = {
        id(p) for p in zero_gates.possible_gates(module, trained) if zero_gates.is_zero(p.data)
    }
    expected = {
        "a zero bias that multiplies": [module.last.bias],
        "a zero scale": [module.norm.weight],
    }
    assert found == {id(p) for p in expected.get(name, [])}


@pytest.mark.parametrize("batch", [2, 3, 4, 5, 8, 33])
def test_the_two_turns_replace_other_samples(batch: int) -> None:
    for number in range(50):
        half = difference._half(batch, number, apart=True)
        assert len(half) == batch // 2
        assert half != [*range(batch // 2)]
        assert set(half) < set(range(batch))


@pytest.mark.parametrize("batch", [2, 3, 4])
@pytest.mark.parametrize("towards", ["later", "earlier"])
def test_probes_of_one_turn_replace_every_sample_now_and_then(batch: int, towards: str) -> None:
    class Leaks(nn.Module):
        """Numbers of the first sample reach the last one, or the other way round."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(E, E)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.layer(x)
            source, place = (0, -1) if towards == "later" else (-1, 0)
            other = torch.zeros_like(h)
            other[place] = h[source].detach()
            return h + other

    module = Leaks()
    probe = difference.DifferenceProbe(module, module, (torch.randn(batch, E),), {}, batch)
    assert any(probe.run(number, full=False).mixed for number in range(20))


@dataclass
class Batch:
    x: Tensor
    ids: Tensor
    name: str = "a batch"


class FromBatch(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.layer, self.table, self.mixes = nn.Linear(E, 3), nn.Embedding(11, E), mixes

    def forward(self, batch: Batch) -> Tensor:
        extra = self.table(batch.ids).mean(1)
        return self.layer(batch.x) + self.layer(extra.mean(0).detach() if self.mixes else extra)


class Scalar(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.first, self.last, self.mixes = nn.Linear(E, E), nn.Linear(E, 3), mixes

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h - h.mean(0).detach() if self.mixes else h).square().mean()


@pytest.mark.parametrize("mixes", [False, True])
def test_a_module_that_returns_a_loss_alone(mixes: bool) -> None:
    capture = Capture(Scalar(mixes))
    capture.attach()
    if mixes:
        with pytest.raises(UnsupportedModule, match="the input of last"):
            capture.module(rows())
    else:
        assert capture.module(rows()).dim() == 0
    capture.detach()


@pytest.mark.parametrize("mixes", [False, True])
def test_inputs_in_a_dataclass(mixes: bool) -> None:
    capture = Capture(FromBatch(mixes))
    capture.attach()
    capture.begin_batch(B)
    if mixes:
        with pytest.raises(UnsupportedModule):
            capture.module(Batch(rows(), ids()))
    else:
        assert capture.module(Batch(rows(), ids())).shape == (B, 3)
    capture.detach()


def test_the_module_that_mixes_is_named() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0).detach()

    module = nn.Sequential(nn.Linear(E, E), nn.Sequential(nn.Tanh(), Centred()), nn.Linear(E, 3))
    with pytest.raises(UnsupportedModule, match=r"1\.1 \(Centred\)"):
        first_pass(module, rows())


def test_frozen_batch_normalisation_that_trains_again() -> None:
    module = nn.Sequential(nn.Linear(E, E), nn.BatchNorm1d(E, affine=False), nn.Linear(E, 3))
    module[1].eval()
    capture = Capture(module)
    capture.attach()
    assert module(rows()).shape == (B, 3)
    module.train()
    with pytest.raises(UnsupportedModule, match=r"1 \(BatchNorm1d\)|1.running_mean"):
        module(rows())
    capture.detach()


def test_the_note_about_frozen_normalisation_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(E, E), nn.BatchNorm1d(E, affine=False), nn.Linear(E, 3))
    module[1].eval()
    trained(module)
    assert "1 (BatchNorm1d): is frozen" in caplog.text


def test_a_user_hook_that_mixes() -> None:
    module = model(lambda m, h: h)
    capture = Capture(module)
    capture.attach()
    module(rows())
    module.first.register_forward_hook(lambda m, args, out: out - out.mean(0).detach())
    capture.new_samples()
    with pytest.raises(UnsupportedModule, match=r"first \(Linear\)"):
        module(rows())
    capture.detach()


CHANGES: dict[str, Callable[[Model], Any]] = {
    "flag": lambda m: setattr(m, "mix", True),
    "word": lambda m: setattr(m, "mix", "yes"),
    "number": lambda m: setattr(m, "mix", 3),
    "configuration": lambda m: setattr(m.config, "mix", True),
    "dictionary": lambda m: m.options.update(mix=True),
    "forward": lambda m: setattr(m, "middle", MIXING["centre"][0]),
    "module": lambda m: setattr(m, "first", nn.Sequential(m.first, Mixer())),
    "mode": lambda m: m.last.eval(),
}


class Mixer(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(0).detach()


class Configuration:
    mix = False


def later(m: Model, h: Tensor) -> Tensor:
    mixes = m.mix or m.config.mix or m.options["mix"] or not m.last.training
    return h - h.mean(0).detach() if mixes else h


@pytest.mark.parametrize("name", CHANGES)
def test_mixing_that_begins_with_a_change(name: str) -> None:
    module = model(later, mix=False, config=Configuration(), options={"mix": False})
    capture = Capture(module)
    capture.attach()
    capture.guard._occasions.gap = 10**6  # no secret time among these passes
    for _ in range(3):
        capture.new_samples()
        module(rows())
    assert capture.guard.probes == 1
    CHANGES[name](module)
    capture.new_samples()
    with pytest.raises(UnsupportedModule):
        module(rows())
    capture.detach()


def trained(module: nn.Module, *, epochs: int = 1, **given: Any) -> tuple[Any, Any]:
    """An engine and a function that trains one epoch."""
    data = DataLoader(TensorDataset(rows(64, E)), batch_size=16)
    engine = PrivacyEngine()
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **given,
    )

    def epoch() -> None:
        for (x,) in loader:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()

    return engine, epoch


def test_mixing_that_nothing_announces_is_found_at_a_secret_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = {"mix": False}
    module = model(lambda m, h: centred(h) if hidden["mix"] else h)
    engine, epoch = trained(module)
    epoch()
    hidden["mix"] = True
    monkeypatch.setattr(engine.capture.guard._occasions, "gap", 1)
    with pytest.raises(UnsupportedModule):
        epoch()
    # What was released before cannot be taken back.
    assert engine.get_epsilon(1e-5) == math.inf
    assert "Model" in engine.report(1e-5)["non_private"]
    state = engine.state_dict() if not engine.capture.captured else None
    assert state is not None
    again, _ = trained(model(lambda m, h: h))
    again.load_state_dict(state)
    assert again.get_epsilon(1e-5) == math.inf


def centred(h: Tensor) -> Tensor:
    return h - h.mean(0).detach()


def test_a_finding_before_the_first_release_taints_nothing() -> None:
    engine, epoch = trained(model(MIXING["centre"][0]))
    with pytest.raises(UnsupportedModule):
        epoch()
    assert engine.step.steps == 0
    assert engine.get_epsilon(1e-5) == 0


def test_secret_times_are_rare_and_irregular() -> None:
    found = occasions.Occasions(nn.Linear(2, 2))
    found.due(True)
    found.probed(True)
    times = [i for i in range(20_000) if found.due(True) == "secret"]
    gaps = {b - a for a, b in itertools.pairwise(times)}
    assert 10 <= len(times) <= 90  # 40 expected: a chance of 1e-6 to fail
    assert len(gaps) > len(times) // 2


def test_flags_that_change_at_every_step_are_probed_now_and_then() -> None:
    module = model(lambda m, h: h, temperature=0)
    capture = Capture(module)
    capture.attach()
    capture.guard._occasions.gap = 10**6
    for step in range(70):
        module.temperature = step
        capture.new_samples()
        module(rows())
    assert 2 <= capture.guard.probes <= 6
    capture.detach()


def test_modes_that_alternate_are_probed_now_and_then() -> None:
    module = model(lambda m, h: h)
    capture = Capture(module)
    capture.attach()
    capture.guard._occasions.gap = 10**6
    for _ in range(20):
        module.train()
        capture.new_samples()
        module(rows())
        module.eval()
        with torch.no_grad():
            module(rows())
    assert capture.guard.probes <= 5
    capture.detach()


def test_one_sample_tells_nothing_and_the_next_batch_is_probed() -> None:
    module = model(MIXING["centre"][0])
    capture = Capture(module)
    capture.attach()
    module(rows(1, E))
    assert capture.guard.probes == 0
    capture.new_samples()
    with pytest.raises(UnsupportedModule):
        module(rows())
    capture.detach()


def test_equal_samples_tell_nothing_and_the_next_batch_is_probed() -> None:
    module = model(MIXING["rolled-ids"][0])
    capture = Capture(module)
    capture.attach()
    capture.begin_batch(B)
    module(torch.zeros(B, E), torch.full((B, 4), 3))
    with pytest.raises(UnsupportedModule):
        module(rows(), ids())
    capture.detach()


def stochastic_depth(m: Model, h: Tensor) -> Tensor:
    kept = (torch.rand(len(h), 1) > 0.3).float() * (random.random() < 2)
    return h + kept * torch.tanh(h)


def autocast(m: Model, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.first(h).float()


def masked_attention(m: Model, h: Tensor, mask: Tensor) -> Tensor:
    x = h[:, None] * torch.linspace(0.5, 1.5, 4)[:, None]
    return m.attention(x, x, x, key_padding_mask=mask)[0].sum(1)


def packed(m: Model, h: Tensor, lengths: Tensor) -> Tensor:
    x = h[:, None] * torch.linspace(0.5, 1.5, 4)[:, None]
    sequence = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return h + m.gru(sequence)[1][0]


def sorted_lengths(m: Model, h: Tensor, lengths: Tensor) -> Tensor:
    x = h[:, None] * torch.linspace(0.5, 1.5, 4)[:, None]
    return h + m.gru(rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0]


def time_first_inside(m: Model, h: Tensor) -> Tensor:
    return h + m.lstm(h[None].expand(5, -1, -1))[0].mean(0)


def checked(m: Model, h: Tensor) -> Tensor:
    if h.isnan().any() or h.abs().max() > 100:
        raise ValueError("values out of range")
    return h


LENGTHS = torch.tensor([4, 1, 2, 4, 3, 1, 2, 3])
LEGITIMATE: dict[str, tuple[Forward, tuple[Any, ...]]] = {
    "dropout": (lambda m, h: F.dropout(h, 0.4), ()),
    "stochastic-depth": (stochastic_depth, ()),
    "autocast": (autocast, ()),
    "attention-with-padding": (masked_attention, (torch.arange(4) >= LENGTHS[:, None],)),
    "packed-sequence": (packed, (LENGTHS,)),
    "packed-sorted": (sorted_lengths, (LENGTHS.sort(descending=True).values,)),
    "time-first-inside": (time_first_inside, ()),
    "checkpoint": (lambda m, h: checkpoint(m.first, h, use_reentrant=False), ()),
    "checkpoint-reentrant": (lambda m, h: checkpoint(m.first, h, use_reentrant=True), ()),
    "weight-norm": (lambda m, h: m.weight_norm(h), ()),
    "group-norm": (lambda m, h: F.group_norm(h, 2), ()),
    "in-place": (lambda m, h: torch.relu_(h + 0), ()),
    "embedding-of-ids": (lambda m, h, t: h + m.table(t).mean(1), (ids(),)),
    "broadcast-input": (lambda m, h, p: h + p, (rows(1, E),)),
    "values-in-range": (checked, ()),
    "nan-in-one-sample": (lambda m, h: torch.where(h > 9, h, h) / 1, ()),
    "per-sample-top-k": (lambda m, h: h * (h >= h.topk(2, 1).values[:, 1:]), ()),
    "zero-gate": (lambda m, h: h + m.gate * h, ()),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_models_pass(name: str) -> None:
    middle, inputs = LEGITIMATE[name]
    module = model(
        middle,
        gate=nn.Parameter(torch.zeros(1)),
        gru=nn.GRU(E, E, batch_first=True),
        lstm=nn.LSTM(E, E),
        attention=nn.MultiheadAttention(E, 2, batch_first=True),
        weight_norm=parametrizations.weight_norm(nn.Linear(E, E)),
    )
    output = first_pass(module, rows(), *inputs)
    assert output.shape == (B, 3)


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(E, 3)
        self.lstm = nn.LSTM(E, E, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h, (state, _) = self.lstm(x[:, None])
        logits = self.layer(h[:, 0])
        return {
            "logits": logits,
            "states": [state, h],
            "each": list(logits.unbind(0)),
            "twice": torch.cat([logits, -logits]),
            "classes": logits.argmax(1),
        }


@pytest.mark.parametrize("batch", [2, 3, B])
def test_outputs_of_many_forms(batch: int) -> None:
    assert first_pass(Outputs(), rows(batch, E))["logits"].shape == (batch, 3)


def test_the_probe_leaves_generators_gradients_and_inputs_alone() -> None:
    module, x, given = model(lambda m, h: F.dropout(h, 0.5).mul_(random.random())), rows(), rows()
    module.gate = nn.Parameter(torch.zeros(E))
    module.first.weight.grad = torch.ones(E, E)
    states = []
    for _ in range(2):
        torch.manual_seed(4)
        random.seed(4)
        capture = Capture(module)
        capture.attach()
        capture.guard._occasions._known |= {capture.guard._occasions.combination}
        module(x)
        states.append((torch.get_rng_state(), random.getstate()))
        capture.detach()
        assert torch.equal(x, given)
        assert bool((module.first.weight.grad == 1).all())
        assert not module.gate.any()
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


def test_a_module_that_runs_on_nothing_else_is_refused() -> None:
    seen: list[Tensor] = []

    def only_once(m: Model, h: Tensor) -> Tensor:
        if h.detach().sum() != seen[0]:
            raise ValueError("another batch")
        return h

    module = model(only_once)
    seen.append(module.first(rows()).detach().sum())
    with pytest.raises((PrivacyError, ValueError), match="another batch"):
        first_pass(module, rows())


def test_validate_probes_the_function_that_it_is_given() -> None:
    engine, _ = trained(model(lambda m, h: h))
    module = engine.capture.module
    engine.validate(lambda x: module.last(module.first(x)), rows())
    with pytest.raises(UnsupportedModule, match="depend on that sample alone"):
        engine.validate(lambda x: module.last(module.first(x) - x.mean(0)), rows())


def test_rows_are_replaced_alike_in_every_input() -> None:
    tree = {"x": rows(), "ids": (ids(), 3), "one": rows(1, E), "views": rows(2 * B, 2)}
    new, different = replaced_rows(tree, B, [1, 5], by_copies(2))
    assert different
    assert torch.equal(new["x"][1], tree["x"][7])
    assert torch.equal(new["ids"][0][5], tree["ids"][0][3])
    assert torch.equal(new["views"][2:4], tree["views"][14:16])
    assert new["one"] is not None
    kept = [b for b in range(B) if b not in (1, 5)]
    assert torch.equal(new["x"][kept], tree["x"][kept])
    assert differing(tree, new, B, kept) is None
    assert differing(tree, new, B, range(B)) is not None
    assert mapped(tree, lambda t: t)["ids"][1] == 3
