"""The update, counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...base.counts import Counts
from ...ops import update
from ._native import addresses, kernels, sizes, tallied
from ._tally import Kernel, Tally
from .noise import LAW_CODES

Tensors = Sequence[torch.Tensor]
_SUM_CODES = {torch.int32: 0, torch.int64: 1}
CLOCK = Tally(counts=Counts(LOAD=3), bytes_read=24)
"""Reading a clock."""


def _step(
    params: Tensors,
    sums: Tensors,
    *,
    rule: update.Rule,
    state: update.State,
    gradient_scale: float = 1.0,
    noise: update.Noise | None = None,
) -> tuple[int, Tally]:
    if not params:
        return 0, Tally()
    clocked = CLOCK if noise is not None and noise.clock is not None else Tally()
    noise, t, powers = update.at_clock(noise, rule, state.steps)
    none = [0] * len(params)
    buffers = [addresses(state.buffers[name]) for name in rule.buffer_names()] + [none, none]
    bad, tally = tallied(
        kernels().update_step(
            rule.packed(t, powers),
            None if noise is None else _packed(noise),
            None if noise is None else _draws(noise),
            _SUM_CODES.get(sums[0].dtype, 2),
            params[0].dtype is torch.float64,
            gradient_scale,
            addresses(params),
            addresses(sums),
            buffers[0],
            buffers[1],
            sizes(params),
            none if noise is None else list(noise.positions),
            [0.0] * len(params) if noise is None else list(noise.scales),
        )
    )
    increment_version(params)
    state.steps += 1
    return bad, tally + clocked


def _packed(noise: update.Noise) -> tuple[Any, ...]:
    rounding = noise.rounding.packed() if noise.rounding is not None else None
    return LAW_CODES[noise.distribution], noise.stream.packed(), rounding


def _draws(noise: update.Noise) -> tuple[int, int, int, int] | None:
    made = noise.draws
    if made is None:
        return None
    rounding = 0 if made.rounding is None else made.rounding.data_ptr()
    return made.first, len(made.values), made.values.data_ptr(), rounding


KERNELS: dict[str, Kernel] = {"update.step": _step}
