"""Express ``torch.optim`` optimizers as rules of ``ops.update``, with state under torch's keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops import update
from ..ops.noise import FLOATS
from .local import like, local

_PLAIN_ADAM = ("amsgrad", "maximize", "differentiable", "capturable")
_PLAIN_SGD = ("maximize", "differentiable")


@dataclass
class Group:
    """Parameters that one rule updates in one pass.

    Attributes:
        rule: the rule with the numbers of this step.
        indices: the parameters' places in the private step.
        params: the parameters, as the keys of the optimizer's state.
        state: buffers that the rule writes to.
        fresh: states that become the optimizer's once the update has happened.
    """

    rule: update.Rule
    indices: list[int]
    params: list[Tensor]
    state: update.State
    fresh: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)

    def commit(self, optimizer: torch.optim.Optimizer) -> None:
        """Enter new state and advance torch's step counts."""
        for param, state in self.fresh:
            optimizer.state[param].update(state)
        if isinstance(self.rule, update.Adam):
            torch._foreach_add_([optimizer.state[p]["step"] for p in self.params], 1)


def groups_of(
    optimizer: torch.optim.Optimizer, places: Mapping[int, int], plain: Sequence[Tensor]
) -> list[Group] | None:
    """Return the optimizer's parameters as groups for ``DPStep.finish``; None without a rule.

    Numbers are read from ``param_groups`` anew at every step, so schedules work.

    Args:
        optimizer: the user's optimizer.
        places: index of each private parameter by its ``id``.
        plain: the parameters as ordinary tensors, by index.
    """
    groups: list[Group] = []
    for given in optimizer.param_groups:
        rule = rule_of(type(optimizer), given)
        if rule is None:
            return None
        params = [p for p in given["params"] if p.requires_grad]
        by_start: dict[tuple[torch.dtype, int], Group] = {}
        states = [optimizer.state.get(p, {}) for p in params]
        for param, state, count in zip(params, states, _counts(rule, states), strict=True):
            index = places[id(param)]
            tensor = plain[index]
            held = [state.get(name) for name in rule.buffer_names()]
            buffers = [None if b is None else local(b) for b in held]
            if not _fits(tensor, buffers):
                return None
            key = (tensor.dtype, count)
            if key not in by_start:
                empty: dict[str, list[Tensor]] = {name: [] for name in rule.buffer_names()}
                by_start[key] = Group(rule, [], [], update.State(count, empty))
            group = by_start[key]
            group.indices.append(index)
            group.params.append(param)
            new: dict[str, Any] = {}
            for name, buffer in zip(rule.buffer_names(), buffers, strict=True):
                if buffer is None:
                    buffer = torch.zeros_like(tensor)
                    new[name] = like(buffer, param)
                group.state.buffers[name].append(buffer)
            if new and isinstance(rule, update.Adam):
                new = {"step": _step_tensor(given, tensor), **new}
            if new:
                group.fresh.append((param, new))
        groups += by_start.values()
    return groups


def rule_of(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> update.Rule | None:
    """Return the rule of a parameter group; None for optimizers and options without one."""
    if kind is torch.optim.SGD:
        dampening = float(group["dampening"])
        if any(group[name] for name in _PLAIN_SGD) or not 0 <= dampening < 1:
            return None
        return update.SGD(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=dampening,
            nesterov=bool(group["nesterov"]),
            weight_decay=float(group["weight_decay"]),
        )
    if kind not in (torch.optim.Adam, torch.optim.AdamW) or any(group[k] for k in _PLAIN_ADAM):
        return None
    rule = update.AdamW if group["decoupled_weight_decay"] else update.Adam
    beta1, beta2 = group["betas"]
    return rule(
        lr=float(group["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )


def _counts(rule: update.Rule, states: Sequence[Mapping[str, Any]]) -> Iterable[int]:
    """Return each parameter's number of updates; for SGD, 1 if it has a momentum buffer."""
    if isinstance(rule, update.SGD):
        return [int(state.get("momentum_buffer") is not None) for state in states]
    steps = [state["step"] for state in states if "step" in state]
    # Stacked, so that counts on a device take one transfer.
    known = iter(torch.stack(steps).tolist() if steps else [])
    return [int(next(known)) if "step" in state else 0 for state in states]


def _fits(tensor: Tensor, buffers: Sequence[Tensor | None]) -> bool:
    if tensor.dtype not in FLOATS or not tensor.is_contiguous():
        return False
    return all(
        b is None
        or (
            b.dtype is tensor.dtype
            and b.shape == tensor.shape
            and b.device == tensor.device
            and b.is_contiguous()
        )
        for b in buffers
    )


def _step_tensor(group: Mapping[str, Any], tensor: Tensor) -> Tensor:
    """Return a step count of zero, on the device and in the dtype that torch gives it."""
    fused = bool(group["fused"])
    wide = torch.get_default_dtype() is torch.float64 and not fused
    dtype = torch.float64 if wide else torch.float32
    return torch.zeros((), dtype=dtype, device=tensor.device if fused else "cpu")
