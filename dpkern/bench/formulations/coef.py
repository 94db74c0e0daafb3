"""Noisy coefficients of polynomial losses with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ._draws import LAPLACE, Fill, laplace_by_inverse
from ._formulation import Arguments, Formulation

MakeFill = Callable[[torch.Tensor], Fill]


def _coefficients(make: MakeFill, args: Arguments) -> Callable[[], tuple[Any, Any]]:
    x, noise = args["targets"], args["noise"]
    ahead, scale = noise.draws is not None, noise.scale
    a1, a2, u, w = (torch.empty_like(x) for _ in range(4))
    fill = make(x)
    if ahead:
        for drawn in (u, w):
            fill(drawn)

    def call() -> tuple[Any, Any]:
        torch.sub(0.5, x, out=a1)
        torch.mul(x, 0.5, out=a2).sub_(0.25)
        a1.add_(u if ahead else fill(u), alpha=scale)
        a2.add_(w if ahead else fill(w), alpha=scale)
        return a1, a2

    return call


def _evaluated(make: MakeFill, args: Arguments) -> Callable[[], Any]:
    coefficients, z = _coefficients(make, args), args["z"]
    product, slope = torch.empty_like(z), torch.empty_like(z)

    def call() -> Any:
        a1, a2 = coefficients()
        torch.addcmul(a1, a2, z, out=product).mul_(z)
        return product.sum(1), torch.addcmul(a1, a2, z, value=2, out=slope)

    return call


def _expanded(make: MakeFill, args: Arguments) -> Callable[[], Any]:
    hidden, targets, weights = args["hidden"], args["targets"], args["weights"]
    scale = args["noise"].scale
    (records, width), classes = hidden.shape, len(weights)
    linear = torch.empty(records, classes, width)
    square = torch.empty(records, classes, width, width)
    fills = make(linear), make(square)

    def call() -> Any:
        factor = 0.5 - targets
        a1 = fills[0](linear).mul_(scale).add_(factor[:, :, None] * hidden[:, None, :])
        a2 = fills[1](square).mul_(scale)
        a2.add_((hidden[:, :, None] * hidden[:, None, :])[:, None], alpha=0.125)
        inner = a1 + torch.einsum("bleg,lg->ble", a2, weights)
        slope = (inner + torch.einsum("bleg,le->blg", a2, weights)).sum(0)
        back = (factor + 0.25 * hidden @ weights.t()) @ weights
        return (inner * weights).sum((1, 2)), slope, back

    return call


def _draws_now(args: Arguments) -> bool:
    return args["noise"] is not None and args["noise"].draws is None


def _drew_before(args: Arguments) -> bool:
    return args["noise"] is not None and args["noise"].draws is not None


def _ways(
    prepare: Callable[[MakeFill, Arguments], Callable[[], Any]], *before: Formulation
) -> tuple[Formulation, ...]:
    now = (
        Formulation(name, partial(prepare, make), _draws_now, draws=True)
        for name, make in LAPLACE.items()
    )
    return (*now, *before)


def _added(prepare: Callable[[MakeFill, Arguments], Callable[[], Any]]) -> Formulation:
    """Return the formulation that adds floats which were drawn before."""
    return Formulation("add", partial(prepare, laplace_by_inverse), _drew_before, draws=True)


def _in_one_expression(args: Arguments) -> Callable[[], Any]:
    """Return the coefficients with noise that was drawn before, a new tensor at each step."""
    x, scale = args["targets"], args["noise"].scale
    u, w = (laplace_by_inverse(x)(torch.empty_like(x)) for _ in range(2))
    return lambda: ((0.5 - x).add_(u, alpha=scale), (x * 0.5 - 0.25).add_(w, alpha=scale))


FORMULATIONS = {
    "coef.expanded": _ways(_expanded),
    "coef.perturb": _ways(
        _coefficients,
        _added(_coefficients),
        Formulation("add, new tensors", _in_one_expression, _drew_before, draws=True),
    ),
    "coef.quadratic": _ways(_evaluated, _added(_evaluated)),
}
