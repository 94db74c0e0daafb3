"""Backward passes in which samples meet while outputs stay apart, and some in which none do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import UnsupportedModule
from tests.engine.guards.kit import WIDE, Table, World
from tests.engine.guards.models import Between, fit

TABLE = Table("backward passes", bounds=WIDE)

MOVED = "gradients of one sample's outputs that depend on that sample alone"


def scaled(factor: Callable[[Tensor], float | Tensor]) -> Callable[..., Tensor]:
    """Return a function that keeps values, and scales gradients by a function of the values."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            ctx.factor = factor(h)
            return h.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * ctx.factor

    return lambda m, h, *more: Scaled.apply(h)


@TABLE.refused(UnsupportedModule, MOVED)
def scaled_by_the_norm_of_the_batch(w: World) -> None:
    fit(w, Between(scaled(lambda h: float(h.norm()))))


@TABLE.refused(UnsupportedModule, MOVED)
def scaled_by_the_spread_of_the_batch(w: World) -> None:
    fit(w, Between(scaled(lambda h: 1 + float(h.std()))))


@TABLE.refused(UnsupportedModule, MOVED)
def scaled_by_the_number_of_entries(w: World) -> None:
    """The step of a learned quantizer, whose gradient is divided by the root of all entries."""

    def middle(m: nn.Module, h: Tensor) -> Tensor:
        factor = 1 / math.sqrt(h.numel())
        return h * factor + (h - h * factor).detach()

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, MOVED)
def hook_that_multiplies_by_the_number_of_samples(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda g: g * len(g))
        return h

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, MOVED)
def straight_through_below_the_mean(w: World) -> None:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            ctx.save_for_backward(h)
            return h.round()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (h,) = ctx.saved_tensors
            return g * (h.abs() <= h.abs().mean())

    fit(w, Between(lambda m, h: Rounded.apply(h)))


@TABLE.refused(UnsupportedModule, MOVED)
def scaled_beside_a_dropout(w: World) -> None:
    """A module that draws random numbers runs with others replaced, not with fewer."""
    middle = scaled(lambda h: 1 / (1 + float(h.abs().max())))
    fit(w, Between(lambda m, h: middle(m, F.dropout(h, 0.2))))


@TABLE.refused(UnsupportedModule, MOVED, after=1)
def hook_that_a_flag_switches_on(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        if m.centred:
            h.register_hook(lambda g: g - g.mean(0))
        return h

    inner: Any = Between(middle)
    inner.centred = False
    model, optimizer, loader = w.private(inner)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        inner.centred = True


@TABLE.refused(UnsupportedModule, "got other outputs", after=1)
def mixing_from_a_number_of_steps_on(w: World) -> None:
    steps = itertools.count()
    middle = Between(lambda m, h, step: h - h.detach().mean(0) if step else h)
    fit(w, middle, lambda model, x, y: F.cross_entropy(model(x, next(steps)), y))


@TABLE.refused(UnsupportedModule, "got other outputs", after=1)
def mixing_by_an_option_in_a_dictionary(w: World) -> None:
    steps = itertools.count()

    def middle(m: nn.Module, h: Tensor, options: dict[str, int]) -> Tensor:
        return h - h.detach().mean(0) if options["step"] else h

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x, {"step": next(steps)}), y)

    fit(w, Between(middle), loss)


@TABLE.right()
def reversed_by_a_constant(w: World) -> None:
    fit(w, Between(scaled(lambda h: -0.5)))


@TABLE.right()
def scaled_row_by_row(w: World) -> None:
    fit(w, Between(scaled(lambda h: 1 / (1 + h.norm(dim=1, keepdim=True)))))


@TABLE.right()
def straight_through(w: World) -> None:
    fit(w, Between(lambda m, h: h + (h.round() - h).detach()))


@TABLE.right()
def learned_step_of_a_quantizer(w: World) -> None:
    """The gradient is divided by the root of the entries of one sample."""

    def middle(m: Any, h: Tensor) -> Tensor:
        factor = 1 / math.sqrt(h[0].numel())
        step = m.step * factor + (m.step - m.step * factor).detach()
        scaled = (h / step).clamp(-3, 3)
        return ((scaled.round() - scaled).detach() + scaled) * step

    fit(w, Between(middle, step=nn.Parameter(torch.full((1,), 0.3))))


@TABLE.right()
def hook_that_scales_every_row_alike(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda g: 0.3 * g)
        return h

    fit(w, Between(middle))


@TABLE.right()
def number_of_the_step_as_an_argument(w: World) -> None:
    steps = itertools.count()
    inner = Between(lambda m, h, step: h / (1 + step))
    fit(w, inner, lambda model, x, y: F.cross_entropy(model(x, next(steps)), y))


@TABLE.right()
def options_in_a_dictionary(w: World) -> None:
    inner = Between(lambda m, h, options: h * options["scale"])
    fit(w, inner, lambda model, x, y: F.cross_entropy(model(x, {"scale": 0.5, "mode": "a"}), y))


@TABLE.right(random=True)
def reversed_beside_a_dropout(w: World) -> None:
    middle = scaled(lambda h: -0.5)
    fit(w, Between(lambda m, h: middle(m, F.dropout(h, 0.2))))
