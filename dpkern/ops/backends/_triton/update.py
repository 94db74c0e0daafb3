"""The update: noise, the gradient and the optimizer's rule of all tensors in one launch.

Sums that are noised in other coordinates have a launch of their own (``update_mapped``).

Noise that was made ahead is added in a launch for each tensor before it.

The tensors travel as the table that CUDA's kernel reads, of 64-bit words: addresses, sizes and
numbers (``layouts.UPDATE_TASK``). A program works on a piece of one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ....base import layouts
from ....base.codes import RuleForm
from ... import noise as noise_ops
from ... import update
from ..._count import Count, known
from ..._pair_map import MOST_COORDINATES
from .. import _launch_update, _numbers, _tables
from . import chacha, lattice, sources
from .launch import launch, number
from .noise import REGISTERS, release

SGD, MOMENTUM, NESTEROV, ADAM = (tl.constexpr(int(form)) for form in RuleForm)
NUMBERS = tuple(f"a{i}" for i in range(8))
"""A rule's numbers, in the parameters' dtype."""


def _word(field: str) -> tl.constexpr:
    """Return at which 64-bit word of its task a field stands."""
    return tl.constexpr(layouts.UPDATE_TASK.offsets[field] // 8)


WORDS = tl.constexpr(layouts.UPDATE_TASK.size // 8)
PARAM, SUM, STATE1, STATE2 = map(_word, ("param", "sum", "state1", "state2"))
SIZE, POSITION, FIRST = map(_word, ("size", "first_position", "first_piece"))
PER_UNIT, STEP = map(_word, ("per_unit", "step"))
TYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


@triton.jit
def number_of_task(tasks, count, program):
    """Return the number of the task that has this program: the last that begins there or before."""
    low = tl.zeros((), tl.int64)
    high = low + count
    while high - low > 1:
        middle = (low + high) // 2
        begun = tl.load(tasks + WORDS * middle + FIRST) <= program
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    return low


@triton.jit
def _task_of(tasks, count, program):
    """Return the words of the task that has this program."""
    return tasks + WORDS * number_of_task(tasks, count, program)


@triton.jit
def array_of(task, FIELD: tl.constexpr, dtype: tl.constexpr):
    """Return the pointer to the first entry of one of a task's arrays."""
    return tl.load(task + FIELD).to(tl.pointer_type(dtype))


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
def numbers_of(a0, a1, a2, a3, a4, a5, a6, a7, dtype: tl.constexpr):
    return (
        number(a0, dtype), number(a1, dtype), number(a2, dtype), number(a3, dtype),
        number(a4, dtype), number(a5, dtype), number(a6, dtype), number(a7, dtype),
    )  # fmt: skip


@triton.jit
def apply_rule(param, state1, state2, index, inside, gradient, numbers, RULE: tl.constexpr):
    """Apply the rule with the operations of ``csrc/core/optimizer.h`` in their order."""
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


@triton.jit(do_not_specialize=["count", *NUMBERS])
def update_kernel(
    tasks,
    nonfinite,
    count: tl.int64,
    a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64,
    a4: tl.int64, a5: tl.int64, a6: tl.int64, a7: tl.int64,
    T: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply the rule to sums as they are; those that are not finite count as 0 and are counted."""
    program = tl.program_id(0).to(tl.int64)
    task = _task_of(tasks, count, program)
    index = (program - tl.load(task + FIRST)) * BLOCK + tl.arange(0, BLOCK)
    inside = index < tl.load(task + SIZE)
    value = tl.load(array_of(task, SUM, T) + index, mask=inside, other=0)
    usable = lattice.finite(value)
    gradient = tl.where(usable, value * number(tl.load(task + STEP), T), 0.0)
    tl.atomic_add(nonfinite, tl.sum(tl.where(usable, 0, 1)).to(tl.int64))
    param, state1, state2 = (
        array_of(task, PARAM, T),
        array_of(task, STATE1, T),
        array_of(task, STATE2, T),
    )
    numbers = numbers_of(a0, a1, a2, a3, a4, a5, a6, a7, T)
    apply_rule(param, state1, state2, index, inside, gradient, numbers, RULE)


@triton.jit(do_not_specialize=["count", *chacha.STREAM, *sources.READ, *chacha.ROUNDING, *NUMBERS])
def noised_update_kernel(
    tasks,
    nonfinite,
    count: tl.int64,
    table,
    key0: tl.int64, key1: tl.int64, key2: tl.int64, key3: tl.int64, nonce: tl.int64,
    rounds: tl.int32,
    entries: tl.int64, start: tl.int64, shift: tl.int32,
    r_key0: tl.int64, r_key1: tl.int64, r_key2: tl.int64, r_key3: tl.int64, r_nonce: tl.int64,
    r_rounds: tl.int32,
    a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64,
    a4: tl.int64, a5: tl.int64, a6: tl.int64, a7: tl.int64,
    T: tl.constexpr,
    S: tl.constexpr,
    RULE: tl.constexpr,
    SOURCE: tl.constexpr,
    LAW: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Release the sums of type S and apply the rule: the noise stays in registers."""
    FLOATS: tl.constexpr = S.is_floating()
    program = tl.program_id(0).to(tl.int64)
    task = _task_of(tasks, count, program)
    position, size = tl.load(task + POSITION), tl.load(task + SIZE)
    per_unit, unit = number(tl.load(task + PER_UNIT), T), number(tl.load(task + STEP), T)
    total, param = array_of(task, SUM, S), array_of(task, PARAM, T)
    state1, state2 = array_of(task, STATE1, T), array_of(task, STATE2, T)
    numbers = numbers_of(a0, a1, a2, a3, a4, a5, a6, a7, T)
    lanes = tl.arange(0, lattice.LANES * TILES)
    tile, lane = lanes // lattice.LANES, lanes % lattice.LANES
    tile += (program - tl.load(task + FIRST)) * TILES
    begin = lattice.first_index(tile, lane, position % lattice.TILE)
    tile += position // lattice.TILE
    stream = chacha.unpack(key0, key1, key2, key3, nonce, rounds)
    x = sources.draws(stream, table, entries, start, shift, tile, lane, SOURCE, LAW)
    unusable = tl.zeros((lane.shape[0], 8), tl.int32)
    if FLOATS:
        rounding = chacha.unpack(r_key0, r_key1, r_key2, r_key3, r_nonce, r_rounds)
        bits = lattice.rounding_bits(rounding, tile, lane)
    for first in tl.static_range(0, 32, 8):
        index = begin[:, None] + lattice.LANES * (first + tl.arange(0, 8))[None, :]
        inside = (index >= 0) & (index < size)
        v = tl.load(total + index, mask=inside, other=0)
        drawn = lattice.side_by_side(x, first)
        if FLOATS:
            units = v * per_unit
            usable = lattice.finite(units)
            unusable += tl.where(usable, 0, 1)
            units = tl.where(usable, units, 0.0)
            y = lattice.release_floats(units, lattice.side_by_side(bits, first), drawn)
        else:
            y = lattice.release_integers(v, drawn).to(T)
        apply_rule(param, state1, state2, index, inside, y * unit, numbers, RULE)
    if FLOATS:
        tl.atomic_add(nonfinite, tl.sum(unusable).to(tl.int64))


def rule_of(rule: update.Rule, t: int, dtype: torch.dtype) -> tuple[int, tuple[int, ...]]:
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
        code = _tables.sgd_form(rule)
    return int(code), tuple(_numbers.bits(_numbers.rounded(x, dtype)) for x in numbers)


def refuse(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    noise: update.Noise | None = None,
    maps: update.PairMaps | None = None,
    **_: Any,
) -> str | None:
    if params and params[0].dtype not in noise_ops.FLOATS:
        return f"updates float32 and float64 parameters, got {params[0].dtype}"
    if noise is not None and noise.step_counter is not None:
        return "takes the step as a number, got a step counter in device memory"
    return None if maps is None else _refused_maps(maps, noise)


def _refused_maps(maps: update.PairMaps, noise: update.Noise | None) -> str | None:
    """Return why a kernel cannot take these maps, or None."""
    most = max((each.rank for each in maps.each if each is not None), default=0)
    if most > MOST_COORDINATES:
        return f"has up to {MOST_COORDINATES} coordinates of a channel pair, got {most}"
    if noise is not None and noise.draws is not None and noise.draws.in_memory:
        return "noises sums as they are with draws in memory, got maps"
    return None


def _released(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    noise: update.Noise,
    gradient_scale: float,
    nonfinite: torch.Tensor,
) -> list[torch.Tensor]:
    """Return gradients whose noise was made ahead, in memory."""
    made = [torch.empty_like(param) for param in params]
    for i, (total, gradient) in enumerate(zip(sums, made, strict=True)):
        release(
            total,
            gradient,
            nonfinite,
            position=noise.positions[i],
            distribution=noise.distribution,
            stream=noise.stream,
            rounding=noise.rounding,
            draws=noise.draws,
            per_unit=_numbers.per_unit(noise.scales[i], gradient.dtype),
            unit=_numbers.step(noise.scales[i], gradient_scale, gradient.dtype),
        )
    return made


def step(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: update.Rule,
    state: update.State,
    gradient_scale: float = 1.0,
    noise: update.Noise | None = None,
) -> Count:
    """Run ``update.step`` on sums that are noised as they are."""
    if not params:
        return 0
    dtype, device = params[0].dtype, params[0].device
    code, numbers = rule_of(rule, state.steps + 1, dtype)
    buffers = [state.buffers[name] for name in rule.buffer_names()]
    nonfinite = torch.zeros(1, dtype=torch.int64, device=device)
    if noise is not None and noise.draws is not None and noise.draws.in_memory:
        sums = _released(params, sums, noise, gradient_scale, nonfinite)
        noise, gradient_scale = None, 1.0
    tasks, pieces = _launch_update.tasks_of(params, sums, buffers, gradient_scale, noise)
    counts = np.diff(tasks["first_piece"], append=pieces)
    each = 1 if noise is None else lattice.tiles_per_program(int(counts.max(initial=1)))
    tasks["first_piece"], programs = _tables.starts(-(-counts // each))
    table = _tables.device_table(tasks, device).view(torch.int64)
    meta: dict[str, Any] = {"T": TYPES[dtype], "RULE": code}
    given: tuple[Any, ...] = table, nonfinite, len(tasks)
    if noise is None:
        meta |= {"BLOCK": int(layouts.UPDATE_PIECE), "warps": 8}
        launch(update_kernel, programs, table, *given, *numbers, **meta)
    else:
        drawn, constants = sources.drawn(noise.draws, noise.stream, noise.distribution, device)
        meta |= constants | {"S": TYPES[sums[0].dtype], "TILES": each}
        meta["maxnreg"] = REGISTERS if dtype is torch.float32 else 255
        given += *drawn, *chacha.arguments(noise.rounding), *numbers
        launch(noised_update_kernel, programs, table, *given, **meta)
    increment_version(params)
    state.steps += 1
    return known(nonfinite[0])
