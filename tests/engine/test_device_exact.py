"""Exact sums on devices: integers of proved norm, made in place, that no order or split changes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpkern import InvalidInput, PrivacyEngine
from dpkern.base.dispatch import use
from dpkern.engine import clipping, exact_sums
from dpkern.engine.exact_sums import integer_sums, sums_in_place
from dpkern.engine.per_sample_gradients import ConvolutionGradients
from dpkern.engine.routes import KeepBudget
from dpkern.engine.sum_store import SumStore
from tests.engine import test_device_ops
from tests.engine.device_path import device_path, needs_emulation
from tests.engine.test_exact_sums import (
    MODELS,
    B,
    bound_of,
    built,
    integers,
    norm_square,
    plan_of,
    summed,
)

pytestmark = needs_emulation

LONG = ("tied tokens", "rounded operands")
"""Models whose products take the interpreter ten seconds and more."""

GEOMETRY = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
TYPES = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="torch.float32"),
        pytest.param(torch.bfloat16, id="torch.bfloat16", marks=pytest.mark.slow),
    ],
)


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    module, x = built(name)
    return module.to(dtype), x.to(dtype) if x.is_floating_point() else x


@TYPES
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in MODELS],
)
def test_a_sum_is_that_of_its_samples_integers(name: str, dtype: torch.dtype) -> None:
    module, x = made(name, dtype)
    plan = plan_of(module)
    with device_path() as calls:
        together = summed(module, x, plan, torch.full((B,), 100.0))
        alone = []
        for b in range(3):
            weights = torch.zeros(B)
            weights[b] = 100.0
            alone.append(integers(summed(module, x, plan, weights)))
        rest = torch.full((B,), 100.0)
        rest[:3] = 0.0
        others = integers(summed(module, x, plan, rest))
    assert together.bounded_by == "proved"
    assert all(part.dtype is torch.int32 for part in together.sums)
    for q in alone:
        # The bound is nearly reached: clipping does not waste it.
        assert 0.97 * bound_of(plan) < math.isqrt(norm_square(q)) <= bound_of(plan)
        assert norm_square(q) <= bound_of(plan) ** 2
    assert torch.equal(integers(together), torch.stack(alone).sum(0) + others)
    assert calls.of("reference") == []


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_near_those_of_a_cpu(name: str) -> None:
    module, x = built(name)
    weights, plan = torch.logspace(-6, 2, B), plan_of(module)
    wanted = summed(module, x, plan, weights)
    with device_path():
        found = summed(module, x, plan, weights)
    for mine, theirs in zip(found.sums, wanted.sums, strict=True):
        slack = 2e-3 * float(theirs.abs().max()) + B
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=0, atol=slack)
    torch.testing.assert_close(found.norms, wanted.norms, rtol=2e-3, atol=0)


OPTIONS: dict[str, dict[str, Any]] = {
    "little kept": {"keep_budget": 0},
    "usual": {},
    "per layer": {"clipping": "per_layer", "keep_budget": 0},
}


@pytest.mark.parametrize(
    "options",
    [
        option if option == "usual" else pytest.param(option, marks=pytest.mark.slow)
        for option in OPTIONS
    ],
)
@pytest.mark.parametrize("name", test_device_ops.MODELS)
def test_a_step_is_made_in_place_and_near_that_of_a_cpu(name: str, options: str) -> None:
    given = {"arithmetic": "exact", **OPTIONS[options]}
    found, calls = test_device_ops.walked(name, **given)
    ops = {op for op, _ in calls.count}
    assert calls.of("reference") == []
    assert not {"clip.clip_sum", "ghost.linear_gradient"} & ops
    assert any(op.endswith("_integer_sum") for op in calls.of("triton"))
    wanted = test_device_ops.stepped(name, **given)
    before = test_device_ops.stepped(name, steps=0)
    moved = max(float((b - w).abs().max()) for b, w in zip(before, wanted, strict=True))
    most = 0.1 if name == "gpt2" else 1e-2  # bfloat16 products round in another order
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).abs().max()) <= most * moved


def private_engine() -> PrivacyEngine:
    module, _ = built("one position")
    engine = PrivacyEngine()
    engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(8, 20)), batch_size=4),
        sampling="fixed",
        noise_multiplier=1.1,
        max_grad_norm=1.0,
        arithmetic="exact",
    )
    return engine


def test_memory_that_runs_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are kept round otherwise: memory may not decide it."""

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    record = ConvolutionGradients(torch.ones(2, 1, 9, 9), torch.ones(2, 1, 7, 7), (3, 3), GEOMETRY)
    monkeypatch.setattr(ConvolutionGradients, "materialize", full)
    budget = KeepBudget(1.0)
    budget.activations = 1 << 20
    with device_path():
        assert budget.kept(record) is record
        budget.cached = 0
        with pytest.raises(torch.OutOfMemoryError):
            budget.kept(record)


def test_parts_of_wide_sums_are_not_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is replayed goes on writing to their memory, which no result holds."""
    module, x = built("one position")
    plan, store, lent = plan_of(module), SumStore(), []
    monkeypatch.setattr(exact_sums, "_INT32_MOST", 3 * plan.most_units)
    zeros = store.zeros
    monkeypatch.setattr(store, "zeros", lambda *given: lent.append(given) or zeros(*given))

    def with_store(*args: Any, **given: Any) -> Any:
        return integer_sums(*args, **{**given, "store": store})

    monkeypatch.setattr(clipping, "integer_sums", with_store)
    with device_path():
        wide = summed(module, x, plan, torch.full((B,), 100.0))
        assert {part.dtype for part in wide.sums} == {torch.int64}
        assert lent == []
        narrow = summed(module, x[:3], plan, torch.full((3,), 100.0))
        assert {part.dtype for part in narrow.sums} == {torch.int32}
        assert len(lent) == 1


@pytest.mark.parametrize(("capability", "taken"), [((7, 5), False), ((8, 0), True)])
def test_devices_that_cannot_multiply_bytes_write_gradients_out(
    capability: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(exact_sums, "availability", lambda _: (True, ""))
    slot = SimpleNamespace(parameter=SimpleNamespace(device=torch.device("cuda"), is_cpu=False))
    assert exact_sums._have_kernels([slot]) == taken  # type: ignore[list-item]


def test_batch_invariance_is_not_tested_on_a_device() -> None:
    engine = private_engine()
    with device_path(), pytest.raises(InvalidInput, match="parameters that are not on a CPU"):
        engine.validate(
            None, torch.randn(4, 20), targets=torch.zeros(4).long(), loss=nn.CrossEntropyLoss()
        )


def test_a_device_without_kernels_writes_gradients_out() -> None:
    engine = private_engine()
    slots, plan = engine.capture.slots, engine.step.plan
    with device_path():
        assert sums_in_place(plan, slots)
        with use("cuda"):
            assert not sums_in_place(plan, slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "is_cpu", property(lambda _: False), raising=False)
        patch.setattr(exact_sums, "availability", lambda _: (False, "is not here"))
        assert not sums_in_place(plan, slots)
