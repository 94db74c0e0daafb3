"""Noise and an optimizer step with torch alone: one buffer for the noise, torch's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...ops import update
from ._draws import CHUNK, GAUSSIAN, Fill, chunks
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
    scales = [0.0] * len(grads) if noise is None else [mean * s for s in noise.scales]
    parts = [
        (grad_part, sum_part, scale)
        for grad, total, scale in zip(grads, sums, scales, strict=True)
        for grad_part, sum_part in chunks(grad, total)
    ]

    def write() -> None:
        for grad, total, scale in parts:
            if noise is None:
                torch.mul(total, mean, out=grad)
            else:
                grad.normal_(std=scale).add_(total, alpha=mean)

    return grads, write


def _noisy_whole(args: Arguments) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Return the same, with the noise of all parameters drawn at once, by all threads."""
    sums, noise, mean = args["sums"], args["noise"], args["gradient_scale"]
    counts = [p.numel() for p in args["params"]]
    flat = torch.empty(sum(counts))
    parts = zip(torch.split(flat, counts), args["params"], strict=True)
    grads = [part.view_as(param) for part, param in parts]
    scales = [mean * s for s in noise.scales]

    def write() -> None:
        flat.normal_()
        torch._foreach_mul_(grads, scales)
        torch._foreach_add_(grads, sums, alpha=mean)

    return grads, write


def _kept(state: update.State, place: int) -> dict[str, torch.Tensor]:
    """Return torch's state of a parameter, on the memory of the op's."""
    steps = {"step": torch.tensor(float(state.steps))} if "exp_avg" in state.buffers else {}
    return steps | {name: each[place] for name, each in state.buffers.items()}


def _by_optimizer(
    how: dict[str, bool], args: Arguments, noisy: Callable[[Arguments], Any] = _noisy
) -> Callable[[], Any]:
    grads, write = noisy(args)
    leaves = [torch.nn.Parameter(p) for p in args["params"]]  # the same memory
    optimizer = torch_optimizer(args["rule"], leaves, **how)
    for i, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
        leaf.grad = grad
        optimizer.state[leaf] |= _kept(args["state"], i)

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


def _by_two_adds(make: Callable[[torch.Tensor], Fill], args: Arguments) -> Callable[[], Any]:
    """Return plain SGD without a gradient: sums, then noise, are added part by part."""
    noise, rate = args["noise"], -args["rule"].lr * args["gradient_scale"]
    drawn = torch.empty(min(CHUNK, max(p.numel() for p in args["params"])))
    fill = make(drawn)
    each = zip(args["params"], args["sums"], noise.scales, strict=True)
    parts = [(*part, rate * scale) for param, total, scale in each for part in chunks(param, total)]

    def call() -> None:
        for param, total, scale in parts:
            param.add_(total, alpha=rate)
            param.add_(fill(drawn)[: len(param)], alpha=scale)

    return call


def _by_sums(args: Arguments) -> Callable[[], Any]:
    params, sums, rate = args["params"], args["sums"], -args["rule"].lr * args["gradient_scale"]
    return lambda: torch._foreach_add_(params, sums, alpha=rate)


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


def _by_dots(args: Arguments) -> Callable[[], Any]:
    params, radius = args["params"], args["onto"].radius
    rows = [param.view(-1) for param in params]

    def call() -> None:
        norm = math.sqrt(sum(float(torch.dot(row, row)) for row in rows))
        if norm > radius:
            torch._foreach_mul_(params, radius / norm)

    return call


def _counted(args: Arguments) -> Callable[[], Any]:
    counter, betas = args["step_counter"], _betas(args["rule"])

    def call() -> Any:
        counter[0] += 1
        powers = counter[1:3].view(torch.float64)
        for i, beta in enumerate(betas):
            powers[i] *= beta
        return counter

    return call


def _counted_in_place(args: Arguments) -> Callable[[], Any]:
    """Return the same with operands that are made once."""
    counter = args["step_counter"]
    factors = torch.tensor(_betas(args["rule"]), dtype=torch.float64)
    count, one, powers = counter[0], torch.ones_like(counter[0]), counter[1:3].view(torch.float64)

    def call() -> Any:
        torch.add(count, one, out=count)
        torch.mul(powers, factors, out=powers)
        return counter

    return call


def _counted_together(args: Arguments) -> Callable[[], Any]:
    counter = args["step_counter"]
    factors = torch.tensor(_betas(args["rule"]), dtype=torch.float64)

    def call() -> Any:
        counter[:1].add_(1)
        counter[1:3].view(torch.float64).mul_(factors)
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
        *(_with_noise if draws else _without_noise),
    )


_with_noise = (
    *(
        Formulation(
            f"{kind} optimizer, all noise at once",
            partial(_by_optimizer, {kind: True}, noisy=_noisy_whole),
            lambda args: args["noise"] is not None,
            draws=True,
        )
        for kind in ("fused", "foreach")
    ),
    *(
        Formulation(
            f"two adds, {name}",
            partial(_by_two_adds, make),
            lambda args: args["noise"] is not None and _is_plain(args),
            draws=True,
        )
        for name, make in GAUSSIAN.items()
    ),
)
_without_noise = (
    Formulation("add sums", _by_sums, lambda args: args["noise"] is None and _is_plain(args)),
)


FORMULATIONS = {
    "update.advance": (
        Formulation("entry by entry", _counted),
        Formulation("mul_", _counted_together),
        Formulation("add, mul in place", _counted_in_place),
    ),
    "update.step": (*_steps(True), *_steps(False)),
    "update.project": tuple(
        Formulation(name, prepare, lambda args: isinstance(args["onto"], update.Ball))
        for name, prepare in {
            "foreach_norm": _scaled,
            "cat, norm": _copied,
            "dots": _by_dots,
        }.items()
    ),
}
