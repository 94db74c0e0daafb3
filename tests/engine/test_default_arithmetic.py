"""The arithmetic of runs that ask for none: integers where they are made in place, else floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpkern import PrivacyEngine
from dpkern.base import dispatch
from dpkern.engine import clipping
from dpkern.nn import BlockCirculantLinear
from dpkern.privacy.accounting.history import BATCHED_BITS, REAL_SUMS
from dpkern.privacy.mechanisms import DPSGD
from tests.engine.replayed_loops import loop
from tests.engine.test_engine_program_exact import Seen

DELTA = 1e-3
BY_DEFAULT = "sums are made in floating point by default, because "


class Model(nn.Sequential):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def trained(module: nn.Module | None = None, **options: Any) -> PrivacyEngine:
    """An engine after two steps."""
    torch.manual_seed(0)
    module = Model() if module is None else module
    dtype = next(module.parameters()).dtype
    data = TensorDataset(torch.randn(32, 5, dtype=dtype), torch.randint(3, (32,)))
    engine = PrivacyEngine()
    if "mechanism" not in options:
        options = {"noise_multiplier": 1.1, "max_grad_norm": 1.0} | options
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=16),
        sampling="fixed",
        **options,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(x).float(), y).backward()
        optimizer.step()
    return engine


def reasons(engine: PrivacyEngine) -> list[str]:
    """What certificate and report say of a default that is not exact."""
    notes = engine.step.certify(DELTA).notes
    assert list(notes) == engine.report(DELTA)["certificate"]["notes"]
    return [note for note in notes if note.startswith(BY_DEFAULT)]


GROUPS: dict[str, dict[str, Any]] = {
    "flat": {},
    "per layer": {"clipping": "per_layer"},
    "groups": {"clipping": "group", "clip_groups": [0, 0, 1, 1]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", GROUPS)
def test_clipping_on_a_cpu_is_exact(groups: str, dtype: torch.dtype) -> None:
    engine = trained(Model().to(dtype), **GROUPS[groups])
    assert engine.step.plan.arithmetic == "exact"
    assert engine.step.certify(DELTA).certified_for == BATCHED_BITS
    assert engine.report(DELTA)["arithmetic"] == "exact"
    assert reasons(engine) == []
    assert math.isfinite(engine.get_epsilon(DELTA))


FLOATS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "automatic": (Model, {"clipping": "automatic"}, "automatic clipping"),
    "float64": (lambda: Model().double(), {}, "torch.float64"),
    "circulant": (
        lambda: nn.Sequential(nn.Linear(5, 8), BlockCirculantLinear(8, 4, 4), nn.Linear(4, 3)),
        {},
        "circulant",
    ),
}


@pytest.mark.parametrize("name", FLOATS)
def test_what_has_no_integers_in_place_falls_back_and_says_so(name: str) -> None:
    make, options, why = FLOATS[name]
    engine = trained(make(), **options)
    assert engine.step.plan.arithmetic == "float"
    assert engine.step.certify(DELTA).certified_for == REAL_SUMS
    assert engine.report(DELTA)["arithmetic"] == "float"
    (reason,) = reasons(engine)
    assert why in reason


def test_without_compiled_kernels_sums_are_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dispatch.availability
    monkeypatch.setattr(
        "dpkern.engine.default_arithmetic.dispatch.availability",
        lambda name: (False, "was not built") if name == "cpu" else own(name),
    )
    (reason,) = reasons(trained())
    assert "was not built" in reason


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("clipping_", ["flat", "per_layer"])
def test_what_is_asked_for_is_done_without_a_note(arithmetic: str, clipping_: str) -> None:
    engine = trained(arithmetic=arithmetic, clipping=clipping_)
    assert engine.step.plan.arithmetic == arithmetic
    assert reasons(engine) == []


def test_a_mechanism_has_its_own_arithmetic() -> None:
    for arithmetic in ("exact", "float"):
        mechanism = DPSGD(noise_multiplier=1.1, max_grad_norm=1.0, arithmetic=arithmetic)
        engine = trained(mechanism=mechanism)
        assert engine.step.plan.arithmetic == arithmetic
        assert reasons(engine) == []


def test_epsilon_is_that_of_floats() -> None:
    one, other = (trained(arithmetic=a).get_epsilon(DELTA) for a in ("exact", "float"))
    assert one == pytest.approx(other, rel=1e-4)


def test_a_calibrated_run_is_exact() -> None:
    module, engine = Model(), PrivacyEngine()
    data = TensorDataset(torch.randn(32, 5), torch.randint(3, (32,)))
    engine.make_private_with_epsilon(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=16),
        target_epsilon=3.0,
        target_delta=DELTA,
        epochs=2,
        max_grad_norm=1.0,
    )
    assert engine.step.plan.arithmetic == "exact"


class Positions(nn.Module):
    """Linear layers over four positions, whose gradients are larger than their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.first(x))).sum(1)
        return out[:, :3]


def later_norms(first: float) -> Tensor:
    """Norms of a step with noise, after steps with a noise multiplier ``first``."""
    options: Any = {"make": Positions, "arithmetic": "exact", "keep_budget": 0}
    run = loop(False, noise_multiplier=first, numbers={"lr": 0.0}, **options)
    run.train(2)
    run.optimizer.noise_multiplier = 1.1
    seen = Seen()
    run.engine.step.watch(seen)
    run.train(1)
    (norms,) = seen.norms
    return norms


def test_noise_that_begins_later_finds_the_norms_of_integers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The capture was prepared for floats, whose norms leave out the rounding of what is truncated.
    assert torch.allclose(later_norms(0.0), later_norms(1.1), rtol=1e-9)
    found = later_norms(0.0)
    monkeypatch.setattr(clipping, "squared_norms_rounded", clipping.squared_norms)
    assert bool((found > later_norms(0.0) * (1 + 1e-8)).all())
