"""Second derivatives, inputs with gradients, and other ends that used to be raw errors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.utils.checkpoint import checkpoint

from dpkern.base.errors import InvalidInput, PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import Between, cross_entropy, fit, mlp
from tests.engine.guards.records import FEATURES

TABLE = Table("untyped failures")


@TABLE.refused(UnsupportedModule, texts.SECOND_ORDER)
def gradient_penalty(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.cross_entropy(output, y) + (slope.norm(dim=1) - 1).square().mean()

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, texts.SECOND_ORDER)
def penalty_between_real_and_fake(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a = torch.rand(len(x), 1)
        between = (a * x + (1 - a) * torch.randn(x.shape)).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    fit(w, mlp(1), loss)


@TABLE.refused(UnsupportedModule, texts.PARAMETER_TERM)
def meta_learning(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        named = dict(model.named_parameters())
        inner = F.cross_entropy(model(x), y)
        slopes = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        fast = {k: p - 0.1 * g for (k, p), g in zip(named.items(), slopes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, texts.PARAMETER_TERM)
def gradients_by_name_for_the_parameters(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        slopes = torch.autograd.grad(cross_entropy(model, x, y), list(model.parameters()))
        for parameter, slope in zip(model.parameters(), slopes, strict=True):
            parameter.grad = slope
        optimizer.step()


@TABLE.refused(UnsupportedModule, texts.SECOND_ORDER)
def backward_that_keeps_a_graph(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the cycle
            cross_entropy(model, x, y).backward(create_graph=True)
        optimizer.step()


@TABLE.right()
def sharpness_aware(w: World) -> None:
    """Private parameters have no gradient to climb, so that the first pass moves nothing."""
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        cross_entropy(model, x, y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter += 0.05 * parameter.grad / parameter.grad.norm()
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def per_sample_gradients_by_vmap(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:

        def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            output = torch.func.functional_call(model, parameters, (x[None],))
            return F.cross_entropy(output, y[None])

        named = {k: p.detach() for k, p in model.named_parameters()}
        torch.func.vmap(torch.func.grad(one), (None, 0, 0))(named, x, y)
        optimizer.step()


@TABLE.right()
def input_that_gets_a_gradient_inside(w: World) -> None:
    """As speech models do, for checkpointing."""

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            if self.training and x.is_leaf:
                x.requires_grad_(True)
            return self.body(x)

    fit(w, Watching())


@TABLE.right()
def hidden_that_requires_a_gradient_inside(w: World) -> None:
    """Features of a frozen part, marked so that a checkpoint keeps their gradient."""

    def middle(m: nn.Module, h: Tensor) -> Tensor:
        return h if h.requires_grad else h.requires_grad_(True)

    model = Between(middle)
    model.before.requires_grad_(False)
    trained = torch.optim.SGD(model.after.parameters(), lr=0.0)
    fit(w, model, optimizer=trained)


def _climbed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Inputs shifted such that each sample climbs its own loss."""
    shifted = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(shifted), y), shifted)
    return x + 0.1 * slope.sign()


@TABLE.refused(UnsupportedModule, "got grad")
def adversarial_training(w: World) -> None:
    fit(w, mlp(), lambda m, x, y: F.cross_entropy(m(_climbed(m, x, y)), y))


@TABLE.right()
def adversarial_training_that_adopts(w: World) -> None:
    """The remedy: the loop vouches for the shifted rows."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(w.engine.adopt(_climbed(model, x, y))), y)

    fit(w, mlp(), loss)


@TABLE.refused(InvalidInput, "LBFGS")
def second_order_optimizer(w: World) -> None:
    model = mlp()
    w.private(model, optimizer=torch.optim.LBFGS(model.parameters()))


@TABLE.right()
def backward_twice_on_one_graph(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def traced_model(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, torch.randn(2, FEATURES))
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(traced, x, y).backward()
        optimizer.step()


@TABLE.refused(PrivacyError, texts.NO_HOOKS)
def module_called_around_its_hooks(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model.forward(x), y).backward()
        optimizer.step()


@TABLE.right()
def gradient_given_by_hand(w: World) -> None:
    """Each sample's loss with a weight of its own."""
    model, optimizer, loader = w.private(mlp(), loss_reduction="sum")
    for x, y in loader:
        optimizer.zero_grad()
        each = F.cross_entropy(model(x), y, reduction="none")
        each.backward(torch.full_like(each, 0.5))
        optimizer.step()


@TABLE.right()
def two_losses_in_one_backward(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        torch.autograd.backward([F.cross_entropy(output, y), output.square().mean()])
        optimizer.step()


@TABLE.right()
def copy_of_the_model_for_evaluation(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        with torch.no_grad():
            copy.deepcopy(model).eval()(x)


def _before_the_step(w: World, call: Callable[[nn.Module], object]) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        call(model)
        optimizer.step()


@TABLE.refused(PrivacyError, "clip_grad_value_: expected gradients that the engine clips")
def gradients_clipped_by_value(w: World) -> None:
    """Torch's function finds no gradient at all, which is an error of its own."""
    _before_the_step(w, lambda model: clip_grad_value_(model.parameters(), 0.5))


@TABLE.right()
def gradients_clipped_by_norm(w: World) -> None:
    """Torch's function finds no gradient, and leaves it at that."""
    _before_the_step(w, lambda model: clip_grad_norm_(model.parameters(), 0.5))


@TABLE.refused(UnsupportedModule, "use_reentrant=False where no input needs a gradient")
def whole_model_in_a_reentrant_checkpoint(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says so, too
            return F.cross_entropy(checkpoint(model, x, use_reentrant=True), y)

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, "loss: expected a loss with a gradient")
def loss_of_detached_outputs(w: World) -> None:
    fit(w, mlp(), lambda m, x, y: F.cross_entropy(m(x).detach(), y))


@TABLE.refused(PrivacyError, "nn.Parameter: expected a tensor that is no private parameter")
def weight_norm_of_a_private_module(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    parametrizations.weight_norm(model[0])
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.refused(PrivacyError, "load_state_dict, 0.weight: expected tensors of released weights")
def state_dict_shifted_by_samples(w: World) -> None:
    model, _, loader = w.private(mlp())
    for x, _ in loader:
        model.load_state_dict({name: v + x.mean() for name, v in model.state_dict().items()})


@TABLE.right()
def gradients_looked_for(w: World) -> None:
    """Metrics of gradients skip parameters without one."""
    _before_the_step(w, lambda model: [p.grad for p in model.parameters() if p.grad is not None])
