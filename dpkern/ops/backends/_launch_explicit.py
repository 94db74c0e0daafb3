"""Per-sample gradients that exist anyway on device kernels: norms, clip factors, weighted sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ...base import layouts
from ...base.memory import memory_order
from . import _device, _tables
from . import _kernels as table
from ._launch_clip import GRADS, add_rows
from ._launch_noise import FLOATS
from ._start import Device, Rows, refuse_first

Tensors = Sequence[torch.Tensor]


def explicit_norm(on: Device, grads: Tensors) -> torch.Tensor:
    batch, device = grads[0].shape[0], grads[0].device
    with _device.guard(device) as cuda:
        rows, _kept = _tables.row_list(grads, _columns(grads), batch)
        chunks = int(rows["chunks"])
        squares = torch.zeros(batch, dtype=torch.float64, device=device)
        partial = torch.empty(batch, chunks, dtype=torch.float64, device=device)
        grad = GRADS[grads[0].dtype]
        on.start(table.POWER, (grad,), cuda, all=rows, p=2, partial=partial)
        sizes = {"chunks": chunks, "batch": batch}
        on.start(table.SQUARE, (), cuda, partial=partial, squares=squares, **sizes)
    return squares


def clip_factors(
    on: Device,
    squares: Tensors,
    max_grad_norm: float,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    automatic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, device = squares[0].shape[0], squares[0].device
    rule = _tables.one(
        layouts.CLIP_RULE,
        max_norm=float(max_grad_norm),
        scale=float(scale),
        automatic=automatic,
    )
    with _device.guard(device) as cuda:
        addresses = np.array([part.data_ptr() for part in squares], np.uint64)
        norms = torch.empty(batch, dtype=torch.float64, device=device)
        factors = torch.empty(batch, dtype=dtype, device=device)
        on.start(
            table.CLIP_FACTORS,
            (FLOATS[dtype],),
            cuda,
            squares=_tables.device_table(addresses, device),
            count=len(squares),
            batch=batch,
            rule=rule,
            norms=norms,
            factors=factors,
        )
    return factors, norms


def contract(
    on: Device,
    grads: Tensors,
    factors: torch.Tensor,
    outs: Tensors,
) -> None:
    device, value = factors.device, FLOATS[factors.dtype]
    with _device.guard(device) as cuda:
        # A gradient in another order of entries is summed in that order, then put right.
        flat = [
            out if part.is_contiguous() else torch.zeros_like(out).view(-1)
            for part, out in zip(grads, outs, strict=True)
        ]
        rows, _kept = _tables.row_list(grads, _columns(grads), len(factors), flat)
        room = _device.Workspace({"sums": table.partial_sums(rows, value)}, device)
        weights = _tables.one(layouts.FACTORS, of=factors.data_ptr(), row_stride=1)
        powers = _tables.one(layouts.POWERS)
        add_rows(
            on, (GRADS[grads[0].dtype], value, value), cuda, rows, weights, room["sums"], powers
        )
    for part, out, total in zip(grads, outs, flat, strict=True):
        if total is out:
            increment_version(out)
            continue
        order = [i - 1 for i in memory_order(part)]
        with torch.no_grad():
            out.permute(order).add_(total.view([out.shape[i] for i in order]))


def _columns(grads: Tensors) -> list[int]:
    return [part[0].numel() if len(part) else 0 for part in grads]


KERNELS: Rows = (
    ("ghost.explicit_norm", explicit_norm, refuse_first),
    ("ghost.clip_factors", clip_factors, refuse_first),
    ("ghost.contract", contract, refuse_first),
)
"""``(op, run, refuse)``."""
