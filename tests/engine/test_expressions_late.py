"""Expressions of parameters whose gradients arrive after their pass was left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.errors import UnsupportedModule

Between = Callable[[dpkern.PrivacyEngine, nn.Module, Tensor], Any]


class Net(nn.Module):
    """A weight that is computed from three parameters, inside a checkpoint or not."""

    def __init__(self, reentrant: bool | None = None, *, front: bool = True) -> None:
        super().__init__()
        self.front, self.reentrant = nn.Linear(6, 6) if front else nn.Identity(), reentrant
        self.w, self.a, self.b = (
            nn.Parameter(0.3 * torch.randn(*shape)) for shape in ((8, 6), (8, 2), (2, 6))
        )
        self.head = nn.Linear(8, 3)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.w + self.a @ self.b))

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        if self.reentrant is None:
            out: Tensor = self.head(self.inner(x))
            return out
        made: Any = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        out = self.head(made)
        return out


def trained(between: Between | None, *, loader: bool = True, **options: Any) -> Tensor:
    torch.manual_seed(0)
    module = Net(options.pop("reentrant", None), front=options.pop("front", True))
    engine = dpkern.PrivacyEngine()
    data = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
    given: dict[str, Any] = {"data_loader": DataLoader(data, batch_size=8), "sampling": "fixed"}
    if not loader:
        given = {"data_loader": None, "expected_batch_size": 8, "sample_rate": 1.0}
    module, optimizer, batches = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        noise_multiplier=0.3,
        max_grad_norm=0.1,
        unsafe_seed=1,
        **given,
        **options,
    )
    for x, y in batches if loader else [tuple(t[:8] for t in data.tensors)] * 4:
        loss = F.cross_entropy(module(x), y)
        if between is not None:
            between(engine, module, x)
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def detach_and_attach(engine: dpkern.PrivacyEngine, module: nn.Module, x: Tensor) -> None:
    engine.detach()
    engine.attach()


def watch(engine: dpkern.PrivacyEngine, module: nn.Module, x: Tensor) -> None:
    module(x)


def new_samples(engine: dpkern.PrivacyEngine, module: nn.Module, x: Tensor) -> None:
    engine.new_samples()


def validate(engine: dpkern.PrivacyEngine, module: nn.Module, x: Tensor) -> None:
    engine.validate(None, x)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_a_detached_engine_goes_on(arithmetic: str) -> None:
    usual = trained(None, arithmetic=arithmetic)
    assert torch.equal(trained(detach_and_attach, arithmetic=arithmetic), usual)


@pytest.mark.parametrize("between", [watch, new_samples, validate, detach_and_attach])
def test_passes_without_a_loader_may_follow_before_the_backward_pass(between: Between) -> None:
    usual = trained(None, loader=False)
    assert torch.allclose(trained(between, loader=False), usual, rtol=0, atol=1e-6)


def test_anomaly_mode_takes_one_sample_after_the_other() -> None:
    usual = trained(None)
    with torch.autograd.set_detect_anomaly(True):
        assert torch.allclose(trained(None), usual, rtol=0, atol=1e-6)


def test_in_a_checkpoint_they_are_right_or_refused() -> None:
    usual = trained(None)
    for reentrant in (True, False):
        assert torch.allclose(trained(None, reentrant=reentrant), usual, rtol=0, atol=1e-6)
    with pytest.raises(UnsupportedModule, match=r"checkpoint\(use_reentrant=False\)"):
        trained(None, reentrant=False, front=False)
