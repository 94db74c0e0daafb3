"""The module's input is watched for the probe: what that costs, and what it must not change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkern.engine.layers import conv
from dpkern.engine.sets_requires_grad import sets_requires_grad
from tests.engine.engine_oracle import Op, check, draw, make, plan_for, run, sample_losses

B = 4


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3), nn.Flatten())


def test_only_the_probe_pays_for_the_gradient_of_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    own = conv._input_gradient

    def noted(g: Tensor, x: Tensor, *rest: object) -> Tensor:
        sizes.append((int(x.shape[0]), int(x.shape[1])))
        return own(g, x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(conv, "_input_gradient", noted)
    module, x = make(images).double(), draw(B, 2, 8, 8)
    run(module, (x,), plan_for(module))
    # The probe: all samples through both layers, twice. The step: the second layer only.
    assert sizes == [*[(B, 3), (B, 2)] * 2, (B, 3)]


def test_an_input_that_needs_its_gradient_gets_it() -> None:
    module = make(images).double()
    gradients = []
    for private in (False, True):
        x = draw(B, 2, 8, 8).requires_grad_()
        if private:
            run(module, (x,), plan_for(module))
        else:
            sample_losses(module(x)).sum().backward()
            module.zero_grad()
        assert x.grad is not None
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("in_place", [False, True])
def test_parameters_before_the_first_layer_still_count(in_place: bool) -> None:
    """Here the layer's input shares the memory of the module's, but carries a gradient."""

    def scaled(m: nn.Module, x: Tensor) -> Tensor:
        h = x.mul_(m.scale) if in_place and x.grad_fn is not None else x * m.scale
        return torch.conv2d(h, m.weight)

    module = make(lambda: Op(scaled, scale=(2, 1, 1), weight=(3, 2, 3, 3))).double()
    check(module, (draw(B, 2, 6, 6),))


class ForCheckpoints(nn.Module):
    """Convolutions that ask for the gradient of their input, as speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = images()

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, :2]
        if self.training:
            h.requires_grad = True
        return self.layers(h)


def test_a_module_may_set_requires_grad_of_its_input() -> None:
    assert sets_requires_grad(nn.Sequential(nn.Identity(), ForCheckpoints()))
    assert not sets_requires_grad(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh()))
    check(make(ForCheckpoints).double(), (draw(B, 3, 8, 8),))
