"""``PrivacyEngine``: loops written for Opacus, options, accounting, resume and refusals."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern import PrivacyEngine, testing
from dpkern.engine import BatchMemoryManager, PrivateLoader
from dpkern.engine.arguments import Options
from dpkern.engine.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
)
from dpkern.errors import DPKernError, InvalidInput, PrivacyError, UnsupportedModule
from dpkern.mechanisms import DPSGD

ROWS, BATCH, DELTA = 48, 8, 1e-5


def data(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


class Run:
    """Module, optimizer, loader and engine, before and after ``make_private``."""

    def __init__(self, *, kind: str = "SGD", private: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = options.pop("module", None) or nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)
        )
        self.optimizer: Any = getattr(torch.optim, kind)(self.module.parameters(), lr=0.1)
        self.loader: Any = options.pop("data_loader", None) or DataLoader(
            data(), batch_size=BATCH, shuffle=True
        )
        self.engine = PrivacyEngine(accountant=options.pop("accountant", "prv"))
        if private:
            self.make(**options)

    def make(self, **options: Any) -> Any:
        given = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "unsafe_seed": 3} | options
        made = self.engine.make_private(
            module=self.module, optimizer=self.optimizer, data_loader=self.loader, **given
        )
        self.loader = made[-1]
        return made

    def train(self, epochs: int = 1, most: int = 10**9) -> int:
        """Typical loop; returns the number of batches."""
        criterion = nn.CrossEntropyLoss()
        taken = 0
        for _ in range(epochs):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                criterion(self.module(x), y).backward()
                self.optimizer.step()
                taken += 1
                if taken == most:
                    return taken
        return taken

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.module.parameters()])


OPACUS_LOOP = """
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from {package} import PrivacyEngine
from {memory} import BatchMemoryManager

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
train_loader = DataLoader(data, batch_size=16)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    target_epsilon=8.0,
    target_delta=1e-5,
    epochs=2,
    max_grad_norm=1.0,
)
print(f"Using sigma={{optimizer.noise_multiplier:.2f}} and C={{optimizer.max_grad_norm}}")
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    model.train()
    losses = []
    with BatchMemoryManager(
        data_loader=train_loader, max_physical_batch_size=5, optimizer=optimizer
    ) as memory_safe_data_loader:
        for i, (images, target) in enumerate(memory_safe_data_loader):
            optimizer.zero_grad()
            output = model(images)
            loss = criterion(output, target)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
    epsilon = privacy_engine.get_epsilon(1e-5)
    assert len(losses) >= 4 and 0 < epsilon < 8.01, (len(losses), epsilon)
    assert abs(privacy_engine.accountant.get_epsilon(delta=1e-5) - epsilon) < 1e-9
with torch.no_grad():
    model.eval()
    print(model(data.tensors[0]).argmax(1).sum().item(), len(privacy_engine.accountant))
"""


def test_an_opacus_loop_runs_with_only_the_imports_changed() -> None:
    code = OPACUS_LOOP.format(package="dpkern", memory="dpkern.engine")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].endswith(" 8")


def test_every_argument_of_opacus_is_known() -> None:
    opacus = pytest.importorskip("opacus")
    known = set(Options.__dataclass_fields__)
    for name in ("make_private", "make_private_with_epsilon"):
        ours = inspect.signature(getattr(PrivacyEngine, name)).parameters
        theirs = inspect.signature(getattr(opacus.PrivacyEngine, name)).parameters
        assert set(theirs) - {"self", "kwargs"} <= set(ours) | known


def test_the_same_objects_come_back() -> None:
    run = Run(private=False)
    names = list(run.module.state_dict())
    module, optimizer, loader = run.make()
    assert module is run.module
    assert optimizer is run.optimizer
    assert isinstance(loader, PrivateLoader)
    assert isinstance(loader, DataLoader)
    assert list(module.state_dict()) == names
    assert len(loader) == ROWS // BATCH


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop"])
@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_epochs_are_accounted(kind: str, arithmetic: str) -> None:
    run = Run(kind=kind, arithmetic=arithmetic, unsafe_seed=None)
    before = run.values()
    assert run.engine.get_epsilon(DELTA) == 0
    assert run.train(epochs=2) == 12
    assert not torch.equal(run.values(), before)
    expected = dpkern.accounting.epsilon(
        run.engine.step.plan, sample_rate=1 / 6, steps=12, delta=DELTA
    )
    assert run.engine.get_epsilon(DELTA) == expected
    report = run.engine.report(DELTA)
    assert report["epsilon_certified"] == expected
    assert report["arithmetic"] == arithmetic
    history = run.engine.accountant.history
    assert [(rate, steps) for _, rate, steps in history] == [(1 / 6, 12)]
    assert len(run.engine.accountant) == 12


def test_tiers_and_styles_agree_on_the_update() -> None:
    """With bounds that clip nothing, every style without noise is the mean of the gradients."""
    found = []
    for options in (
        {},
        {"arithmetic": "exact"},
        {"clipping": "per_layer"},
        {"clipping": "group", "clip_groups": (0, 0, 1, 1)},
        {"clipping": "group", "clip_groups": lambda name: int(name.startswith("2"))},
        {"max_physical_batch_size": 3},
        {"keep_budget": 0},
    ):
        run = Run(noise_multiplier=0.0, max_grad_norm=1e6, **options)
        run.train()
        found.append(run.values())
    for values in found[1:]:
        testing.assert_close("parameters", values, found[0], 1e-4)


def test_accountants() -> None:
    best, renyi = Run(unsafe_seed=None), Run(unsafe_seed=None, accountant="rdp")
    for run in (best, renyi):
        run.train()
    assert 0 < best.engine.get_epsilon(DELTA) < renyi.engine.get_epsilon(DELTA) < 20
    assert Run().train() == 6
    seeded = Run()
    seeded.train()
    assert seeded.engine.get_epsilon(DELTA) == math.inf
    assert best.engine.accountant.mechanism() == "prv"
    for name in ("gdp", "moments"):
        with pytest.raises(InvalidInput, match="accountant"):
            PrivacyEngine(accountant=name)
    with pytest.raises(InvalidInput, match="delta"):
        best.engine.get_epsilon(0.0)


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "shuffled"])
def test_noise_for_a_target(sampling: str) -> None:
    run = Run(private=False)
    made = run.engine.make_private_with_epsilon(
        module=run.module,
        optimizer=run.optimizer,
        data_loader=run.loader,
        target_epsilon=3.0,
        target_delta=DELTA,
        epochs=2,
        max_grad_norm=1.0,
        sampling=sampling,
    )
    run.loader = made[2]
    run.train(epochs=2)
    assert 2.9 < run.engine.get_epsilon(DELTA) <= 3.0
    assert run.engine.report(DELTA)["sampling"] == sampling


def test_a_mechanism_instead_of_numbers() -> None:
    mechanism = DPSGD(noise_multiplier=2.0, max_grad_norm=0.1, clipping="automatic")
    run = Run(noise_multiplier=None, max_grad_norm=None, mechanism=mechanism)
    run.train(most=2)
    assert run.engine.step.mechanism is mechanism
    assert run.optimizer.noise_multiplier == 2.0
    for extra in ({"noise_multiplier": 1.0}, {"max_grad_norm": 1.0}, {"clip_groups": (0,)}):
        with pytest.raises(InvalidInput, match="mechanism"):
            Run(**({"noise_multiplier": None, "max_grad_norm": None} | extra), mechanism=mechanism)


def test_ghost_mode_hands_the_criterion_back() -> None:
    run, criterion = Run(private=False), nn.CrossEntropyLoss()
    made = run.make(grad_sample_mode="ghost", criterion=criterion)
    assert made[2] is criterion
    assert run.train(most=1) == 1


def test_without_a_loader_each_forward_pass_brings_new_samples() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=None, noise_multiplier=1.0,
        max_grad_norm=1.0, sample_rate=0.1, expected_batch_size=8,
    )  # fmt: skip
    assert made[2] is None
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    assert engine.step.steps == 3
    model(torch.randn(8, 4)).sum().backward()
    with pytest.raises(PrivacyError):
        model(torch.randn(8, 4)).sum().backward()


def test_public_passes_join_the_step() -> None:
    run = Run(noise_multiplier=0.0, max_grad_norm=math.inf, max_physical_batch_size=4)
    twin = Run(noise_multiplier=0.0, max_grad_norm=math.inf)
    for part in (run, twin):
        for x, y in part.loader:
            part.optimizer.zero_grad()
            with part.engine.public():
                sum(p.square().sum() for p in part.module.parameters()).backward()
            nn.functional.cross_entropy(part.module(x), y).backward()
            part.optimizer.step()
    # The penalty counts once per logical batch, however it is split.
    testing.assert_close("parameters", run.values(), twin.values(), 1e-4)
    assert run.engine.step.steps == 6


@pytest.mark.parametrize("stop", [4, 6, 8])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop"])
def test_seeded_runs_resume_identically(stop: int, kind: str, tmp_path: Path) -> None:
    whole = Run(kind=kind, max_physical_batch_size=5)
    whole.train(epochs=2)
    first = Run(kind=kind, max_physical_batch_size=5)
    while first.engine.step.steps < stop:
        for x, y in first.loader:
            first.optimizer.zero_grad()
            nn.functional.cross_entropy(first.module(x), y).backward()
            first.optimizer.step()
            if first.engine.step.steps == stop and first.loader.final:
                break
    path = tmp_path / "run.pt"
    first.engine.save_checkpoint(path=path, module=first.module, optimizer=first.optimizer)
    resumed = Run(kind=kind, max_physical_batch_size=5)
    resumed.engine.load_checkpoint(path=path, module=resumed.module, optimizer=resumed.optimizer)
    assert resumed.engine.step.steps == stop
    while resumed.engine.step.steps < 12:
        resumed.train()
    assert torch.equal(resumed.values(), whole.values())
    assert resumed.engine.accountant.history == whole.engine.accountant.history


def test_unseeded_resume_keeps_the_history() -> None:
    first, second = Run(unsafe_seed=None), Run(unsafe_seed=None)
    first.train(most=3)
    state = first.engine.state_dict()
    assert "key" not in repr(state).replace("dict_keys", "")
    second.engine.load_state_dict(state)
    assert second.engine.get_epsilon(DELTA) == first.engine.get_epsilon(DELTA)
    assert second.engine.step.key._secret != first.engine.step.key._secret
    assert second.train(most=100) == 3


def test_nothing_is_saved_between_a_batch_and_its_step() -> None:
    run = Run(max_physical_batch_size=2)
    x, y = next(iter(run.loader))
    nn.functional.cross_entropy(run.module(x), y).backward()
    with pytest.raises(PrivacyError, match=r"optimizer\.step"):
        run.engine.state_dict()
    run.optimizer.step()
    with pytest.raises(PrivacyError):  # parts of the logical batch are still to come
        run.engine.state_dict()


def test_states_of_other_runs_are_refused() -> None:
    first = Run()
    first.train(most=2)
    state = first.engine.state_dict()
    others = (
        Run(noise_multiplier=2.0),
        Run(unsafe_seed=4),
        Run(sampling="fixed"),
        Run(data_loader=DataLoader(data(), batch_size=ROWS)),
    )
    for other in others:
        before = other.engine.state_dict()
        with pytest.raises(InvalidInput):
            other.engine.load_state_dict(state)
        assert other.engine.state_dict() == before
    for bad in ({}, None, state | {"version": 9}, state | {"loader": None}):
        with pytest.raises(InvalidInput):
            Run().engine.load_state_dict(bad)
    with pytest.raises(PrivacyError):
        first.engine.load_state_dict(state)


def test_detach_and_attach() -> None:
    run = Run()
    run.train(most=2)
    run.engine.detach()
    assert type(next(run.module.parameters())) is nn.Parameter
    x, y = data()[:BATCH]
    nn.functional.cross_entropy(run.module(x), y).backward()
    assert next(run.module.parameters()).grad is not None
    run.optimizer.step()
    run.optimizer.zero_grad()
    assert run.engine.step.steps == 2
    run.engine.attach()
    run.engine.attach()
    run.train(most=2)
    assert run.engine.step.steps == 4


def test_validate_admits_other_functions_of_the_module() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.features(x))

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).tanh()

    run = Run(module=Half())
    run.engine.validate(run.module.features, torch.randn(5, 4))  # type: ignore[arg-type]
    for x, _ in run.loader:
        run.optimizer.zero_grad()
        run.module.features(x).square().sum().backward()  # type: ignore[operator]
        run.optimizer.step()
    assert run.engine.step.steps == 6
    module = run.module
    run.engine.validate(None, torch.randn(5, 4))

    def mixing(x: torch.Tensor) -> torch.Tensor:
        hidden = module.body(x[:, None])  # type: ignore[operator]
        return hidden - hidden.mean(0)

    with pytest.raises(UnsupportedModule, match="other samples"):
        run.engine.validate(mixing, torch.randn(5, 4))
    assert run.train(most=2) == 2


def test_incompatible_modules() -> None:
    mixing = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    engine = PrivacyEngine()
    assert not engine.is_compatible(module=mixing)
    with pytest.raises(UnsupportedModule, match="BatchNorm"):
        Run(module=mixing)
    assert type(next(mixing.parameters())) is nn.Parameter
    fixed = PrivacyEngine.get_compatible_module(mixing)
    assert fixed is not mixing
    assert isinstance(mixing[2], nn.BatchNorm2d)
    assert engine.is_compatible(module=fixed)
    assert Run(module=fixed).train(most=2) == 2


def twice(run: Run) -> None:
    run.make()
    run.make()


def shared_module(run: Run) -> None:
    run.make()
    other = torch.optim.SGD(run.module.parameters(), lr=0.1)
    PrivacyEngine().make_private(
        module=run.module, optimizer=other, data_loader=DataLoader(data()), noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip


BAD: list[tuple[str, Callable[[Run], object], type[DPKernError], str]] = [
    ("no noise", lambda r: r.make(noise_multiplier=None), InvalidInput, "noise_multiplier"),
    ("no bound", lambda r: r.make(max_grad_norm=None), InvalidInput, "max_grad_norm"),
    ("noise", lambda r: r.make(noise_multiplier=-1.0), InvalidInput, "noise_multiplier"),
    ("small noise", lambda r: r.make(noise_multiplier=1e-3), PrivacyError, "noise_multiplier"),
    ("bound", lambda r: r.make(max_grad_norm=0), InvalidInput, "max_grad_norm"),
    ("bounds", lambda r: r.make(max_grad_norm=[1.0] * 4), InvalidInput, "max_grad_norm"),
    (
        "few bounds",
        lambda r: r.make(max_grad_norm=[1.0], clipping="per_layer"),
        InvalidInput,
        "max_grad_norm",
    ),
    ("adaptive", lambda r: r.make(clipping="adaptive"), InvalidInput, "clipping"),
    ("clipping", lambda r: r.make(clipping="layer"), InvalidInput, "clipping"),
    ("groups", lambda r: r.make(clipping="group"), InvalidInput, "groups"),
    ("batch first", lambda r: r.make(batch_first=False), InvalidInput, "batch_first"),
    (
        "generator",
        lambda r: r.make(noise_generator=torch.Generator()),
        InvalidInput,
        "noise_generator",
    ),
    ("mode", lambda r: r.make(grad_sample_mode="ghost_fsdp"), InvalidInput, "grad_sample_mode"),
    ("wrap", lambda r: r.make(wrap_model=False), InvalidInput, "wrap_model"),
    ("random", lambda r: r.make(rand_on_empty=True), InvalidInput, "rand_on_empty"),
    ("unknown", lambda r: r.make(max_batch=3), InvalidInput, "max_batch"),
    ("sampling", lambda r: r.make(sampling="all"), InvalidInput, "sampling"),
    (
        "contradiction",
        lambda r: r.make(sampling="poisson", poisson_sampling=False),
        InvalidInput,
        "sampling",
    ),
    ("rate", lambda r: r.make(sample_rate=0.1), InvalidInput, "sample_rate"),
    ("reduction", lambda r: r.make(loss_reduction="none"), InvalidInput, "loss_reduction"),
    ("arithmetic", lambda r: r.make(arithmetic="int"), InvalidInput, "arithmetic"),
    ("seed", lambda r: r.make(unsafe_seed=-1), InvalidInput, "unsafe_seed"),
    ("rounds", lambda r: r.make(rounds=7), InvalidInput, "rounds"),
    ("part", lambda r: r.make(max_physical_batch_size=0), InvalidInput, "max_physical_batch_size"),
    ("module", lambda r: setattr(r, "module", "net") or r.make(), InvalidInput, "module"),
    ("optimizer", lambda r: setattr(r, "optimizer", "sgd") or r.make(), InvalidInput, "optimizer"),
    ("loader", lambda r: setattr(r, "loader", data()) or r.make(), InvalidInput, "data_loader"),
    ("twice", twice, InvalidInput, "make_private"),
    ("shared", shared_module, InvalidInput, "module"),
    ("early report", lambda r: r.engine.report(DELTA), InvalidInput, "engine"),
    ("early state", lambda r: r.engine.state_dict(), InvalidInput, "engine"),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_refused(act: Callable[[Run], object], error: type[DPKernError], name: str) -> None:
    run = Run(private=False)
    module, optimizer = run.module, run.optimizer
    with pytest.raises(error) as raised:
        act(run)
    assert raised.value.name == name
    if name not in ("make_private", "module") or run.module == "net":
        assert type(next(module.parameters())) is nn.Parameter
        assert "step" not in optimizer.__dict__


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan])
def test_refused_targets(target: float) -> None:
    run = Run(private=False)
    with pytest.raises(InvalidInput, match="target_epsilon"):
        run.engine.make_private_with_epsilon(
            module=run.module, optimizer=run.optimizer, data_loader=run.loader,
            target_epsilon=target, target_delta=DELTA, epochs=1, max_grad_norm=1.0,
        )  # fmt: skip


def test_accumulating_over_batches_is_refused_with_the_way_out() -> None:
    run = Run()
    batches = iter(run.loader)
    x, y = next(batches)
    nn.functional.cross_entropy(run.module(x), y).backward()
    with pytest.raises(PrivacyError, match="max_physical_batch_size"):
        next(batches)
    run.engine.drop()
    assert run.train(most=2) == 2


SCHEDULES: list[tuple[str, Callable[[Any], Any], str, list[float]]] = [
    ("noise", lambda o: ExponentialNoise(o, gamma=0.5), "noise_multiplier", [4, 2, 1, 0.5]),
    (
        "step noise",
        lambda o: StepNoise(o, step_size=2, gamma=0.5),
        "noise_multiplier",
        [4, 4, 2, 2],
    ),
    (
        "lambda noise",
        lambda o: LambdaNoise(o, noise_lambda=lambda t: 1 / (1 + t)),
        "noise_multiplier",
        [4, 2, 4 / 3, 1],
    ),
    ("bound", lambda o: ExponentialGradClip(o, gamma=0.5), "max_grad_norm", [8, 4, 2, 1]),
    (
        "step bound",
        lambda o: StepGradClip(o, step_size=3, gamma=0.5),
        "max_grad_norm",
        [8, 8, 8, 4],
    ),
    (
        "lambda bound",
        lambda o: LambdaGradClip(o, scheduler_function=lambda t: 1 + t),
        "max_grad_norm",
        [8, 16, 24, 32],
    ),
]


@pytest.mark.parametrize(
    ("make", "name", "values"), [row[1:] for row in SCHEDULES], ids=[row[0] for row in SCHEDULES]
)
def test_schedules(make: Callable[[Any], Any], name: str, values: list[float]) -> None:
    run = Run(noise_multiplier=4.0, max_grad_norm=8.0)
    schedule = make(run.optimizer)
    seen = []
    state: dict[str, Any] = {}
    for epoch in range(4):
        seen.append(getattr(run.optimizer, name))
        run.train(most=1)
        if epoch == 2:
            state = {"engine": run.engine.state_dict(), "schedule": schedule.state_dict()}
        schedule.step()
    assert seen == pytest.approx(values)
    mechanism = run.engine.step.mechanism
    assert getattr(mechanism, name) == getattr(run.optimizer, name)
    multipliers = [entry[0] for entry in run.engine.accountant.history for _ in range(entry[2])]
    if name == "noise_multiplier":
        assert multipliers == pytest.approx(values, rel=1e-3)
    resumed = Run(noise_multiplier=4.0, max_grad_norm=8.0)
    again = make(resumed.optimizer)
    resumed.engine.load_state_dict(state["engine"])
    again.load_state_dict(state["schedule"])
    assert getattr(resumed.optimizer, name) == pytest.approx(values[2])
    again.step()
    assert getattr(resumed.optimizer, name) == pytest.approx(values[3])


def test_schedules_refuse() -> None:
    run = Run(max_physical_batch_size=1)
    with pytest.raises(InvalidInput, match="make_private"):
        ExponentialNoise(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), gamma=0.5)
    with pytest.raises(InvalidInput, match="gamma"):
        ExponentialNoise(run.optimizer, gamma=-0.5)
    with pytest.raises(InvalidInput, match="step_size"):
        StepNoise(run.optimizer, step_size=0, gamma=0.5)
    schedule = ExponentialNoise(run.optimizer, gamma=0.5)
    for bad in ({}, None, {"last_epoch": -3, "base": 1.0}):
        with pytest.raises(InvalidInput):
            schedule.load_state_dict(bad)  # type: ignore[arg-type]
    run.train(most=1)
    assert not run.loader.final
    with pytest.raises(PrivacyError, match="between steps"):
        schedule.step()
    assert (schedule.last_epoch, run.optimizer.noise_multiplier) == (0, 1.0)
    tiny = Run(noise_multiplier=0.1)
    shrinking = ExponentialNoise(tiny.optimizer, gamma=0.5)
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        shrinking.step()
    assert shrinking.last_epoch == 0


def test_per_layer_bounds_shrink_together() -> None:
    run = Run(clipping="per_layer", max_grad_norm=[1.0, 2.0, 3.0, 4.0])
    schedule = ExponentialGradClip(run.optimizer, gamma=0.5)
    run.train(most=1)
    schedule.step()
    assert run.optimizer.max_grad_norm == (0.5, 1.0, 1.5, 2.0)
    run.train(most=1)


def test_a_scaler_and_early_groups_are_refused_together() -> None:
    run = Run(clipping="per_layer")
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(iter(run.loader))
    scaler.scale(nn.functional.cross_entropy(run.module(x), y)).backward()
    with pytest.raises(PrivacyError, match="GradScaler"):
        scaler.step(run.optimizer)
    assert run.engine.step.steps == 0


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    run = Run()
    run.train(most=1)
    with pytest.raises(InvalidInput, match="path"):
        run.engine.load_checkpoint(path=tmp_path / "none.pt", module=run.module)
    path = tmp_path / "run.pt"
    run.engine.save_checkpoint(path=path, module=run.module, checkpoint_dict={"epoch": 3})
    other = Run()
    with pytest.raises(InvalidInput, match="optimizer_state_dict"):
        other.engine.load_checkpoint(path=path, module=other.module, optimizer=other.optimizer)
    content = other.engine.load_checkpoint(path=path, module=other.module)
    assert content["epoch"] == 3
    assert other.engine.step.steps == 1


def test_importing_dpkern_stays_light() -> None:
    code = (
        "import sys, dpkern\n"
        "print([m for m in sys.modules if m.startswith('dpkern.engine.')])\n"
        "print(dpkern.PrivacyEngine.__name__, 'PrivacyEngine' in dir(dpkern) or dpkern.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "[]"
    assert "PrivacyEngine" in done.stdout.splitlines()[1]
    for module in (dpkern, dpkern.engine):
        with pytest.raises(AttributeError, match="nothing"):
            module.nothing  # noqa: B018
    assert BatchMemoryManager is dpkern.engine.loader.BatchMemoryManager
