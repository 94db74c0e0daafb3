"""The state guard: what a module remembers of the samples is refused, what it counts is not."""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.utils.data import DataLoader, TensorDataset

from dpkern import PrivacyEngine
from dpkern.base.errors import UnsupportedModule
from dpkern.engine.capture import Capture
from dpkern.engine.contents import content_hash, same_bits
from dpkern.engine.snapshot import Snapshot

B, E = 8, 6
Forward = Callable[..., Any]


@dataclass
class Memory:
    items: list[Tensor] = field(default_factory=list)
    mean: Any = 0.0


class Model(nn.Module):
    """Two layers, something between them, and places where data could stay."""

    def __init__(self, middle: Forward) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(E, E), nn.Linear(E, 3)
        self.middle = middle
        self.register_buffer("mean", torch.zeros(E))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("bits", torch.zeros(E, dtype=torch.bool))
        self.register_buffer("sixteen", torch.zeros(E, dtype=torch.bfloat16))
        self.register_buffer("spectrum", torch.zeros(E, dtype=torch.complex64))
        self.register_buffer("weight_u", torch.zeros(E))
        self.register_buffer("_v", torch.zeros(E), persistent=False)
        self.codebook = nn.Parameter(torch.randn(4, E), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(E))
        self.teacher = nn.Parameter(torch.zeros(E, E), requires_grad=False)
        self.bank: list[Tensor] = []
        self.queue: deque[Tensor] = deque([torch.zeros(E)] * 3, maxlen=3)
        self.cache: Any = {}
        self.memory = Memory()
        self.level = 0.0
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self, self.first(x) * self.scale))


def rows(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (B, E)), generator=torch.Generator().manual_seed(seed))


def model(middle: Forward) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(middle)


def data_write(name: str, value: Callable[[Tensor], Tensor]) -> Forward:
    def middle(m: Model, h: Tensor) -> Tensor:
        getattr(m, name).data.copy_(value(h.detach()))
        return h

    return middle


def lerp(m: Model, h: Tensor) -> Tensor:
    m.mean.lerp_(h.detach().mean(0), 0.1)
    return h


def registered_late(m: Model, h: Tensor) -> Tensor:
    if "late" not in m._buffers:
        m.register_buffer("late", h.detach().mean(0))
    return h


def replaced_buffer(m: Model, h: Tensor) -> Tensor:
    m.mean = h.detach().mean(0)
    return h


def nearest_code(m: Model, h: Tensor) -> Tensor:
    code = torch.cdist(h.detach(), m.codebook).argmin(1)
    with torch.no_grad():
        m.codebook.index_copy_(0, code[:1], h.detach()[:1])
    return h


def first_data(m: Model, h: Tensor) -> Tensor:
    if m.calls == 0:
        m.scale.data.copy_(1 / (h.detach().std(0) + 1e-3))
    m.calls += 1
    return h


def bank(m: Model, h: Tensor) -> Tensor:
    past = torch.stack(m.bank).mean(0) if m.bank else torch.zeros(E)
    m.bank.append(h.detach()[0].clone())
    return h + past


def warm_bank(m: Model, h: Tensor) -> Tensor:
    m.queue.append(h.detach()[-1].clone())
    return h + m.queue[0] if m.calls > 100 else h


def in_a_dict(m: Model, h: Tensor) -> Tensor:
    past = m.cache.get("last", torch.zeros(E))
    m.cache["last"] = h.detach().mean(0)
    return h + past


def in_an_object(m: Model, h: Tensor) -> Tensor:
    past = m.memory.mean
    m.memory.mean = h.detach().mean(0)
    return h + past


def python_average(m: Model, h: Tensor) -> Tensor:
    past, m.level = m.level, 0.9 * m.level + 0.1 * h.detach().mean().item()
    return h - past


def in_a_closure() -> Forward:
    held: dict[str, Tensor] = {}

    def middle(m: Model, h: Tensor) -> Tensor:
        past = held.get("mean", torch.zeros(E))
        held["mean"] = h.detach().mean(0)
        return h + past

    return middle


ABSORBING: dict[str, tuple[Forward, str]] = {
    "buffer": (lerp, "mean"),
    "buffer-through-data": (data_write("mean", lambda h: h.mean(0)), "mean"),
    "integers": (data_write("count", lambda h: (h > 0).sum()), "count"),
    "booleans": (data_write("bits", lambda h: h.mean(0) > 0), "bits"),
    "sixteen-bits": (data_write("sixteen", lambda h: h.amax(0)), "sixteen"),
    "complex": (data_write("spectrum", lambda h: h.mean(0) + 0j), "spectrum"),
    "named-like-spectral-norm": (data_write("weight_u", lambda h: h.mean(0)), "weight_u"),
    "not-persistent": (data_write("_v", lambda h: h.mean(0)), "_v"),
    "registered-late": (registered_late, "late"),
    "replaced": (replaced_buffer, "mean"),
    "codebook": (nearest_code, "codebook"),
    "frozen-through-data": (data_write("teacher", lambda h: h.T @ h), "teacher"),
    "initialised-from-data": (first_data, "scale"),
    "bank": (bank, "bank"),
    "queue-that-warms-up": (warm_bank, "queue"),
    "dictionary": (in_a_dict, "cache"),
    "object": (in_an_object, "memory.mean"),
    "python-number": (python_average, "level"),
    "closure": (in_a_closure(), "held"),
}


@pytest.mark.parametrize("name", ABSORBING)
def test_state_that_follows_the_data_is_refused(name: str) -> None:
    middle, place = ABSORBING[name]
    capture = Capture(model(middle))
    capture.attach()
    with pytest.raises(UnsupportedModule, match=place):
        capture.module(rows())
    capture.detach()


@pytest.mark.parametrize("name", [n for n in ABSORBING if n not in ("closure",)])
def test_also_without_gradients(name: str) -> None:
    middle, place = ABSORBING[name]
    module = model(middle)
    capture = Capture(module)
    capture.attach()
    module.eval()
    with torch.no_grad(), pytest.raises(UnsupportedModule, match=place):
        module(rows())
    capture.detach()


def after_warm_up(write: Callable[[Model, Tensor], Any]) -> Forward:
    def middle(m: Model, h: Tensor) -> Tensor:
        m.calls += 1
        if m.calls > 2:
            with torch.no_grad():
                write(m, h.detach())
        return h

    return middle


LATE: dict[str, tuple[Callable[[Model, Tensor], Any], str]] = {
    "buffer": (lambda m, h: m.mean.lerp_(h.mean(0), 0.1), "mean"),
    "integers": (lambda m, h: m.count.add_((h > 0).sum()), "count"),
    "codebook": (lambda m, h: m.codebook[0].copy_(h[0]), "codebook"),
    "trained": (lambda m, h: m.scale.mul_(h.std(0)), "scale"),
    "replaced": (lambda m, h: setattr(m, "mean", h.mean(0)), "mean"),
    "registered": (lambda m, h: m.register_buffer("late", h.mean(0)), "late"),
}


@pytest.mark.parametrize("name", LATE)
def test_writes_after_a_warm_up_are_refused_in_the_pass_that_writes(name: str) -> None:
    write, place = LATE[name]
    module = model(after_warm_up(write))
    capture = Capture(module)
    capture.attach()
    for _ in range(2):
        module(rows())
        capture.new_samples()
    with pytest.raises(UnsupportedModule, match=place):
        module(rows())
    capture.detach()


def write_data(m: Model, h: Tensor) -> Tensor:
    m.calls += 1
    if m.calls > 2:
        m.mean.data.copy_(h.detach().mean(0))
    return h


SAVING: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda m: m.state_dict(),
    "copy": copy.deepcopy,
    "pickle": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "child": lambda m: nn.Sequential(m).state_dict(),
}


@pytest.mark.parametrize("how", SAVING)
def test_data_writes_after_a_warm_up_do_not_reach_the_state(how: str) -> None:
    module = model(write_data)
    capture = Capture(module)
    capture.attach()
    for _ in range(2):
        module(rows())
        capture.new_samples()
    SAVING[how](module)
    module(rows())
    with pytest.raises(UnsupportedModule, match="mean"):
        SAVING[how](module)
    capture.detach()
    module.state_dict()


def make_private(module: nn.Module) -> Any:
    engine = PrivacyEngine()
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1),
        data_loader=DataLoader(TensorDataset(rows(32, E)), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return engine, *made


def test_a_checkpoint_of_absorbed_data_is_refused_and_the_ledger_tainted(tmp_path: Path) -> None:
    module = model(write_data)
    engine, module, optimizer, loader = make_private(module)
    for (x,) in loader:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    with pytest.raises(UnsupportedModule, match="mean"):
        engine.save_checkpoint(path=tmp_path / "run", module=module)
    assert not (tmp_path / "run").exists()
    assert engine.get_epsilon(1e-5) == float("inf")
    assert "mean" in engine.report(1e-5)["non_private"]


def test_writes_between_passes_belong_into_public_blocks() -> None:
    module = model(lambda m, h: h + m.mean)
    engine, module, optimizer, loader = make_private(module)
    batches = iter(loader)

    def step() -> None:
        optimizer.zero_grad()
        module(next(batches)[0]).square().mean().backward()
        optimizer.step()

    step()
    with engine.public():
        module.mean.fill_(0.5)
        module.codebook.data.zero_()
        module.register_buffer("schedule", torch.ones(3))
    step()
    module.state_dict()
    module.mean.fill_(0.25)
    with pytest.raises(UnsupportedModule, match=r"mean.*between forward passes.*engine\.public"):
        step()


def test_loading_and_moving_are_no_writes() -> None:
    module = model(lambda m, h: h + m.mean)
    state = copy.deepcopy(module.state_dict())
    state["mean"] += 1
    capture = Capture(module)
    capture.attach()
    module(rows())
    module.load_state_dict(state)
    capture.new_samples()
    module(rows())
    module.double()
    capture.new_samples()
    module(rows().double())
    module.state_dict()
    capture.detach()


def counting(m: Model, h: Tensor) -> Tensor:
    m.calls += 1
    m.count += 1
    m.sixteen.data.add_(1)
    return h


def momentum_teacher(m: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.teacher.lerp_(m.first.weight.detach(), 0.1)
    return h


def renormed(m: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale.data.clamp_(-0.5, 0.5)
    return h


def for_plots(m: Model, h: Tensor) -> Tensor:
    m.cache["attention"] = h.detach().softmax(1)
    m.memory.items[:] = [h]
    m.level = h.detach().mean().item()
    return h


def auxiliary(m: Model, h: Tensor) -> Tensor:
    m.memory.mean = h.square().mean()
    return h


def positions(m: Model, h: Tensor) -> Tensor:
    if "table" not in m._buffers:
        m.register_buffer("table", torch.linspace(0, 1, E), persistent=False)
    return h + m.table


HARMLESS: dict[str, Forward] = {
    "counters": counting,
    "teacher-that-follows-the-weights": momentum_teacher,
    "weights-kept-in-range": renormed,
    "kept-for-plots": for_plots,
    "auxiliary-loss": auxiliary,
    "positions": positions,
    "generator": lambda m, h: h * (torch.rand(E, generator=GENERATOR) > 0.1),
    "nothing": lambda m, h: h,
}
GENERATOR = torch.Generator().manual_seed(5)


@pytest.mark.parametrize("name", HARMLESS)
def test_state_that_follows_no_data_is_accepted(name: str) -> None:
    module = model(HARMLESS[name])
    engine, module, optimizer, loader = make_private(module)
    for epoch in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        module.eval()
        with torch.no_grad():
            module(rows())
        module.train()
        module.state_dict()
        assert engine.step.steps == 4 * (epoch + 1)
    assert engine.get_epsilon(1e-5) < 100
    assert copy.deepcopy(module).calls == module.calls


def test_a_probe_counts_nothing() -> None:
    module, plain = model(counting), model(counting)
    capture = Capture(module)
    capture.attach()
    module(rows())
    plain(rows())
    assert capture.guard.probes == 1
    assert module.calls == plain.calls == 1
    assert int(module.count) == int(plain.count) == 1
    assert torch.equal(module.sixteen, plain.sixteen)
    capture.detach()


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, old_spectral_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_power_iterations_read_weights_alone(norm: Callable[[nn.Module], nn.Module]) -> None:
    module, x = nn.Sequential(norm(nn.Linear(E, E)), nn.Linear(E, 2)), rows()
    other = copy.deepcopy(module)
    capture = Capture(module)
    capture.attach()
    for _ in range(3):
        capture.new_samples()
        found = module(x)
        torch.testing.assert_close(found, other(x))
    module.state_dict()
    capture.detach()


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(E, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(E, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_low_rank_adapters_with_frozen_weights() -> None:
    _, module, optimizer, loader = make_private(LowRank())
    for (x,) in loader:
        optimizer.zero_grad()
        F.mse_loss(module(x), torch.zeros(len(x), 3)).backward()
        optimizer.step()
    module.state_dict()
    assert bool(module.up.weight.any())
    module.base.weight.data[0, 0] += 1
    with pytest.raises(UnsupportedModule, match=r"base\.weight"):
        module.state_dict()


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hashes_tell_contents_apart(dtype: torch.dtype) -> None:
    tensor = rows(67, 129) * 30
    tensor = tensor > 0 if dtype is torch.bool else tensor.to(dtype)
    first = content_hash(tensor)
    assert content_hash(tensor.clone()) == first == content_hash(tensor.t().contiguous().t())
    changed = tensor.clone()
    changed[3, 4] = ~changed[3, 4] if dtype is torch.bool else changed[3, 4] + 64
    assert content_hash(changed) != first
    assert content_hash(tensor[1:]) != content_hash(tensor[:-1])
    assert content_hash(tensor.flip(0)) != first
    assert not same_bits(tensor, changed)
    assert same_bits(tensor, tensor.clone())


def test_hashes_see_two_signs_change_and_nan() -> None:
    tensor = torch.ones(5000)
    changed = tensor.clone()
    changed[[1, 3]] *= -1
    assert content_hash(changed) != content_hash(tensor)
    unknown = torch.full((3,), float("nan"))
    assert same_bits(unknown, unknown.clone())
    assert content_hash(unknown) == content_hash(unknown.clone())
    assert not same_bits(torch.zeros(2), -torch.zeros(2))
    assert isinstance(content_hash(torch.empty(0)), int)
    assert isinstance(content_hash(torch.tensor(1.5)), int)
    assert isinstance(content_hash(torch.arange(7, dtype=torch.uint8)[1:4]), int)


def test_snapshots_put_everything_back() -> None:
    module = model(lambda m, h: h)
    before = copy.deepcopy(vars(module)["cache"]), module.bank, module.queue
    snapshot = Snapshot(module)
    module.cache["x"] = 1
    module.bank.append(torch.ones(2))
    module.queue.append(torch.ones(E))
    module.memory.items.append(torch.ones(1))
    module.mean.data.fill_(3)
    module.scale.data = torch.zeros(E)
    module.calls = 9
    module.later = "new"
    module.register_buffer("late", torch.ones(1))
    changed = snapshot.changes(Snapshot(module))
    assert {"mean", "scale", "calls", "later", "late"} <= changed
    assert snapshot.restore() == []
    assert snapshot.changes(Snapshot(module)) == set()
    assert (module.cache, module.bank, module.queue) == before
    assert not hasattr(module, "later")
    assert not hasattr(module, "late")
    assert bool((module.scale == 1).all())


def test_tensors_too_large_to_copy_are_hashed() -> None:
    module = model(lambda m, h: h)
    snapshot = Snapshot(module, keep=0)
    module.mean.data.fill_(3)
    assert snapshot.changes(Snapshot(module, keep=0)) == {"mean"}
    assert snapshot.restore() == ["mean"]
