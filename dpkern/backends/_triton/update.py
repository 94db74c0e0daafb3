"""The update: noise, division by the public batch size and the optimizer rule in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ...ops import noise as noise_ops
from ...ops import update
from .. import _numbers
from . import chacha, lattice
from .launch import INTERPRETED, Aot, launch, number
from .noise import (
    PLACE,
    REGISTERS,
    ROUNDING,
    STREAM,
    programs,
    refuse_capture,
    tiles_of,
    tiles_per_program,
)

SGD, MOMENTUM, NESTEROV, ADAM = (tl.constexpr(i) for i in range(4))
NUMBERS = tuple(f"a{i}" for i in range(8))
"""A rule's numbers, in the parameters' dtype."""


@triton.jit
def _divide(x, y):
    """Rounded correctly, which Triton's own division of float32 is not."""
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


@triton.jit
def _apply(param, state1, state2, index, inside, gradient, numbers, RULE: tl.constexpr):
    """The rule at these entries, with the operations of ``csrc/cpu/update.cpp`` in its order."""
    p = tl.load(param + index, mask=inside, other=0)
    if RULE == ADAM:
        shrink, decay, fresh1, keep2, fresh2, eps, root2, step = numbers
        mean = tl.load(state1 + index, mask=inside, other=0)
        square = tl.load(state2 + index, mask=inside, other=0)
        g = gradient + decay * p
        m = mean + fresh1 * (g - mean)
        v = keep2 * square + fresh2 * g * g
        tl.store(state1 + index, m, mask=inside)
        tl.store(state2 + index, v, mask=inside)
        p = p * shrink - step * _divide(m, _divide(_root(v), root2) + eps)
    else:
        lr, decay, momentum, keep, fresh, _a5, _a6, _a7 = numbers
        g = gradient + decay * p
        if RULE != SGD:
            b = keep * tl.load(state1 + index, mask=inside, other=0) + fresh * g
            tl.store(state1 + index, b, mask=inside)
            g = g + momentum * b if RULE == NESTEROV else b
        p = p - lr * g
    tl.store(param + index, p, mask=inside)


@triton.jit(do_not_specialize=["n", "step", *NUMBERS])
def flat_kernel(
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
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Without noise: the gradient is ``total * step``."""
    T: tl.constexpr = param.dtype.element_ty
    numbers = _numbers_of(a0, a1, a2, a3, a4, a5, a6, a7, T)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    value = tl.load(total + index, mask=inside, other=0)
    usable = lattice.finite(value)
    gradient = tl.where(usable, value * number(step, T), 0.0)
    _apply(param, state1, state2, index, inside, gradient, numbers, RULE)
    tl.atomic_add(nonfinite, tl.sum((usable == 0).to(tl.int64)))


@triton.jit(do_not_specialize=[
    "n", "step", "first", "skip", "per_unit", *NUMBERS, *chacha.STREAM, *chacha.ROUNDING
])  # fmt: skip
def noisy_kernel(
    param,
    total,
    state1,
    state2,
    nonfinite,
    table,
    key0: tl.int64, key1: tl.int64, key2: tl.int64, key3: tl.int64, nonce: tl.int64,
    rounds: tl.int32,
    r_key0: tl.int64, r_key1: tl.int64, r_key2: tl.int64, r_key3: tl.int64, r_nonce: tl.int64,
    r_rounds: tl.int32,
    first: tl.int64,
    skip: tl.int32,
    n: tl.int64,
    per_unit: tl.int64,
    step: tl.int64,
    a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64,
    a4: tl.int64, a5: tl.int64, a6: tl.int64, a7: tl.int64,
    RULE: tl.constexpr,
    LAW: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The gradient is ``floor((total / u + X) / 2^14) * step``."""
    T: tl.constexpr = param.dtype.element_ty
    FLOATS: tl.constexpr = total.dtype.element_ty.is_floating()
    numbers = _numbers_of(a0, a1, a2, a3, a4, a5, a6, a7, T)
    stream = chacha.unpack(key0, key1, key2, key3, nonce, rounds)
    tile, lane = lattice.lanes_of_program(TILES)
    start = lattice.first_index(tile, lane, skip)
    x = lattice.draws(stream, table, first + tile, lane, LAW)
    unusable = tl.zeros(lane.shape, tl.int32)
    if FLOATS:
        rounding = chacha.unpack(r_key0, r_key1, r_key2, r_key3, r_nonce, r_rounds)
        bits = lattice.rounding_bits(rounding, first + tile, lane)
    for k in tl.static_range(32):
        index = start + 16 * k
        inside = (index >= 0) & (index < n)
        value = tl.load(total + index, mask=inside, other=0)
        if FLOATS:
            units = value * number(per_unit, T)
            usable = lattice.finite(units)
            unusable += (usable == 0).to(tl.int32)
            y = lattice.release_floats(tl.where(usable, units, 0.0), bits[k], x[k])
        else:
            y = lattice.release_integers(value, x[k]).to(T)
        _apply(param, state1, state2, index, inside, y * number(step, T), numbers, RULE)
    if FLOATS:
        tl.atomic_add(nonfinite, tl.sum(unusable).to(tl.int64))


def _rule(rule: update.Rule, t: int, dtype: torch.dtype) -> tuple[int, tuple[int, ...]]:
    """The rule's code and its numbers at update t (from 1), rounded once, as ``csrc`` does."""
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
        code = 3
    else:
        kept = (0.0, 1.0) if t == 1 else (rule.momentum, 1 - rule.dampening)
        numbers = (rule.lr, rule.weight_decay, rule.momentum, *kept, 0.0, 0.0, 0.0)
        code = (2 if rule.nesterov else 1) if rule.momentum else 0
    return code, tuple(_numbers.bits(_numbers.rounded(x, dtype)) for x in numbers)


def _refuse(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    noise: update.Noise | None = None,
    **_: Any,
) -> str | None:
    if params and params[0].dtype not in noise_ops.FLOATS:
        return f"updates float32 and float64 parameters, got {params[0].dtype}"
    return refuse_capture(params[0]) if params and noise is not None else None


def _step(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: update.Rule,
    state: update.State,
    gradient_scale: float = 1.0,
    noise: update.Noise | None = None,
    backend: str | None = None,
) -> int:
    if not params:
        return 0
    dtype = params[0].dtype
    code, numbers = _rule(rule, state.steps + 1, dtype)
    buffers = [state.buffers[name] for name in rule.buffer_names()]
    nonfinite = torch.zeros(1, dtype=torch.int64, device=params[0].device)
    for i, (param, total) in enumerate(zip(params, sums, strict=True)):
        # An absent state's pointer is never used.
        states = [group[i] for group in buffers] + [param] * (2 - len(buffers))
        tensors = param, total, *states, nonfinite
        n = param.numel()
        if noise is None:
            step = _numbers.bits(_numbers.rounded(gradient_scale, dtype))
            block = min(1 << 16, triton.next_power_of_2(n or 1)) if INTERPRETED else 1024
            grid = -(-n // block)
            launch(flat_kernel, grid, param, *tensors, n, step, *numbers, RULE=code, BLOCK=block)
            continue
        scale, (first, skip, tiles) = noise.scales[i], tiles_of(noise.positions[i], n)
        launch(
            noisy_kernel,
            programs(tiles) if n else 0,
            param,
            *tensors,
            lattice.tables(noise.distribution, param.device),
            *chacha.arguments(noise.stream),
            *chacha.arguments(noise.rounding),
            first,
            skip,
            n,
            _numbers.bits(_numbers.per_unit(scale, dtype)),
            _numbers.bits(_numbers.step(scale, gradient_scale, dtype)),
            *numbers,
            RULE=code,
            LAW=lattice.LAW_CODES[noise.distribution],
            TILES=tiles_per_program(tiles),
            maxnreg=REGISTERS,
        )
    increment_version(params)
    state.steps += 1
    return int(nonfinite)


KERNELS: tuple[tuple[str, Any, Any], ...] = (("update.step", _step, _refuse),)
"""``(op, run, refuse)``."""


def _tensors(kind: str, total: str) -> dict[str, str]:
    states = {"state1": f"*{kind}", "state2": f"*{kind}", "nonfinite": "*i64"}
    return {"param": f"*{kind}", "total": f"*{total}", **states}


_RULE = {**dict.fromkeys(("step", *NUMBERS), "i64"), "RULE": "constexpr"}
AOT: tuple[Aot, ...] = (
    *(
        Aot(
            flat_kernel,
            {**_tensors(kind, kind), "n": "i64", **_RULE, "BLOCK": "constexpr"},
            {"RULE": rule, "BLOCK": 1024},
        )
        for kind, rule in (("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("fp64", 3))
    ),
    *(
        Aot(
            noisy_kernel,
            {
                **_tensors(kind, total),
                "table": "*i32",
                **STREAM,
                **ROUNDING,
                **PLACE,
                "per_unit": "i64",
                **_RULE,
                "LAW": "constexpr",
                "TILES": "constexpr",
            },
            {"RULE": rule, "LAW": 0, "TILES": 8},
            registers=REGISTERS,
        )
        for kind, total, rule in (
            ("fp32", "i32", 1),
            ("fp32", "i32", 3),
            ("fp32", "fp32", 3),
            ("fp64", "i64", 3),
        )
    ),
)
