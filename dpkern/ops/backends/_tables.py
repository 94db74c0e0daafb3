"""Structs for kernels on devices, and tables of them in device memory.

A list of tensors travels as one table, one launch for all of them. ``dpkern.base.layouts`` declares
the structs.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from ...base import codes, layouts
from ...base.errors import BackendError
from ...base.rng import Stream
from ...base.struct_types import Struct
from .. import update
from .._draws import Draws
from . import _device
from ._structs import BYTES

Table = np.ndarray[Any, np.dtype[Any]]


@cache
def dtype(struct: Struct) -> np.dtype[Any]:
    """Return the struct's layout for numpy."""
    formats: list[Any] = [
        dtype(field)
        if isinstance(field, Struct)
        else (field.format if field.count is None else (field.format, field.count))
        for field in struct.fields.values()
    ]
    offsets = [struct.offsets[name] for name in struct.fields]
    layout = {"names": [*struct.fields], "formats": formats, "offsets": offsets}
    return np.dtype({**layout, "itemsize": struct.size}, align=True)  # type: ignore[call-overload, no-any-return]


def one(struct: Struct, **fields: Any) -> Table:
    """Return a single struct, as an array of shape ``[]``; fields left away are zero."""
    value = np.zeros((), dtype(struct))
    for name, field in fields.items():
        value[name] = field
    return value


def stream(value: Stream) -> Table:
    """Return a keystream as a struct."""
    key = np.frombuffer(value.key, "<u4")
    return one(layouts.STREAM, key=key, n0=value.n0, n1=value.n1, rounds=value.rounds)


def draws(source: Draws | Stream) -> Table:
    """Return what a kernel draws from as a struct: a noise source, or the stream of a law."""
    if isinstance(source, Stream):
        return one(layouts.DRAWS, stream=stream(source))
    return np.frombuffer(BYTES["Draws"](source), dtype(layouts.DRAWS)).reshape(())


def starts(counts: Table) -> tuple[Table, int]:
    """Return where each entry's share begins, and the total."""
    ends = np.cumsum(counts, dtype=np.int64)
    return ends - counts, int(ends[-1]) if len(ends) else 0


def rows(addresses: Sequence[int], sums: Sequence[int], columns: Sequence[int]) -> Table:
    """Return the tasks of a list of per-sample gradients."""
    packed, first_chunk, first_column = bytearray(), 0, 0
    for address, total, count in zip(addresses, sums, columns, strict=True):
        packed += layouts.ROW_TASK.pack(address, total, count, first_chunk, first_column)
        first_chunk += -(-count // layouts.CHUNK)
        first_column += count
    return np.frombuffer(packed, dtype(layouts.ROW_TASK))


def row_list(
    grads: Sequence[torch.Tensor],
    columns: Sequence[int],
    batch: int,
    sums: Sequence[torch.Tensor] = (),
) -> tuple[Table, torch.Tensor]:
    """Return ``Rows`` of these gradients, and the table in device memory that it points to."""
    addresses = [part.data_ptr() for part in grads]
    targets = [total.data_ptr() for total in sums] or [0] * len(addresses)
    tasks = device_table(rows(addresses, targets, columns), grads[0].device)
    made = one(
        layouts.ROWS,
        tasks=tasks.data_ptr(),
        count=len(addresses),
        chunks=sum(-(-n // layouts.CHUNK) for n in columns),
        columns=sum(columns),
        rows=batch,
    )
    return made, tasks


def sgd_form(rule: update.SGD) -> codes.RuleForm:
    """Return the formula of one element."""
    if not rule.momentum:
        return codes.RuleForm.plain
    return codes.RuleForm.nesterov if rule.nesterov else codes.RuleForm.momentum


def rule_numbers(rule: update.Rule, t: int) -> Table:
    """Return the rule at update number t (from 1) as one element needs it."""
    if isinstance(rule, update.SGD):
        return one(
            layouts.RULE_NUMBERS,
            form=sgd_form(rule),
            first_step=t == 1,
            lr=rule.lr,
            decay=rule.weight_decay,
            momentum=rule.momentum,
            fresh=1 - rule.dampening,
        )
    beta1, beta2 = rule.betas
    return one(
        layouts.RULE_NUMBERS,
        form=codes.RuleForm.adam,
        lr=rule.lr,  # with a step counter, the step size is made on the device
        decay=0.0 if rule.decoupled else rule.weight_decay,
        shrink=rule.shrink,
        fresh1=1 - beta1,
        keep2=beta2,
        fresh2=1 - beta2,
        eps=rule.eps,
        root2=math.sqrt(1 - beta2**t),
        step=rule.lr / (1 - beta1**t),
    )


_KEPT = 1024
"""Tables of a few kilobytes: more than a step of a hundred layers needs, or all are copied anew."""
_made: OrderedDict[tuple[bytes, torch.device, int], torch.Tensor] = OrderedDict()


class LateTables:
    """Tables of a recording, which are written once it has ended: a graph copies none itself."""

    def __init__(self) -> None:
        self._tables: list[tuple[torch.Tensor, bytes]] = []

    def place(self, content: bytes, device: torch.device) -> torch.Tensor:
        """Return memory of the recording, which will hold these bytes."""
        made = torch.empty(len(content), dtype=torch.uint8, device=device)
        self._tables.append((made, content))
        return made

    def write(self) -> None:
        """Write all tables, which live as long as this object, on the current stream."""
        for made, content in self._tables:
            made.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


_late: LateTables | None = None
"""The tables of the recording that runs now, in every thread: backward passes have their own."""


@contextmanager
def written_late() -> Iterator[LateTables]:
    """Let the recording of this block use tables that nobody has copied to the device before."""
    global _late
    before, _late = _late, LateTables()
    try:
        yield _late
    finally:
        _late = before


def device_table(table: Table, device: torch.device) -> torch.Tensor:
    """Return the table's bytes on the device, ready on its current stream.

    They are kept, because the addresses of one training step are mostly those of the last.

    Raises:
        BackendError: a CUDA graph is being captured, which would copy from memory that is gone
            when it is replayed.
    """
    content = table.tobytes()
    if _late is not None and _device.capturing(device):
        return _late.place(content or b"\0", device)
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
