"""Gradient hooks of parameters, which private backward passes do not call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern import HookWarning

HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def private(module: nn.Module) -> tuple[Any, dpkern.PrivacyEngine]:
    engine = dpkern.PrivacyEngine()
    data = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return made, engine


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_before_are_named(hook: str) -> None:
    module = model()
    getattr(module[2].weight, hook)(lambda given: None)
    with pytest.warns(HookWarning, match=r"^2\.weight: .* requires_grad=False") as seen:
        private(module)
    assert seen[0].filename == __file__


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_a_private_parameter_warns_where_it_is_registered(hook: str) -> None:
    module = model()
    (_, optimizer, loader), engine = private(module)
    called: list[Tensor] = []
    with pytest.warns(HookWarning, match=r"^0\.weight: ") as seen:
        handle = getattr(module[0].weight, hook)(called.append)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    x, y = next(iter(loader))
    F.cross_entropy(module(x), y).backward()
    optimizer.step()
    assert called == []
    engine.detach()
    F.cross_entropy(module(x), y).backward()  # an ordinary pass calls it
    assert len(called) == 1
    handle.remove()
    assert not module[0].weight._backward_hooks


def test_removed_hooks_and_frozen_parameters_are_no_reason() -> None:
    module = model()
    module[0].weight.register_hook(lambda gradient: gradient).remove()
    module[0].bias.register_hook(lambda gradient: gradient)
    module[0].bias.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private(module)
