"""Loops that reach behind the engine: ``.data``, other optimizers, averages, pruning, modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from dpkern.base.errors import PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.losses import of_outputs
from tests.engine.guards.models import Between, cross_entropy, fit, mlp

TABLE = Table("behind the engine")

NUMBER = "numbers that do not depend on the samples"


def stepping(
    w: World, use: Callable[[Any, Tensor, Tensor, Tensor], Any], model: nn.Module | None = None
) -> None:
    """Call ``use`` with the module, the batch and the loss after every step."""
    model, optimizer, loader = w.private(mlp() if model is None else model)
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        use(model, x, y, loss)


@TABLE.refused(PrivacyError, NUMBER, after=1)
def weights_decayed_by_the_loss(w: World) -> None:
    def use(model: Any, x: Tensor, y: Tensor, loss: Tensor) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(1 - 0.01 * loss.item())

    stepping(w, use)


@TABLE.refused(PrivacyError, NUMBER, after=1)
def weights_rescaled_by_the_spread_of_activations(w: World) -> None:
    """As LSUV initialises layers."""

    def use(model: Any, x: Tensor, y: Tensor, loss: Tensor) -> None:
        with torch.no_grad():
            spread = model[0](x).std().item()
        model[0].weight.data.div_(spread)

    stepping(w, use)


@TABLE.refused(PrivacyError, texts.WRITTEN, after=1)
def prototypes_of_the_batch(w: World) -> None:
    """As k-means initialises a layer."""
    stepping(w, lambda m, x, y, loss: m[0].weight.data[: len(x)].copy_(x))


@TABLE.refused(PrivacyError, "parameter.data: expected parameters", after=1)
def bias_of_the_classes_in_the_batch(w: World) -> None:
    def use(model: Any, x: Tensor, y: Tensor, loss: Tensor) -> None:
        model[2].bias.data = (torch.bincount(y, minlength=3).float() + 1).log()

    stepping(w, use)


@TABLE.refused(PrivacyError, texts.WRITTEN, after=1)
def columns_pruned_by_the_batch(w: World) -> None:
    def use(model: Any, x: Tensor, y: Tensor, loss: Tensor) -> None:
        model[0].weight.data.mul_((x.abs().mean(0) > 0.2).float())

    stepping(w, use)


@TABLE.refused(UnsupportedModule, texts.CONTENTS, after=1)
def scale_kept_in_a_buffer(w: World) -> None:
    def use(model: Any, x: Tensor, y: Tensor, loss: Tensor) -> None:
        model.scale.fill_(1 + loss.item())

    stepping(w, use, Between(lambda m, h: h * m.scale, scale=torch.ones(())))


class ScheduleFree(torch.optim.Optimizer):
    """An optimizer that averages its own iterates, and writes through ``.data``."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("z", parameter.data.clone())
                state["k"] = state.get("k", 0) + 1
                state["z"].sub_(parameter.grad, alpha=group["lr"])
                parameter.data.lerp_(state["z"], 1 / state["k"])


@TABLE.right()
def optimizer_that_averages_its_iterates(w: World) -> None:
    model = mlp()
    fit(w, model, optimizer=ScheduleFree(model.parameters()))


@TABLE.right()
def slow_weights_by_lookahead(w: World) -> None:
    slow: list[Tensor] = []

    def use(model: Any, x: Tensor, y: Tensor, loss: Tensor) -> None:
        slow[:] = slow or [p.data.clone() for p in model.parameters()]
        for mine, parameter in zip(slow, model.parameters(), strict=True):
            mine.add_(parameter.data - mine, alpha=0.5)
            parameter.data.copy_(mine)

    stepping(w, use)


@TABLE.right()
def norms_of_rows_bounded(w: World) -> None:
    def use(model: Any, x: Tensor, y: Tensor, loss: Tensor) -> None:
        for parameter in model.parameters():
            norms = parameter.data.norm(2, dim=-1, keepdim=True).clamp(min=1e-6)
            parameter.data.mul_(norms.clamp(max=1.0) / norms)

    stepping(w, use)


@TABLE.right()
def small_weights_pruned(w: World) -> None:
    def use(model: Any, x: Tensor, y: Tensor, loss: Tensor) -> None:
        for parameter in model.parameters():
            parameter.data[parameter.data.abs() < 0.01] = 0

    stepping(w, use)


@TABLE.right()
def average_of_weights_by_data(w: World) -> None:
    averages: list[nn.Module] = []

    def use(model: Any, x: Tensor, y: Tensor, loss: Tensor) -> None:
        averages[:] = averages or [copy.deepcopy(model)]
        for mine, parameter in zip(averages[0].parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(parameter.data, alpha=0.1)

    stepping(w, use)


@TABLE.right()
def two_passes_that_agree(w: World) -> None:
    """As R-drop has them."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        one, other = model(x), model(x + 0.01)
        return F.cross_entropy(one, y) + (one - other).square().mean()

    fit(w, mlp(), loss)


@TABLE.right()
def operations_counted_in_one_step(w: World) -> None:
    turns: list[int] = []

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        turns.append(len(x))
        if len(turns) != 2:
            return cross_entropy(model, x, y)
        with FlopCounterMode(display=False):
            output = model(x)
        return F.cross_entropy(output, y)

    fit(w, mlp(), loss)


@TABLE.right()
def losses_of_records_above_a_constant(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return (each * (each.detach() > 0.7)).mean()

    fit(w, mlp(), of_outputs(loss))
