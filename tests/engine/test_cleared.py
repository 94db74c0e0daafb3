"""Gradients that the module clears between a backward pass and the step."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern


def made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any, dpkern.PrivacyEngine]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
    engine = dpkern.PrivacyEngine()
    private = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=0.3,
        max_grad_norm=1e3,
        unsafe_seed=1,
        sampling="fixed",
        **options,
    )
    return *private, engine


def trained(clear: str, steps: int = 5, **options: Any) -> list[Tensor]:
    module, optimizer, loader, _ = made(**options)
    for _, (x, y) in zip(range(steps), loader, strict=False):
        if clear != "nothing":
            F.cross_entropy(module(x), (y + 1) % 3).backward()  # to be thrown away
        if clear == "module":
            module.zero_grad()
        elif clear == "optimizer":
            optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_the_module_forgets_what_the_optimizer_forgets(arithmetic: str) -> None:
    runs = {
        clear: trained(clear, arithmetic=arithmetic)
        for clear in ("module", "optimizer", "nothing", "never")
    }
    for one, other, plain in zip(runs["module"], runs["optimizer"], runs["nothing"], strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, plain)
    assert not all(map(torch.equal, runs["module"], runs["never"]))


def test_a_step_whose_gradients_were_cleared_releases_noise_alone() -> None:
    module, optimizer, loader, engine = made()
    x, y = next(iter(loader))
    F.cross_entropy(module(x), y).mul(1e6).backward()
    module.zero_grad(set_to_none=False)
    before = [p.detach().clone() for p in module.parameters()]
    optimizer.step()
    assert engine.step.steps == 1
    after = [p.detach() for p in module.parameters()]
    moved = torch.cat([(p - b).flatten() for p, b in zip(after, before, strict=True)])
    assert 0 < float(moved.std()) < 3 * 0.3 * 1e3 / 8


def test_copies_and_detached_modules_have_torchs_own() -> None:
    module, _, _, engine = made()
    copied = copy.deepcopy(module)
    copied(torch.randn(2, 6)).sum().backward()
    copied.zero_grad()
    assert all(p.grad is None for p in copied.parameters())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    torch.load(file, weights_only=False).zero_grad()
    engine.detach()
    assert "zero_grad" not in vars(module)
    module(torch.randn(2, 6)).sum().backward()
    module.zero_grad()
    assert all(p.grad is None for p in module.parameters())


class Expressions(nn.Module):
    """Weights that are computed from several parameters, and a normalised one."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a, self.b = (
            nn.Parameter(0.3 * torch.randn(*shape)) for shape in ((8, 6), (8, 2), (2, 6))
        )
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(F.linear(x, self.w + self.a @ self.b)))
        return out


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_expressions_have_gradients_after_clearing_between_the_passes(arithmetic: str) -> None:
    """``loss = ...; optimizer.zero_grad(); loss.backward()`` is the order of many loops."""

    def after(when: str) -> Tensor:
        torch.manual_seed(0)
        module = Expressions()
        data = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
        module, optimizer, loader = dpkern.PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=0.3,
            max_grad_norm=0.1,
            unsafe_seed=1,
            sampling="fixed",
            arithmetic=arithmetic,
        )
        for x, y in loader:
            if when == "before":
                optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            if when == "between":
                optimizer.zero_grad()
            if when == "twice":
                loss.backward(retain_graph=True)
                module.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    usual = after("before")
    assert torch.equal(after("between"), usual)
    assert torch.equal(after("twice"), usual)
