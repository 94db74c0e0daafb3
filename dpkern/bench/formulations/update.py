"""Noise and an optimizer step with torch alone: one buffer for the noise, torch's optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...ops import update
from ._formulation import Arguments, Formulation


def torch_optimizer(
    rule: update.Rule, params: list[torch.nn.Parameter], **how: bool
) -> torch.optim.Optimizer:
    """Return torch's optimizer of the same meaning, in its fused form unless ``how`` says else."""
    options: dict[str, Any] = how or {"fused": True}
    if isinstance(rule, update.SGD):
        return torch.optim.SGD(
            params,
            lr=rule.lr,
            momentum=rule.momentum,
            dampening=rule.dampening,
            nesterov=rule.nesterov,
            weight_decay=rule.weight_decay,
            **options,
        )
    kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
    return kind(
        params,
        lr=rule.lr,
        betas=rule.betas,
        eps=rule.eps,
        weight_decay=rule.weight_decay,
        **options,
    )


def _noisy(args: Arguments) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Return the gradients, and what writes noisy means into them."""
    sums, noise, mean = args["sums"], args["noise"], args["gradient_scale"]
    grads = [torch.empty_like(p) for p in args["params"]]

    def write() -> None:
        for i, (grad, total) in enumerate(zip(grads, sums, strict=True)):
            if noise is None:
                torch.mul(total, mean, out=grad)
            else:
                grad.normal_(std=noise.scales[i]).add_(total).mul_(mean)

    return grads, write


def _by_optimizer(how: dict[str, bool], args: Arguments) -> Callable[[], Any]:
    grads, write = _noisy(args)
    leaves = [torch.nn.Parameter(p) for p in args["params"]]  # the same memory
    optimizer = torch_optimizer(args["rule"], leaves, **how)
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad

    def call() -> None:
        write()
        optimizer.step()

    return call


def _by_add(args: Arguments) -> Callable[[], Any]:
    grads, write = _noisy(args)
    params, rate = args["params"], args["rule"].lr

    def call() -> None:
        write()
        torch._foreach_add_(params, grads, alpha=-rate)

    return call


def _is_plain(args: Arguments) -> bool:
    rule = args["rule"]
    return bool(rule == update.SGD(lr=rule.lr))


def _scaled(args: Arguments) -> Callable[[], Any]:
    params, radius = args["params"], args["onto"].radius

    def call() -> None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(params)))
        torch._foreach_mul_(params, (radius / norm).clamp_(max=1.0))

    return call


def _copied(args: Arguments) -> Callable[[], Any]:
    params, radius = args["params"], args["onto"].radius

    def call() -> None:
        norm = torch.cat([p.flatten() for p in params]).norm()
        if norm > radius:
            for param in params:
                param.mul_(radius / norm)

    return call


def _counted(args: Arguments) -> Callable[[], Any]:
    counter, betas = args["step_counter"], _betas(args["rule"])

    def call() -> Any:
        counter[0] += 1
        powers = counter[1:].view(torch.float64)
        for i, beta in enumerate(betas):
            powers[i] *= beta
        return counter

    return call


def _counted_together(args: Arguments) -> Callable[[], Any]:
    counter = args["step_counter"]
    factors = torch.tensor(_betas(args["rule"]), dtype=torch.float64)

    def call() -> Any:
        counter[:1].add_(1)
        counter[1:].view(torch.float64).mul_(factors)
        return counter

    return call


def _betas(rule: update.Rule) -> tuple[float, float]:
    return rule.betas if isinstance(rule, update.Adam) else (1.0, 1.0)


def _steps(draws: bool) -> tuple[Formulation, ...]:
    def noisy(args: Arguments) -> bool:
        return (args["noise"] is not None) is draws

    return (
        Formulation("fused optimizer", partial(_by_optimizer, {"fused": True}), noisy, draws),
        Formulation("foreach optimizer", partial(_by_optimizer, {"foreach": True}), noisy, draws),
        Formulation("foreach_add", _by_add, lambda a: noisy(a) and _is_plain(a), draws),
    )


FORMULATIONS = {
    "update.advance": (
        Formulation("entry by entry", _counted),
        Formulation("mul_", _counted_together),
    ),
    "update.step": (*_steps(True), *_steps(False)),
    "update.project": tuple(
        Formulation(name, prepare, lambda args: isinstance(args["onto"], update.Ball))
        for name, prepare in {"foreach_norm": _scaled, "cat, norm": _copied}.items()
    ),
}
