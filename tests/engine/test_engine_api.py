"""``PrivacyEngine``: loops written for Opacus, options, accounting, other ways of use."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import dpkern
from dpkern import PrivacyEngine
from dpkern.base.errors import InvalidInput, PrivacyError, UnsupportedModule
from dpkern.engine import BatchMemoryManager, PrivateLoader
from dpkern.engine.arguments import MakePrivateOptions
from dpkern.engine.provenance import YieldedBatch
from dpkern.ops import testing
from dpkern.privacy.mechanisms import DPSGD
from tests.engine.engine_run import BATCH, DELTA, ROWS, Run, data

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


def test_an_opacus_loop_runs_with_only_the_imports_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = OPACUS_LOOP.format(package="dpkern", memory="dpkern.engine")
    with torch.random.fork_rng(devices=[]):
        exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines()[1].endswith(" 8")


def test_every_argument_of_opacus_is_known() -> None:
    opacus = pytest.importorskip("opacus")
    known = set(MakePrivateOptions.__dataclass_fields__)
    for name in ("make_private", "make_private_with_epsilon"):
        ours = inspect.signature(getattr(PrivacyEngine, name)).parameters
        theirs = inspect.signature(getattr(opacus.PrivacyEngine, name)).parameters
        assert set(theirs) - {"self", "kwargs"} <= set(ours) | known


@pytest.mark.filterwarnings("ignore")  # Opacus' own
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_noise_the_updates_are_those_of_opacus(clipping: str, reduction: str) -> None:
    bound: Any = 0.3 if clipping == "flat" else [0.1, 0.2, 0.3, 0.4]
    found = []
    for package in ("dpkern", "opacus"):
        module, optimizer, loader = trained_by(package, clipping, reduction, bound)
        criterion = nn.CrossEntropyLoss(reduction=reduction)
        for x, y in loader:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    testing.assert_close("parameters", found[0], found[1], 1e-4)


def trained_by(package: str, clipping: str, reduction: str, bound: Any) -> Any:
    """The same model and batches under either package."""
    run = Run(private=False)
    batches = DataLoader(data(), batch_size=BATCH)
    options = {
        "module": run.module,
        "optimizer": torch.optim.SGD(run.module.parameters(), lr=0.5, momentum=0.9),
        "noise_multiplier": 0.0,
        "max_grad_norm": bound,
        "clipping": clipping,
        "loss_reduction": reduction,
    }
    if package == "opacus":
        theirs = pytest.importorskip("opacus").PrivacyEngine()
        return theirs.make_private(data_loader=batches, poisson_sampling=False, **options)
    numbers = {"sample_rate": BATCH / ROWS, "expected_batch_size": BATCH}
    made = run.engine.make_private(data_loader=None, **numbers, **options)
    return *made[:2], batches


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
    assert run.engine.report(DELTA)["calibrated_to"] == "certified"


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
        model(torch.randn(8, 4)).sum(1).mean().backward()
        optimizer.step()
    assert engine.step.steps == 3
    model(torch.randn(8, 4)).sum(1).mean().backward()
    with pytest.raises(PrivacyError):
        model(torch.randn(8, 4)).sum(1).mean().backward()


def test_empty_draws_are_steps() -> None:
    run = Run(data_loader=DataLoader(data(5), batch_size=1), noise_multiplier=0.5)
    sizes: list[int] = []
    own = run.loader.on_batch

    def heard(batch: YieldedBatch) -> None:
        sizes.append(batch.size)
        own(batch)

    run.loader.on_batch = heard
    run.train(epochs=4)
    assert 0 in sizes
    assert run.engine.step.steps == len(sizes) == 20
    assert bool(torch.isfinite(run.values()).all())


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
        run.module.features(x).square().sum(1).mean().backward()  # type: ignore[operator]
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


def test_a_scaler_and_early_groups_are_refused_together() -> None:
    """Float groups are clipped inside the backward pass, when no scaler has told its scale."""
    run = Run(clipping="per_layer", arithmetic="float")
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(iter(run.loader))
    scaler.scale(nn.functional.cross_entropy(run.module(x), y)).backward()
    with pytest.raises(PrivacyError, match="GradScaler"):
        scaler.step(run.optimizer)
    assert run.engine.step.steps == 0


def test_exact_groups_know_the_scale_of_a_scaler() -> None:
    """Exact groups are clipped in the step: gradients 1024 times as large are scaled back."""
    plain, scaled = (Run(clipping="per_layer") for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    for run in (plain, scaled):
        x, y = next(iter(run.loader))
        loss = nn.functional.cross_entropy(run.module(x), y)
        (scaler.scale(loss) if run is scaled else loss).backward()
        (scaler.step(run.optimizer) if run is scaled else run.optimizer.step())
        assert run.engine.step.steps == 1
    assert run.engine.step.plan.arithmetic == "exact"
    assert torch.equal(scaled.values(), plain.values())


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


def test_classes_made_by_exec_have_no_module_and_train() -> None:
    names: dict[str, Any] = {}
    exec(_NET, names)
    run = Run(module=names["Net"]())
    assert run.train(most=2) == 2


_NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 2)

    def forward(self, x):
        return self.one(x)
"""
