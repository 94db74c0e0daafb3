"""Autograd functions of parameters, as in LoHa: refused with the remedy, which trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.base.errors import PrivacyError

ROWS = 8


class Product(torch.autograd.Function):
    """The product of two parameters with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return gradient @ b.T, a.T @ gradient


class Adapter(nn.Module):
    def __init__(self, *, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 4))
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        weight = Product.apply(self.a, self.b) if self.own else self.a @ self.b  # type: ignore[no-untyped-call]
        return nn.functional.linear(x, weight)


def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    engine = dpkern.PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=ROWS),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        sampling="fixed",
        arithmetic="float",
    )
    for inputs, targets in loader:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def test_a_function_of_its_own_is_refused_and_torch_functions_train() -> None:
    x, y = torch.randn(ROWS, 4), torch.randint(3, (ROWS,))
    with pytest.raises(PrivacyError, match=r"torch\.autograd\.Function of the model's own"):
        step(Adapter(own=True), x, y)
    sums = [torch.zeros(size, dtype=torch.float64) for size in ((3, 2), (2, 4))]
    for i in range(ROWS):
        model = Adapter(own=True).double()
        loss = nn.functional.cross_entropy(model(x[i : i + 1].double()), y[i : i + 1])
        each = torch.autograd.grad(loss, [model.a, model.b])
        factor = min(1.0, 0.5 / float(torch.cat([g.flatten() for g in each]).norm()))
        for total, gradient in zip(sums, each, strict=True):
            total += factor * gradient
    model, before = Adapter(own=False), Adapter(own=False)
    step(model, x, y)
    for name, total in zip("ab", sums, strict=True):
        moved = (getattr(before, name).detach() - getattr(model, name).detach()).double() * ROWS
        assert torch.allclose(moved, total, rtol=1e-4, atol=1e-6)
