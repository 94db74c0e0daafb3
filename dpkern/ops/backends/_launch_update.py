"""An update as its launcher takes it: a plan, and a table of the tensors in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...base.laws import LAWS
from .. import update
from . import _numbers, _tables

Tensors = Sequence[torch.Tensor]

LAW_CODES = {name: code for code, name in enumerate(LAWS)}
SUM_CODES = {torch.int32: 0, torch.int64: 1}
FROM_STREAM, MADE_AHEAD = 1, 2


@dataclass(frozen=True)
class Planned:
    """What a launch reads.

    Attributes:
        plan: ``UpdatePlan``.
        tasks: the table, which a recorded launch needs for as long as it is replayed.
    """

    plan: bytes
    tasks: torch.Tensor

    @classmethod
    def of(
        cls,
        params: Tensors,
        sums: Tensors,
        *,
        rule: update.Rule,
        state: update.State,
        gradient_scale: float = 1.0,
        noise: update.Noise | None = None,
    ) -> Planned:
        """For these arguments of ``update.step``, at least one parameter."""
        first = params[0]
        buffers = [state.buffers[name] for name in rule.buffer_names()]
        table, pieces = tasks_of(params, sums, buffers, gradient_scale, noise)
        plan = _tables.one(
            _tables.UPDATE_PLAN,
            rule=_tables.rule_numbers(rule, state.steps + 1),
            tasks=len(table),
            pieces=pieces,
            sum_type=SUM_CODES.get(sums[0].dtype, 2),
            wide=first.dtype is torch.float64,
        )
        if noise is not None:
            plan["noise"], plan["law"] = FROM_STREAM, LAW_CODES[noise.distribution]
            plan["stream"] = _tables.stream(noise.stream)
            plan["rounding"] = _tables.stream(noise.rounding or noise.stream)
            plan["clock"] = 0 if noise.clock is None else noise.clock.data_ptr()
            if noise.draws is not None:
                bits = noise.draws.rounding
                plan["noise"], plan["draws"] = MADE_AHEAD, noise.draws.values.data_ptr()
                plan["rounding_bits"] = 0 if bits is None else bits.data_ptr()
        return cls(plan.tobytes(), _tables.device_table(table, first.device))


def refuse(sums: Tensors, noise: update.Noise | None) -> str | None:
    """Why the kernels cannot take this noise, or None."""
    draws = None if noise is None else noise.draws
    if draws is not None and draws.rounding is None and sums and sums[0].dtype not in SUM_CODES:
        return "takes draws made ahead for float sums with their rounding bits only"
    return None


def tasks_of(
    params: Tensors,
    sums: Tensors,
    buffers: Sequence[Tensors],
    gradient_scale: float,
    noise: update.Noise | None,
) -> tuple[_tables.Table, int]:
    """One task for every tensor with entries, and the number of pieces of all of them."""
    used = [i for i, param in enumerate(params) if param.numel()]
    dtype = params[0].dtype
    table = np.zeros(len(used), _tables.UPDATE_TASK)
    table["param"] = [params[i].data_ptr() for i in used]
    table["sum"] = [sums[i].data_ptr() for i in used]
    table["size"] = size = np.array([params[i].numel() for i in used], np.int64)
    for name, group in zip(("state1", "state2"), buffers, strict=False):
        table[name] = [group[i].data_ptr() for i in used]
    touched = table["param"] | table["sum"] | table["state1"] | table["state2"]
    pieces = -(-size // _tables.PIECE)
    if noise is None:
        table["step"] = _numbers.rounded(gradient_scale, dtype)
    else:
        table["first_position"] = first = np.array([noise.positions[i] for i in used], np.int64)
        table["per_unit"] = [_numbers.per_unit(noise.scales[i], dtype) for i in used]
        table["step"] = [_numbers.step(noise.scales[i], gradient_scale, dtype) for i in used]
        if noise.draws is None:
            pieces = -(-(first % _tables.TILE + size) // _tables.TILE)
        else:
            table["draws_at"] = at = first - noise.draws.first
            for made in (noise.draws.values, noise.draws.rounding):
                if made is not None:
                    touched |= (made.data_ptr() + made.element_size() * at).astype(touched.dtype)
    table["aligned16"] = touched % 16 == 0
    table["first_piece"], total = _tables.starts(pieces)
    return table, total
