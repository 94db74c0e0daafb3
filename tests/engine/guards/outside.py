"""Parameters that train without noise beside a private module."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import InvalidInput, PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import HIDDEN, Between, mlp
from tests.engine.guards.records import CLASSES, FEATURES

TABLE = Table("parameters outside")


def _beside(w: World, module: nn.Module, parts: dict[str, Tensor], loss: Any) -> None:
    """Train a private module, and ``parts`` by an optimizer of their own."""
    module, optimizer, loader = w.private(module)
    own = torch.optim.SGD(list(parts.values()), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        own.zero_grad()
        loss(module, x, y).backward()
        optimizer.step()
        own.step()
    w.released.update({name: part.detach() for name, part in parts.items()})


@TABLE.refused(PrivacyError, texts.TRAINED)
def temperature(w: World) -> None:
    scale = torch.ones((), requires_grad=True)
    parts = {"scale": scale}
    _beside(w, mlp(), parts, lambda m, x, y: F.cross_entropy(m(x) * scale, y))


@TABLE.refused(UnsupportedModule, texts.FOREIGN_GRADIENT)
def margin_weights(w: World) -> None:
    weights = nn.Linear(HIDDEN, CLASSES, bias=False)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(m(x)), F.normalize(weights.weight))
        return F.cross_entropy(4 * (cosine - 0.1 * F.one_hot(y, CLASSES)), y)

    _beside(w, mlp(HIDDEN), {"weights": weights.weight}, loss)


@TABLE.refused(PrivacyError, texts.TRAINED)
def encoder_in_front(w: World) -> None:
    encoder = nn.Linear(FEATURES, FEATURES)
    parts = dict(encoder.named_parameters())
    _beside(w, mlp(), parts, lambda m, x, y: F.cross_entropy(m(encoder(x).tanh()), y))


@TABLE.refused(PrivacyError, texts.TRAINED)
def decoder_behind(w: World) -> None:
    decoder = nn.Linear(HIDDEN, FEATURES)
    parts = dict(decoder.named_parameters())
    _beside(w, mlp(HIDDEN), parts, lambda m, x, y: F.mse_loss(decoder(m(x)), x))


@TABLE.refused(UnsupportedModule, texts.FOREIGN_GRADIENT)
def learned_weights_of_two_losses(w: World) -> None:
    logs = torch.zeros(2, requires_grad=True)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = m(x)
        losses = torch.stack([F.cross_entropy(output, y), output.square().mean()])
        return (losses * (-logs).exp() + logs).sum()

    _beside(w, mlp(), {"logs": logs}, loss)


@TABLE.refused(PrivacyError, texts.TRAINED)
def prompt_added_to_the_inputs(w: World) -> None:
    prompt = torch.zeros(FEATURES, requires_grad=True)
    parts = {"prompt": prompt}
    _beside(w, mlp(), parts, lambda m, x, y: F.cross_entropy(m(x + prompt), y))


@TABLE.refused(PrivacyError, texts.TRAINED)
def table_of_labels(w: World) -> None:
    """Targets are learned vectors, one per class."""
    table = nn.Embedding(CLASSES, HIDDEN)
    parts = {"table": table.weight}
    _beside(w, mlp(HIDDEN), parts, lambda m, x, y: F.mse_loss(m(x), table(y)))


@TABLE.refused(PrivacyError, texts.TRAINED)
def parameter_given_as_an_input(w: World) -> None:
    scale = nn.Parameter(torch.ones(HIDDEN))
    model = Between(lambda m, h, s: h * s)
    _beside(w, model, {"scale": scale}, lambda m, x, y: F.cross_entropy(m(x, scale), y))


@TABLE.refused(PrivacyError, texts.TRAINED)
def parameter_hidden_in_a_list(w: World) -> None:
    """Modules in a plain list are no modules of the model."""
    model = Between(lambda m, h: m.hidden[0](h))
    model.hidden = [nn.Linear(HIDDEN, HIDDEN)]
    parts = dict(model.hidden[0].named_parameters())
    _beside(w, model, parts, lambda m, x, y: F.cross_entropy(m(x), y))


@TABLE.refused(PrivacyError, texts.TRAINED)
def updated_by_hand(w: World) -> None:
    """No optimizer at all: the gradient is subtracted."""
    model, optimizer, loader = w.private(mlp())
    scale = torch.ones((), requires_grad=True)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x) * scale, y).backward()
        optimizer.step()
        with torch.no_grad():
            scale -= 0.1 * scale.grad
            scale.grad = None
    w.released["scale"] = scale


@TABLE.refused(UnsupportedModule, "got grad", after=1)
def gradient_asked_for_by_name(w: World) -> None:
    """``torch.autograd.grad`` leaves nothing in ``.grad``."""
    model, optimizer, loader = w.private(mlp())
    scale = torch.ones((), requires_grad=True)
    for x, y in loader:
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x) * scale, y), [scale])
        F.cross_entropy(model(x) * scale.detach(), y).backward()
        optimizer.step()
        scale = (scale - 0.1 * slope).detach().requires_grad_()
    w.released["scale"] = scale


@TABLE.refused(PrivacyError, texts.TRAINED)
def perturbation_for_all_inputs(w: World) -> None:
    """A universal adversarial perturbation."""
    model, optimizer, loader = w.private(mlp())
    shift = torch.zeros(FEATURES, requires_grad=True)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x + shift), y).backward()
        optimizer.step()
        shift = (shift + 0.1 * shift.grad).detach().requires_grad_()
    w.released["shift"] = shift


@TABLE.refused(PrivacyError, texts.OUTSIDE_GRADIENT)
def frozen_layer_trained_later(w: World) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model, optimizer, loader = w.private(
        model, optimizer=torch.optim.SGD(model[2].parameters(), lr=0.0)
    )
    model[0].requires_grad_(True)
    own = torch.optim.SGD(model[0].parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        own.step()
        optimizer.step()


@TABLE.refused(PrivacyError, texts.TRAINED)
def group_added_to_the_optimizer(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    scale = torch.ones((), requires_grad=True)
    optimizer.add_param_group({"params": [scale]})
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x) * scale, y).backward()
        optimizer.step()
    w.released["scale"] = scale


@TABLE.refused(InvalidInput, texts.FOREIGN_PARAMETERS)
def two_modules_in_one_optimizer(w: World) -> None:
    encoder, head = nn.Linear(FEATURES, FEATURES), mlp()
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.0)
    w.private(head, optimizer=optimizer)


@TABLE.refused(PrivacyError, texts.TRAINED, after=1)
def copy_of_the_model_that_trains(w: World) -> None:
    """A fast copy, trained in the same loop."""
    model, optimizer, loader = w.private(mlp())
    fast = copy.deepcopy(model)
    own = torch.optim.SGD(fast.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        own.zero_grad()
        F.cross_entropy(fast(x), y).backward()
        own.step()
    w.released.update({f"fast {k}": v for k, v in fast.state_dict().items()})


@TABLE.refused(UnsupportedModule, "every sample has its own part")
def other_weights_by_functional_call(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    shift = torch.zeros(CLASSES, requires_grad=True)
    own = torch.optim.SGD([shift], lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        bias = model[2].bias.detach() + shift
        output = torch.func.functional_call(model, {"2.bias": bias}, (x,))
        F.cross_entropy(output, y).backward()
        optimizer.step()
        own.step()
    w.released["shift"] = shift


@TABLE.right()
def penalty_on_the_private_parameters(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with w.engine.public():
            (0.01 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()


@TABLE.right()
def frozen_encoder_in_front(w: World) -> None:
    encoder = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(encoder(x).tanh()), y).backward()
        optimizer.step()


@TABLE.right()
def trained_from_public_passes_alone(w: World) -> None:
    """A generator whose gradients come through the private critic, from noise."""
    make = nn.Linear(2, FEATURES)
    own = torch.optim.SGD(make.parameters(), lr=0.1)
    model, optimizer, loader = w.private(mlp(1))
    for x, _ in loader:
        optimizer.zero_grad()
        F.softplus(-model(x)).mean().backward()
        with w.engine.public():
            fakes = make(torch.randn(4, 2))
            F.softplus(model(fakes.detach())).mean().backward()
        optimizer.step()
        own.zero_grad()
        with w.engine.public():
            F.softplus(-model(fakes)).mean().backward(inputs=list(make.parameters()))
        own.step()
    w.released.update(dict(make.named_parameters()))
