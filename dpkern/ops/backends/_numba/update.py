"""Update parameters tile by tile, in one pass (csrc/cpu/update.cpp).

The pass holds the noise, the division by the public batch size and the optimizer rule.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch.autograd.graph import increment_version

from ... import update
from .. import _numbers
from .._extension import on_cpu
from .chacha import words_of
from .compile import Array, Number, addresses, entries, inner, kernel, like
from .draws import TILE, release_float, release_integer, room, rounding_tile
from .parallel import in_parts, team_of
from .sources import NO_STREAM, draw_tile, source_of

_GRAIN = 16  # tiles worth a thread
_NO_DRAWS = np.empty(0, np.int32), np.empty(0, np.int16), 0
PLAIN, MOMENTUM, NESTEROV, ADAM = range(4)


@inner
def integer_gradient(total: Array, noise: Any, step: Number, out: Array) -> Number:
    _, _, x, _ = noise
    for i in range(len(total)):
        out[i] = out.dtype.type(release_integer(total[i], x[i])) * step
    return 0


@inner
def plain_gradient(total: Array, step: Number, out: Array) -> Number:
    nonfinite = 0
    for i in range(len(total)):
        finite = np.isfinite(total[i])
        nonfinite += 0 if finite else 1
        out[i] = total[i] * step if finite else out.dtype.type(0)
    return nonfinite


@inner
def float_gradient(total: Array, noise: Any, step: Number, out: Array) -> Number:
    on, per_unit, x, bits = noise
    if not on:
        return plain_gradient(total, step, out)
    number = out.dtype.type
    nonfinite = 0
    for i in range(len(total)):
        units = total[i] * per_unit
        finite = np.isfinite(units)
        nonfinite += 0 if finite else 1
        out[i] = release_float(units if finite else number(0), bits[i], x[i], number) * step
    return nonfinite


def gradient_of(total: Array, noise: Any, step: Number, out: Array) -> Number:
    """Write ``out = release(total) * step``, or ``total * step`` without noise.

    Returns:
        How many were not finite (they count as zero).
    """
    raise NotImplementedError  # by type, below


@overload(gradient_of)
def _gradient_by_type(total: Any, noise: Any, step: Any, out: Any) -> Any:
    chosen = integer_gradient if isinstance(total.dtype, types.Integer) else float_gradient

    def gradient(total: Any, noise: Any, step: Any, out: Any) -> Any:
        return chosen(total, noise, step, out)

    return gradient


@inner
def apply_sgd(kind: int, rule: Array, gradient: Array, param: Array, buffer: Array) -> None:
    lr, decay, momentum, keep, fresh = rule[0], rule[1], rule[2], rule[3], rule[4]
    if kind == PLAIN:
        for i in range(len(param)):
            param[i] -= lr * (gradient[i] + decay * param[i])
        return
    for i in range(len(param)):
        g = gradient[i] + decay * param[i]
        b = keep * buffer[i] + fresh * g
        buffer[i] = b
        param[i] -= lr * (g + momentum * b) if kind == NESTEROV else lr * b


@inner
def apply_adam(rule: Array, gradient: Array, param: Array, mean: Array, square: Array) -> None:
    shrink, decay, fresh1, keep2 = rule[0], rule[1], rule[2], rule[3]
    fresh2, eps, root2, step = rule[4], rule[5], rule[6], rule[7]
    for i in range(len(param)):
        p = param[i] * shrink
        g = gradient[i] + decay * param[i]
        m = mean[i] + fresh1 * (g - mean[i])
        v = keep2 * square[i] + fresh2 * g * g
        mean[i] = m
        square[i] = v
        param[i] = p - step * (m / (np.sqrt(v) / root2 + eps))


@kernel
def _update(
    kind: int,
    rule: Array,
    streams: Any,
    source: Any,
    ahead: Any,
    rounds: Any,
    items: Any,
    like: Any,
    begin: int,
    end: int,
) -> int:
    """Update tiles ``begin .. end - 1`` of all tensors end to end."""
    stream, rounding = streams
    values, carries, first = ahead
    on, stochastic = rounds
    table, sizes, positions, per_units, steps = items
    like_sum, like_param = like
    work, x, bits = room(), np.empty(TILE, np.int32), np.empty(TILE, np.int32)
    gradient = np.empty(TILE, like_param.dtype)
    nonfinite, before = 0, 0
    for item in range(len(sizes)):
        tiles = (sizes[item] + TILE - 1) // TILE
        at = max(begin - before, 0) * TILE
        until = min(min(end - before, tiles) * TILE, sizes[item])
        before += tiles
        while at < until:
            position = positions[item] + at
            offset = position % TILE if on else 0
            count = min(TILE - offset, until - at)
            if len(values) > 0:
                for i in range(count if on else 0):
                    x[offset + i] = values[position - first + i]
            elif on:
                draw_tile(stream, source, position // TILE, work, x)
            if len(carries) > 0:
                for i in range(count if stochastic else 0):
                    bits[offset + i] = np.int32(carries[position - first + i]) & 0xFFFF
            elif stochastic:
                rounding_tile(rounding, position // TILE, work, bits)
            total = entries(table[0, item] + at * like_sum.itemsize, count, like_sum)
            here = slice(offset, offset + count)
            noise = on, per_units[item], x[here], bits[here]
            part = gradient[:count]
            nonfinite += gradient_of(total, noise, steps[item], part)
            shift = at * like_param.itemsize
            param = entries(table[1, item] + shift, count, like_param)
            state1 = entries(table[2, item] + shift, count, like_param)
            if kind < ADAM:
                apply_sgd(kind, rule, part, param, state1)
            else:
                state2 = entries(table[3, item] + shift, count, like_param)
                apply_adam(rule, part, param, state1, state2)
            at += count
    return nonfinite


def _rule(rule: update.Rule, t: int, powers: tuple[float, float]) -> tuple[int, list[float]]:
    """Return the code of the formula, and its numbers in float64."""
    if isinstance(rule, update.SGD):
        kind = NESTEROV if rule.nesterov else MOMENTUM if rule.momentum else PLAIN
        keep, fresh = (0.0, 1.0) if t == 1 else (rule.momentum, 1 - rule.dampening)
        return kind, [rule.lr, rule.weight_decay, rule.momentum, keep, fresh]
    (beta1, beta2), (power1, power2) = rule.betas, powers
    shrink = 1 - rule.lr * rule.weight_decay if rule.decoupled else 1.0
    decay = 0.0 if rule.decoupled else rule.weight_decay
    root2, step = math.sqrt(1 - power2), rule.lr / (1 - power1)
    return ADAM, [shrink, decay, 1 - beta1, beta2, 1 - beta2, rule.eps, root2, step]


def _update_step(
    params: list[torch.Tensor],
    sums: list[torch.Tensor],
    *,
    rule: update.Rule,
    state: update.State,
    gradient_scale: float = 1.0,
    noise: update.Noise | None = None,
    maps: update.PairMaps | None = None,
) -> int:
    del maps  # refused
    if not params:
        return 0
    dtype, count = params[0].dtype, len(params)
    now = update.at_step_counter(noise, rule, state.steps)
    if now is None:
        state.steps += 1
        return 0
    noise, rule, t, powers = now
    kind, numbers = _rule(rule, t, powers)
    like_sum, like_param = like(sums[0].dtype), like(dtype)
    (words, source), positions = source_of(None, None, "gaussian"), [0] * count
    per_units, steps = [0.0] * count, [_numbers.rounded(gradient_scale, dtype)] * count
    stochastic = noise is not None and sums[0].dtype is dtype
    ahead, rounding, draws = _NO_DRAWS, NO_STREAM, None if noise is None else noise.draws
    if noise is not None:
        if draws is not None and draws.in_memory:
            ahead, draws = _in_memory(draws), None
        if noise.rounding is not None:
            rounding = words_of(noise.rounding)
        words, source = source_of(draws, noise.stream, noise.distribution)
        positions = list(noise.positions)
        per_units = [_numbers.per_unit(scale, dtype) for scale in noise.scales]
        steps = [_numbers.step(scale, gradient_scale, dtype) for scale in noise.scales]
    states = [state.buffers[name] for name in rule.buffer_names()]
    none = [np.zeros(count, np.int64)] * (2 - len(states))
    table = np.stack([*(addresses(group) for group in (sums, params, *states)), *none])
    sizes = np.array([p.numel() for p in params], np.int64)
    floats = [np.array(group, like_param.dtype) for group in (numbers, per_units, steps)]
    items = table, sizes, np.array(positions, np.int64), *floats[1:]
    on = noise is not None, stochastic
    tiles = int((-(-sizes // TILE)).sum())

    def part(_: int, begin: int, end: int) -> int:
        given = kind, floats[0], (words, rounding), source, ahead, on, items, (like_sum, like_param)
        return _update(*given, begin, end)

    bad = sum(in_parts(tiles, team_of(tiles, _GRAIN), part))
    # Autograd must know that these changed, as it would after an in-place torch operation.
    increment_version(params)
    state.steps += 1
    return bad


def _in_memory(draws: update.Draws) -> tuple[Array, Array, int]:
    """Return draws that are in memory, their rounding bits, and the position of the first."""
    bits = _NO_DRAWS[1] if draws.rounding is None else draws.rounding.numpy()
    return draws.values.numpy(), bits, draws.first


def _refuse_update(params: Any, sums: Any, **kwargs: Any) -> str | None:
    if kwargs.get("maps") is not None:
        return "noises sums as they are, got maps"
    return on_cpu(*params)


KERNELS: tuple[tuple[str, Any, Any], ...] = (("update.step", _update_step, _refuse_update),)
"""``(op, run, refuse)``."""
