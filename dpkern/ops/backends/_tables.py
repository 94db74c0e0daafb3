"""Structs for kernels on devices, and tables of them in device memory.

A list of tensors travels as one table, one launch for all of them. The layouts are those of
``csrc/core`` (``abi.h`` and the files that end in ``_plan.h``), which the compiled module reports.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...base.errors import BackendError
from ...base.rng import Stream
from .. import update
from . import _device

Table = np.ndarray[Any, np.dtype[Any]]

CHUNK = 4096
"""Columns of a tensor that one block of a kernel takes."""
PIECE = 2048
"""Elements of a parameter that one block updates, unless it makes their noise."""
TILE = 512
"""Coordinates of a noise tile."""

_POINTER, _I64, _U64, _I32, _U32, _F64 = "u8", "i8", "u8", "i4", "u4", "f8"


def struct(**fields: Any) -> np.dtype[Any]:
    """A C struct: every field at its own alignment."""
    return np.dtype(list(fields.items()), align=True)


STREAM = struct(key=(_U32, 8), n0=_U32, n1=_U32, rounds=_I32)
LIES = struct(keep=_U64, width=_U64, reciprocal=_U64, categories=_U32)
ROW_TASK = struct(rows=_POINTER, sum=_POINTER, columns=_I64, first_chunk=_I64, first_column=_I64)
CLIP_BOUND = struct(max_norm=_F64, per_unit=_F64, unit_bound=_I64)
CLIP_PLAN = struct(rows=_I64, p=_I32, style=_I32, arithmetic=_I32)
CLIP_RULE = struct(max_norm=_F64, scale=_F64, automatic="?")
RULE_NUMBERS = struct(
    form=_I32,
    first_step=_I32,
    lr=_F64,
    decay=_F64,
    momentum=_F64,
    fresh=_F64,
    shrink=_F64,
    fresh1=_F64,
    keep2=_F64,
    fresh2=_F64,
    eps=_F64,
    root2=_F64,
    step=_F64,
)
UPDATE_TASK = struct(
    param=_POINTER,
    sum=_POINTER,
    state1=_POINTER,
    state2=_POINTER,
    size=_I64,
    first_position=_U64,
    first_piece=_I64,
    draws_at=_I64,
    per_unit=_F64,
    step=_F64,
    aligned16=_I64,
)
UPDATE_CLOCK = struct(step=_U64, beta1_power=_F64, beta2_power=_F64)
UPDATE_PLAN = struct(
    rule=RULE_NUMBERS,
    stream=STREAM,
    rounding=STREAM,
    draws=_POINTER,
    rounding_bits=_POINTER,
    clock=_POINTER,
    tasks=_I64,
    pieces=_I64,
    noise=_I32,
    law=_I32,
    sum_type=_I32,
    wide=_I32,
)
COEF_PLAN = struct(
    stream=STREAM,
    rounding=STREAM,
    linear=_U64,
    quadratic=_U64,
    draws=_POINTER,
    rounding_bits=_POINTER,
    linear_at=_I64,
    quadratic_at=_I64,
    per_units=_POINTER,
    cells=_POINTER,
    per_unit=_F64,
    cell=_F64,
    rows=_I64,
    columns=_I64,
    noise=_I32,
    form=_I32,
    wide=_I32,
    aligned16=_I32,
)
STRUCTS = {
    "Stream": STREAM,
    "Lies": LIES,
    "CoefPlan": COEF_PLAN,
    "RowTask": ROW_TASK,
    "ClipBound": CLIP_BOUND,
    "ClipPlan": CLIP_PLAN,
    "ClipRule": CLIP_RULE,
    "RuleNumbers": RULE_NUMBERS,
    "UpdateTask": UPDATE_TASK,
    "UpdateClock": UPDATE_CLOCK,
    "UpdatePlan": UPDATE_PLAN,
}
"""Every struct by its name in ``csrc``."""


def one(layout: np.dtype[Any], **fields: Any) -> Table:
    """A single struct, as an array of shape ``[]``; fields left away are zero."""
    value = np.zeros((), layout)
    for name, field in fields.items():
        value[name] = field
    return value


def stream(value: Stream) -> Table:
    """A keystream."""
    key = np.frombuffer(value.key, "<u4")
    return one(STREAM, key=key, n0=value.n0, n1=value.n1, rounds=value.rounds)


def starts(counts: Table) -> tuple[Table, int]:
    """Where each entry's share begins, and the total."""
    ends = np.cumsum(counts, dtype=np.int64)
    return ends - counts, int(ends[-1]) if len(ends) else 0


def rows(addresses: Sequence[int], sums: Sequence[int], columns: Sequence[int]) -> Table:
    """The tasks of a list of per-sample gradients."""
    table = np.zeros(len(addresses), ROW_TASK)
    table["rows"], table["sum"], table["columns"] = addresses, sums, columns
    table["first_chunk"] = starts(-(-table["columns"] // CHUNK))[0]
    table["first_column"] = starts(table["columns"])[0]
    return table


def rule_numbers(rule: update.Rule, t: int) -> Table:
    """The rule at update number t (from 1) as one element needs it."""
    if isinstance(rule, update.SGD):
        return one(
            RULE_NUMBERS,
            form=0 if not rule.momentum else 2 if rule.nesterov else 1,
            first_step=t == 1,
            lr=rule.lr,
            decay=rule.weight_decay,
            momentum=rule.momentum,
            fresh=1 - rule.dampening,
        )
    beta1, beta2 = rule.betas
    return one(
        RULE_NUMBERS,
        form=3,
        lr=rule.lr,  # with a clock, the step size is made on the device
        decay=0.0 if rule.decoupled else rule.weight_decay,
        shrink=1 - rule.lr * rule.weight_decay if rule.decoupled else 1.0,
        fresh1=1 - beta1,
        keep2=beta2,
        fresh2=1 - beta2,
        eps=rule.eps,
        root2=math.sqrt(1 - beta2**t),
        step=rule.lr / (1 - beta1**t),
    )


_KEPT = 32
_made: OrderedDict[tuple[bytes, torch.device, int], torch.Tensor] = OrderedDict()


def device_table(table: Table, device: torch.device) -> torch.Tensor:
    """The table's bytes on the device, ready on its current stream; kept, because the addresses
    of one training step are mostly those of the last.

    Raises:
        BackendError: a CUDA graph is being captured, which would copy from memory that is gone
            when it is replayed.
    """
    content = table.tobytes()
    place = content, device, _device.stream(device)
    found = _made.get(place)
    if found is not None:
        _made.move_to_end(place)
        return found
    if _device.capturing(device):
        raise BackendError(
            "CUDA graph",
            expected="tensors of an earlier call on this stream",
            got="new addresses, which a graph cannot copy to the device",
            remedy="Run the operation once outside of the capture, on the same tensors.",
        )
    host = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
    if device.type == "cuda":
        host = host.pin_memory()
    made = _made[place] = host.to(device, non_blocking=True)
    if len(_made) > _KEPT:
        _made.popitem(last=False)
    return made
