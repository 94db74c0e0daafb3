"""Clipping of explicit per-sample gradients on device kernels.

The gradients are read for the norms, and again for the sums; many rows that fit a block's registers
are read once. Exact sums are then repaired where a sample's integers exceed its bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ...base import layouts
from ...base.codes import STYLES, Arithmetic
from .. import clip
from . import _device, _tables
from . import _kernels as table
from ._start import Device, Rows

Tensors = Sequence[torch.Tensor]

GRADS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "Bfloat16"}
_SUMS = {Arithmetic.exact32: "std::int32_t", Arithmetic.exact64: "std::int64_t"}


def _run(
    on: Device,
    request: clip.ClipRequest,
    arithmetic: Arithmetic,
    sums: Tensors = (),
    per_units: Sequence[float] | None = None,
    maps: _tables.Table | None = None,
) -> torch.Tensor:
    """Run the kernels; norms per sample and tensor, float64 ``[B, tensors]``.

    ``maps`` are ``RowMap``: how entries become those that are normed.
    """
    batch, count = request.batch_size, len(request.tensors)
    device = request.tensors[0].device
    grad = GRADS[request.tensors[0].dtype]
    value = dict(table.GRADS)[grad]
    exact = arithmetic in _SUMS
    with _device.guard(device) as cuda:
        held = [part.contiguous() for part in request.tensors]
        rows, _kept, bounds = _tables_of(request, held, sums, per_units)
        norms = torch.zeros(batch, count, dtype=torch.float64, device=device)
        room = _device.Workspace(table.clip_rooms(rows, arithmetic, grad), device)
        how = _tables.one(
            layouts.CLIP,
            style=STYLES.code(request.style),
            p=request.p,
            has_sums=arithmetic is not Arithmetic.norm_only,
            exact=exact,
            bounds=bounds.data_ptr(),
            norms=norms.data_ptr(),
            factors=room["factors"],
            powers=room["powers"],
        )
        partial = room["partial"]
        chunks = table.held(rows, arithmetic, grad)
        if chunks is not None:
            sums_of = {"all": rows, "partial": room["sums"]}
            instance = grad, value, chunks, "true" if request.p == 2 else "false"
            on.start(table.CLIP_HELD, instance, cuda, clip=how, **sums_of)
            on.start(table.COMBINE, (value,), cuda, splits=table.held_splits(rows), **sums_of)
            return norms
        powers_of = {"all": rows, "p": request.p, "partial": partial}
        if maps is None:
            on.start(table.POWER, (grad,), cuda, **powers_of)
        else:
            table_of = _tables.device_table(maps, device)
            on.start(table.MAPPED_POWER, (grad,), cuda, maps=table_of, **powers_of)
        on.start(table.FACTOR, (value,), cuda, all=rows, clip=how, partial=partial)
        if arithmetic is Arithmetic.norm_only:
            return norms
        each = request.style == "per_layer"
        factors = _tables.one(layouts.FACTORS, of=room["factors"], row_stride=count, task_stride=1)
        powers = _tables.one(
            layouts.POWERS,
            of=room["powers"],
            row_stride=count if each else 1,
            task_stride=each,
            p=request.p,
        )
        types = grad, _SUMS.get(arithmetic, value), value
        add_rows(on, types, cuda, rows, factors, room["sums"], powers)
        if exact:
            on.start(table.REPAIR, types, cuda, all=rows, clip=how)
    return norms


def _tables_of(
    request: clip.ClipRequest,
    held: Tensors,
    sums: Tensors,
    per_units: Sequence[float] | None,
) -> tuple[_tables.Table, torch.Tensor, torch.Tensor]:
    """Return ``Rows``, and the tables of rows and bounds in device memory."""
    bounds = np.zeros(len(held), _tables.dtype(layouts.CLIP_BOUND))
    bounds["max_norm"], bounds["unit_bound"] = request.max_norms, request.unit_bounds
    bounds["per_unit"] = 1.0 if per_units is None else per_units
    columns = [math.prod(part.shape[1:]) for part in held]
    rows, tasks = _tables.row_list(held, columns, request.batch_size, sums)
    return rows, tasks, _tables.device_table(bounds, held[0].device)


def prepare(request: clip.ClipRequest, out: Tensors) -> Any:
    """Copy whatever ``clip_sum`` onto ``out`` needs, so that a CUDA graph may record its launches.

    The result must live as long as the graph.
    """
    with _device.guard(request.tensors[0].device):
        return _tables_of(request, request.tensors, out, _per_units(request))


def _per_units(request: clip.ClipRequest) -> list[float]:
    return [1.0 / unit for unit in request.units]


def add_rows(
    on: Device,
    types: tuple[str, str, str],
    cuda: int,
    rows: _tables.Table,
    factors: _tables.Table,
    partial: int,
    powers: _tables.Table,
) -> None:
    """Add the rows times their factors to the sums of their tasks.

    ``types`` are those of the gradients, the sums and the factors.
    """
    given = {"all": rows, "partial": partial}
    on.start(table.SUM, types, cuda, factors=factors, powers=powers, **given)
    if types[1] == types[2]:
        splits = table.sum_grid(rows)[1]
        on.start(table.COMBINE, types[2:], cuda, splits=splits, **given)


def sample_norm(
    on: Device,
    grads: clip.Gradients,
    *,
    p: int = 2,
    scale: clip.Gradients | None = None,
    center: clip.Gradients | None = None,
) -> torch.Tensor:
    request = clip.ClipRequest.of(grads, 1.0, p, "flat", "float", None)
    maps, held = None, []
    if scale is not None or center is not None:
        maps = np.zeros(len(request.tensors), _tables.dtype(layouts.ROW_MAP))
        for name, given in (("scale", scale), ("center", center)):
            if given is not None:
                wide = [part.detach().double().contiguous() for part in clip.tensors_of(given)]
                maps[name] = [part.data_ptr() for part in wide]
                held.append(wide)  # until the kernel is in the stream
    return clip.combine_norms(_run(on, request, Arithmetic.norm_only, maps=maps), p)


def clip_sum(
    on: Device,
    grads: clip.Gradients,
    max_grad_norm: float | tuple[float, ...],
    *,
    p: int = 2,
    style: str = "flat",
    arithmetic: str = "float",
    unit: float | tuple[float, ...] | None = None,
    out: list[torch.Tensor] | None = None,
    plan: clip.ClipRequest,
) -> clip.ClipResult:
    request = plan
    sums = request.accumulators(out)
    exact = Arithmetic.exact32 if sums[0].dtype is torch.int32 else Arithmetic.exact64
    tier = Arithmetic.float if arithmetic == "float" else exact
    norms = _run(on, request, tier, sums, _per_units(request))
    increment_version(list(sums))
    return request.result(sums, clip.combine_norms(norms, p))


def _refuse_gradients(on: Device, grads: clip.Gradients, *_: Any, **__: Any) -> str | None:
    return on.refusal(*clip.tensors_of(grads))


KERNELS: Rows = (
    ("clip.sample_norm", sample_norm, _refuse_gradients),
    ("clip.clip_sum", clip_sum, _refuse_gradients),
)
"""``(op, run, refuse)``."""
