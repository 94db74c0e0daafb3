"""The update: the noisy gradient of a tensor, then the optimizer's rule.

Both in one kernel would save the gradient's way through memory, but take a minute to compile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ....base.codes import RuleForm
from ... import noise as noise_ops
from ... import update
from ..._count import Count, known
from .. import _numbers
from .._tables import sgd_form
from .lattice import finite
from .launch import INTERPRETED, launch, number
from .noise import REGISTERS, release

SGD, MOMENTUM, NESTEROV, ADAM = (tl.constexpr(int(form)) for form in RuleForm)
NUMBERS = tuple(f"a{i}" for i in range(8))
"""A rule's numbers, in the parameters' dtype."""


@triton.jit
def _divide(x, y):
    """Divide with correct rounding, which Triton's own division of float32 has not."""
    if x.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:
        return x / y


@triton.jit
def _root(x):
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def _numbers_of(a0, a1, a2, a3, a4, a5, a6, a7, dtype: tl.constexpr):
    return (
        number(a0, dtype), number(a1, dtype), number(a2, dtype), number(a3, dtype),
        number(a4, dtype), number(a5, dtype), number(a6, dtype), number(a7, dtype),
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "step", *NUMBERS])
def _rule_kernel(
    param,
    total,
    state1,
    state2,
    nonfinite,
    n: tl.int64,
    step: tl.int64,
    a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64,
    a4: tl.int64, a5: tl.int64, a6: tl.int64, a7: tl.int64,
    RULE: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply the rule with the operations of ``csrc/cpu/update.cpp`` in their order.

    The gradient is ``total * step``, 0 and counted where ``total`` is CHECKED and not finite.
    """
    T: tl.constexpr = param.dtype.element_ty
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    value = tl.load(total + index, mask=inside, other=0)
    gradient = value * number(step, T)
    if CHECKED:
        usable = finite(value)
        gradient = tl.where(usable, gradient, 0.0)
        tl.atomic_add(nonfinite, tl.sum(tl.where(usable, 0, 1)).to(tl.int64))
    numbers = _numbers_of(a0, a1, a2, a3, a4, a5, a6, a7, T)
    p = tl.load(param + index, mask=inside, other=0)
    if RULE == ADAM:
        shrink, decay, fresh1, keep2, fresh2, eps, root2, ahead = numbers
        mean = tl.load(state1 + index, mask=inside, other=0)
        square = tl.load(state2 + index, mask=inside, other=0)
        g = gradient + decay * p
        m = mean + fresh1 * (g - mean)
        v = keep2 * square + fresh2 * g * g
        tl.store(state1 + index, m, mask=inside)
        tl.store(state2 + index, v, mask=inside)
        p = p * shrink - ahead * _divide(m, _divide(_root(v), root2) + eps)
    else:
        lr, decay, momentum, keep, fresh, _a5, _a6, _a7 = numbers
        g = gradient + decay * p
        if RULE != SGD:
            b = keep * tl.load(state1 + index, mask=inside, other=0) + fresh * g
            tl.store(state1 + index, b, mask=inside)
            g = g + momentum * b if RULE == NESTEROV else b
        p = p - lr * g
    tl.store(param + index, p, mask=inside)


def _rule(rule: update.Rule, t: int, dtype: torch.dtype) -> tuple[int, tuple[int, ...]]:
    """Return the rule's code and its numbers at update t (from 1), rounded once, as in ``csrc``."""
    if isinstance(rule, update.Adam):
        beta1, beta2 = rule.betas
        decayed = rule.lr * rule.weight_decay
        numbers = (
            1 - decayed if rule.decoupled else 1.0,
            0.0 if rule.decoupled else rule.weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            rule.eps,
            math.sqrt(1 - beta2**t),
            rule.lr / (1 - beta1**t),
        )
        code = RuleForm.adam
    else:
        kept = (0.0, 1.0) if t == 1 else (rule.momentum, 1 - rule.dampening)
        numbers = (rule.lr, rule.weight_decay, rule.momentum, *kept, 0.0, 0.0, 0.0)
        code = sgd_form(rule)
    return int(code), tuple(_numbers.bits(_numbers.rounded(x, dtype)) for x in numbers)


def _refuse(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    noise: update.Noise | None = None,
    maps: update.PairMaps | None = None,
    **_: Any,
) -> str | None:
    if params and params[0].dtype not in noise_ops.FLOATS:
        return f"updates float32 and float64 parameters, got {params[0].dtype}"
    if maps is not None:
        return "noises sums as they are, got maps"
    if noise is not None and noise.step_counter is not None:
        return "takes the step as a number, got a step counter in device memory"
    return None


def _step(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: update.Rule,
    state: update.State,
    gradient_scale: float = 1.0,
    noise: update.Noise | None = None,
    maps: update.PairMaps | None = None,
) -> Count:
    del maps  # refused
    if not params:
        return 0
    dtype = params[0].dtype
    code, numbers = _rule(rule, state.steps + 1, dtype)
    buffers = [state.buffers[name] for name in rule.buffer_names()]
    nonfinite = torch.zeros(1, dtype=torch.int64, device=params[0].device)
    most = max(param.numel() for param in params) if noise is not None else 0
    room = torch.empty(most, dtype=dtype, device=params[0].device)
    for i, (param, total) in enumerate(zip(params, sums, strict=True)):
        n, unit = param.numel(), gradient_scale
        if noise is not None:
            release(
                total,
                room,
                nonfinite,
                position=noise.positions[i],
                distribution=noise.distribution,
                stream=noise.stream,
                rounding=noise.rounding,
                draws=noise.draws,
                per_unit=_numbers.per_unit(noise.scales[i], dtype),
                unit=_numbers.step(noise.scales[i], gradient_scale, dtype),
            )
            total, unit = room, 1.0
        # An absent state's pointer is never used.
        states = [group[i] for group in buffers] + [param] * (2 - len(buffers))
        given = param, total, *states, nonfinite, n
        step = _numbers.bits(_numbers.rounded(unit, dtype))
        block = min(1 << 16, triton.next_power_of_2(n or 1)) if INTERPRETED else 1024
        grid = -(-n // block)
        meta: dict[str, Any] = {"RULE": code, "CHECKED": noise is None, "BLOCK": block}
        launch(_rule_kernel, grid, param, *given, step, *numbers, maxnreg=REGISTERS, **meta)
    increment_version(params)
    state.steps += 1
    return known(nonfinite[0])


KERNELS: tuple[tuple[str, Any, Any], ...] = (("update.step", _step, _refuse),)
"""``(op, run, refuse)``."""
