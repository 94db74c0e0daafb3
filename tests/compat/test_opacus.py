"""Scripts written for Opacus run with their imports changed, and mean the same."""

from __future__ import annotations

import copy
import io
import math
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpkern import InvalidInput, PrivacyError, PrivacyWarning, UnsupportedModule, accounting
from dpkern.base.rng import Key
from dpkern.compat.opacus import PrivacyEngine
from dpkern.compat.opacus.accountants import (
    GaussianAccountant,
    IAccountant,
    PRVAccountant,
    RDPAccountant,
    create_accountant,
    get_noise_multiplier,
)
from dpkern.compat.opacus.layers import DPLSTM
from dpkern.compat.opacus.schedulers import StepNoise
from dpkern.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpkern.compat.opacus.utils.module_utils import are_state_dict_equal
from dpkern.compat.opacus.validators import ModuleValidator, UnsupportedModuleError
from dpkern.privacy.mechanisms import DPSGD

RECORDS, BATCH = 60, 20


def private(module: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any, PrivacyEngine]:
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    data = TensorDataset(torch.randn(RECORDS, 4), torch.randint(2, (RECORDS,)))
    engine = PrivacyEngine()
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    return *made, engine


def test_batches_are_cut_inside_the_block_and_not_after() -> None:
    module, optimizer, loader, engine = private()
    sizes = []
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
    ) as physical:
        for x, y in physical:
            sizes.append(len(x))
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    assert max(sizes) <= 3
    assert len(sizes) > len(loader)
    assert engine.step.steps == len(loader)
    assert loader.max_physical_batch_size is None
    assert max(len(x) for x, _ in loader) > 3


def test_the_optimizer_shows_what_opacus_shows() -> None:
    _, optimizer, loader, engine = private()
    assert optimizer.noise_multiplier == 1.0
    assert optimizer.max_grad_norm == 1.0
    assert optimizer.expected_batch_size == loader.expected_batch_size == BATCH
    engine.detach()
    assert not hasattr(optimizer, "expected_batch_size")


def test_an_expected_batch_size_that_was_changed_is_refused() -> None:
    module, optimizer, loader, engine = private()
    optimizer.expected_batch_size = 1000
    x, y = next(iter(loader))
    nn.functional.cross_entropy(module(x), y).backward()
    with pytest.raises(InvalidInput, match="make_private was told"):
        optimizer.step()
    assert engine.step.steps == 0


def test_modules_are_validated_and_fixed() -> None:
    mixing = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    errors = ModuleValidator.validate(mixing)
    assert [type(error) for error in errors] == [UnsupportedModuleError] * 2
    assert not ModuleValidator.is_valid(mixing)
    with pytest.raises(UnsupportedModule, match="2 findings"):
        ModuleValidator.validate(mixing, strict=True)
    fixed = ModuleValidator.fix_and_validate(mixing)
    assert isinstance(mixing[1], nn.BatchNorm1d)
    assert isinstance(fixed[1], nn.GroupNorm)  # type: ignore[index]


def test_options_of_fixers_are_refused() -> None:
    with pytest.raises(InvalidInput, match="replace_bn_with_in"):
        ModuleValidator.fix(nn.BatchNorm1d(4), replace_bn_with_in=True)


def test_checkpoints_go_to_open_files_and_come_back() -> None:
    module, optimizer, _, engine = private(unsafe_seed=3)
    kept = io.BytesIO()
    engine.save_checkpoint(path=kept, module=module, optimizer=optimizer)
    kept.seek(0)
    assert torch.load(kept, weights_only=True).keys() >= {"module_state_dict"}
    kept.seek(0)
    other, again, _, resumed = private(unsafe_seed=3)
    with torch.no_grad():
        next(iter(other.parameters())).data.zero_()
    resumed.load_checkpoint(path=kept, module=other, optimizer=again)
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.detach(), q.detach())


def test_a_damaged_open_file_is_refused() -> None:
    module, optimizer, _, engine = private(unsafe_seed=3)
    kept = io.BytesIO()
    engine.save_checkpoint(path=kept, module=module, optimizer=optimizer)
    damaged = bytearray(kept.getvalue())
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(InvalidInput, match="other bytes than were written"):
        engine.load_checkpoint(path=io.BytesIO(bytes(damaged)), module=module)


def test_two_checkpoints_in_one_open_file_are_refused_with_a_remedy() -> None:
    module, optimizer, _, engine = private(unsafe_seed=3)
    kept = io.BytesIO()
    for _ in range(2):
        engine.save_checkpoint(path=kept, module=module, optimizer=optimizer)
    kept.seek(0)
    with pytest.raises(InvalidInput, match=r"truncate\(\) before each"):
        engine.load_checkpoint(path=kept, module=module)
    kept.seek(0)
    kept.truncate()
    engine.save_checkpoint(path=kept, module=module, optimizer=optimizer)
    kept.seek(0)
    engine.load_checkpoint(path=kept, module=module)


@pytest.mark.parametrize("kind", [RDPAccountant, PRVAccountant])
def test_accountants_alone_agree_with_the_certificate(kind: type[IAccountant]) -> None:
    accountant = kind()
    assert accountant.get_epsilon(1e-5) == 0
    for _ in range(3):
        accountant.step(noise_multiplier=1.5, sample_rate=0.02)
    accountant.step(noise_multiplier=1.5, sample_rate=0.02, num_steps=97)
    (multiplier, rate, steps) = accountant.history[0]
    assert (len(accountant), rate, steps) == (1, 0.02, 100)
    assert multiplier == pytest.approx(1.5, rel=1e-4)
    mechanism = DPSGD(noise_multiplier=1.5, max_grad_norm=1.0, arithmetic="float")
    whole = accounting.certify(mechanism, sample_rate=0.02, steps=100, delta=1e-5)
    assert accountant.get_epsilon(1e-5) == whole.epsilon_by(kind._bound)
    accountant.step(noise_multiplier=1.0, sample_rate=0.02)
    assert len(accountant) == 2
    assert accountant.get_epsilon(1e-5) > whole.epsilon_by(kind._bound)
    with pytest.raises(InvalidInput):
        accountant.step(noise_multiplier=1.0, sample_rate=2.0)
    again = kind()
    again.history = [(1.5, 0.02, 100)]
    assert again.get_epsilon(1e-5) == whole.epsilon_by(kind._bound)
    with pytest.raises(InvalidInput):
        again.history = [(1.5, 0.02, 1), (1.5, 0.02, -1)]
    assert again.history[0][2] == 100
    other = kind()
    other.load_state_dict(accountant.state_dict())
    assert other.history == accountant.history
    assert other.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)
    for state in ({}, {**accountant.state_dict(), "mechanism": "nobody's"}):
        with pytest.raises(InvalidInput, match="state_dict"):
            other.load_state_dict(state)
    assert len(accountant) == 2


def test_accountants_are_made_by_name_and_a_limit_theorem_is_none() -> None:
    assert isinstance(create_accountant("rdp"), RDPAccountant)
    assert create_accountant("prv").mechanism() == "prv"
    for name in ("gdp", "nobody's"):
        with pytest.raises(ValueError, match="mechanism"):
            create_accountant(name)
    with pytest.raises(InvalidInput, match="upper bound"):
        GaussianAccountant()


def test_no_step_is_missing_in_an_epsilon() -> None:
    accountant = RDPAccountant()
    accountant.history += [(1.5, 0.02, 100)]
    spent = accountant.get_epsilon(1e-5)
    with pytest.raises(InvalidInput, match="step\\(\\)"):
        accountant.history.append((1.5, 0.02, 100))
    with pytest.raises(InvalidInput, match="history"):
        accountant.history[0] = (9.0, 0.02, 1)
    assert accountant.get_epsilon(1e-5) == spent > 0
    assert type(copy.deepcopy(accountant.history)) is list
    accountant.step(noise_multiplier=0.0, sample_rate=0.5)
    assert accountant.history[-1] == (0.0, 0.5, 1)
    assert accountant.get_epsilon(1e-5) == math.inf


def test_epochs_are_no_fewer_steps_than_in_opacus() -> None:
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.03}
    by_epochs = get_noise_multiplier(**target, epochs=10)  # type: ignore[arg-type]
    assert by_epochs == get_noise_multiplier(**target, steps=333)  # type: ignore[arg-type]
    for wrong in ({"sample_rate": 0.0}, {"sample_rate": 2.0}):
        with pytest.raises(InvalidInput, match="sample_rate"):
            get_noise_multiplier(**{**target, **wrong}, epochs=10)  # type: ignore[arg-type]


def test_states_are_compared_by_keys_and_bits() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert not are_state_dict_equal(one.state_dict(), other.state_dict())
    other.load_state_dict(one.state_dict())
    assert are_state_dict_equal(one.state_dict(), other.state_dict())
    assert not are_state_dict_equal(one.state_dict(), {"weight": one.weight})


def test_schedules_change_the_private_optimizer() -> None:
    _, optimizer, _, _ = private()
    StepNoise(optimizer, step_size=1, gamma=0.5).step()
    assert optimizer.noise_multiplier == 0.5


def test_wrong_values_are_value_errors() -> None:
    with pytest.raises(ValueError, match="accountant"):
        PrivacyEngine(accountant="nobody's")


def test_noise_for_a_target_meets_it_and_no_less_would() -> None:
    run = {"sample_rate": 0.02, "steps": 100, "delta": 1e-5}
    found = get_noise_multiplier(
        target_epsilon=2.0, target_delta=1e-5, sample_rate=0.02, epochs=2, accountant="prv"
    )

    def spent(multiplier: float) -> float:
        mechanism = DPSGD(noise_multiplier=multiplier, max_grad_norm=1.0)
        return accounting.certify(mechanism, **run).epsilon  # type: ignore[arg-type]

    assert spent(found) <= 2.0 < spent(0.99 * found)
    with pytest.raises(InvalidInput, match="upper bound"):
        get_noise_multiplier(
            target_epsilon=2.0, target_delta=1e-5, sample_rate=0.02, steps=9, accountant="gdp"
        )
    with pytest.raises(InvalidInput, match="either epochs or steps"):
        get_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.02)


def test_replaced_layers_are_torchs_own() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = DPLSTM(1, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.lstm(x[..., None])[0][:, -1])
            return out

    module, optimizer, loader, engine = private(Tagger(), batch_first=True)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert engine.step.steps == len(loader)


def test_what_the_example_scripts_import_is_there() -> None:
    from dpkern.compat.opacus.data_loader import DPDataLoader
    from dpkern.compat.opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from dpkern.compat.opacus.grad_sample.functorch import make_functional

    _, _, loader, _ = private()
    assert isinstance(loader, DPDataLoader)
    assert DifferentiallyPrivateDistributedDataParallel is nn.parallel.DistributedDataParallel
    with pytest.raises(InvalidInput, match="DPStep"):
        make_functional(nn.Linear(2, 2))


def test_a_loader_made_before_the_run_becomes_its_own() -> None:
    from dpkern.compat.opacus.data_loader import DPDataLoader

    data = TensorDataset(torch.randn(RECORDS, 4), torch.randint(2, (RECORDS,)))
    before = DPDataLoader.from_data_loader(DataLoader(data, batch_size=BATCH))
    module = nn.Linear(4, 2)
    rules: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}

    def made(**options: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        parts = {"module": module, "optimizer": optimizer, "data_loader": before}
        return PrivacyEngine().make_private(**parts, **rules, **options)

    for options, name in (({"unsafe_seed": 1}, "unsafe_seed"), ({"sampling": "fixed"}, "sampling")):
        with pytest.raises(InvalidInput, match=f"{name}.*ordinary loader"):
            made(**options)
    _, optimizer, loader = made(max_physical_batch_size=7)
    assert loader is before
    assert loader.max_physical_batch_size == 7
    for x, y in before:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    module = nn.Linear(4, 2)
    known = DPDataLoader(DataLoader(data, batch_size=BATCH), key=Key.from_unsafe_seed(1))
    shard = DPDataLoader(DataLoader(data, batch_size=BATCH), shard=(0, 2))
    for refused in (before, known, shard):
        before = refused
        with pytest.raises(InvalidInput, match="not private yet"):
            made()
    with pytest.raises(InvalidInput, match="secure generator"):
        DPDataLoader.from_data_loader(DataLoader(data), generator=torch.Generator())
    with pytest.raises(InvalidInput, match="distributed"):
        DPDataLoader.from_data_loader(DataLoader(data), distributed=True)


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        ("", "GradSampleModule", "the module itself"),
        (".grad_sample", "GradSampleModule", "the module itself"),
        (".grad_sample", "register_grad_sampler", "captured by operation"),
        (".optimizers", "DPOptimizer", "the same object comes back"),
    ],
)
def test_names_without_a_counterpart_are_refused_with_a_remedy(
    module: str, name: str, says: str
) -> None:
    place = import_module(f"dpkern.compat.opacus{module}")
    with pytest.raises(InvalidInput, match=f"{name}.*{says}"):
        getattr(place, name)
    with pytest.raises(ImportError):
        exec(f"from {place.__name__} import Unknown")


def test_an_accountant_is_not_saved_without_its_ledger() -> None:
    *_, engine = private()
    with pytest.raises(PrivacyError, match="save_checkpoint"):
        engine.accountant.state_dict()
    with pytest.raises(PrivacyError, match="load_state_dict"):
        engine.accountant.load_state_dict({})


def test_steps_that_no_ledger_has_are_warned_of_once() -> None:
    module, optimizer, loader, engine = private()

    def epoch(model: Any, rule: Any, batches: Any) -> None:
        for x, y in batches:
            rule.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            rule.step()

    optimizer.param_groups[0]["momentum"] = 0.9
    epoch(module, optimizer, loader)  # no warning: pytest makes errors of them
    other, again, batches, _ = private()
    again.load_state_dict(optimizer.state_dict())
    with pytest.warns(PrivacyWarning, match="epsilon does not count") as told:
        epoch(other, again, batches)
    assert len(told) == 1
    kept = io.BytesIO()
    engine.save_checkpoint(path=kept, module=module, optimizer=optimizer)
    kept.seek(0)
    other, again, batches, resumed = private()
    resumed.load_checkpoint(path=kept, module=other, optimizer=again)
    epoch(other, again, batches)
    assert resumed.step.steps == 2 * len(loader)
