"""Coefficients of polynomial losses on device kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...base import layouts
from ...base.codes import COEF_FORMS, DrawSource, NoiseOrigin
from .. import _lattice, coef
from . import _device, _numbers, _tables
from . import _kernels as table
from ._launch_noise import ahead, made_in_tiles
from ._start import Device, Rows, refuse_first

Tensors = tuple[torch.Tensor, ...]


WIDEST = 3584
"""Features that a block holds a row of coefficients of."""


def plan(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    form: str,
    noise: coef.Noise | None,
    moved: Sequence[torch.Tensor] = (),
) -> tuple[_tables.Table, Tensors]:
    """Return the ``CoefPlan`` of a call that moves these tensors in packs, and its operands."""
    made = _tables.one(
        layouts.COEF_PLAN,
        rows=rows,
        columns=columns,
        form=COEF_FORMS.code(form),
        wide=dtype is torch.float64,
    )
    kept: Tensors = ()
    addresses = [tensor.data_ptr() for tensor in moved]
    if noise is not None:
        behind = coef.quadratic_position(noise.position, rows * columns)
        made["linear"], made["quadratic"], made["noise"] = (
            noise.position,
            behind,
            NoiseOrigin.stream,
        )
        made["draws"] = _tables.draws(noise.draws or noise.stream)
        made["rounding"] = _tables.stream(noise.rounding or noise.stream)
        if isinstance(noise.scale, torch.Tensor):
            kept = tuple(f(noise.scale, dtype) for f in (_lattice.per_unit, _lattice.cell))
            made["per_units"], made["cells"] = (tensor.data_ptr() for tensor in kept)
        else:
            made["per_unit"] = _numbers.per_unit(noise.scale, dtype)
            made["cell"] = _numbers.cell(noise.scale, dtype)
        if noise.draws is not None and not made_in_tiles(noise.draws):
            values, bits = noise.draws.values, noise.draws.rounding
            assert bits is not None
            places = noise.position - noise.draws.first, behind - noise.draws.first
            made["noise"], (made["linear_at"], made["quadratic_at"]) = NoiseOrigin.draws, places
            addresses += [
                ahead.data_ptr() + ahead.element_size() * at
                for ahead in (values, bits)
                for at in places
            ]
    made["aligned16"] = all(address % 16 == 0 for address in addresses)
    return made, kept


def _instance(
    plan: _tables.Table, tile: table.CudaKernel, flat: table.CudaKernel
) -> tuple[table.CudaKernel, table.Instance]:
    """Return the kernel for the plan's source of noise, with its template arguments."""
    value, origin = "double" if plan["wide"] else "float", NoiseOrigin(int(plan["noise"]))
    if origin is not NoiseOrigin.stream:
        return flat, (value, table.BOOLS[origin is NoiseOrigin.draws])
    by_law = DrawSource(int(plan["draws"]["source"])) is DrawSource.stream
    return tile, (value, table.COEF_DRAWN[not by_law])


def _in_memory(
    on: Device, noise: coef.Noise | None, linear: int, quadratic: int, device: torch.device
) -> coef.Noise | None:
    """Return the noise of so many coefficients, with rounding bits beside draws in memory."""
    if noise is None or made_in_tiles(noise.draws):
        return noise
    return ahead(on).of_coefficients(noise, linear, quadratic, device)


def perturb(
    on: Device,
    targets: torch.Tensor,
    *,
    form: str,
    noise: coef.Noise | None = None,
    out: coef.QuadraticCoefficients | None = None,
) -> coef.QuadraticCoefficients:
    coef.check_release(targets, noise)
    with _device.guard(targets.device) as cuda:
        noise = _in_memory(on, noise, targets.numel(), targets.numel(), targets.device)
        made = out or coef.QuadraticCoefficients(
            torch.empty_like(targets), torch.empty_like(targets)
        )
        moved = targets, *made
        packed, _kept = plan(len(targets), targets.shape[1], targets.dtype, form, noise, moved)
        given = dict(zip(("targets", "linear", "quadratic"), moved, strict=True))
        kernel, instance = _instance(packed, table.PERTURB_TILE, table.PERTURB_FLAT)
        on.start(kernel, instance, cuda, plan=packed, **given)
    increment_version(made)
    return made


def quadratic(
    on: Device,
    z: torch.Tensor,
    targets: torch.Tensor,
    *,
    form: str,
    noise: coef.Noise | None = None,
    shift: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    coef.check_release(targets, noise)
    with _device.guard(z.device) as cuda:
        noise = _in_memory(on, noise, z.numel(), z.numel(), z.device)
        made = out or (z.new_empty(len(z), dtype=torch.float64), torch.empty_like(z))
        packed, _kept = plan(len(z), z.shape[1], z.dtype, form, noise)
        if not z.numel():
            made[0].detach().zero_()
        given = {"z": z, "targets": targets, "shift": shift, "loss": made[0], "dz": made[1]}
        kernel, instance = _instance(packed, table.QUADRATIC_TILE, table.QUADRATIC_FLAT)
        on.start(kernel, instance, cuda, plan=packed, **given)
    increment_version(made)
    return made


def expanded(
    on: Device,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    noise: coef.Noise | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    records, classes, width = len(hidden), *weights.shape
    numbers = classes * width
    with _device.guard(hidden.device) as cuda:
        sizes = records * numbers, records * numbers * width
        noise = _in_memory(on, noise, *sizes, hidden.device)
        made = loss, dweights, dhidden = out or coef.empty_results(hidden, weights)
        packed, _kept = plan(records, numbers, hidden.dtype, coef.FORMS[0], noise)
        if not records * numbers:
            for tensor in made:
                tensor.detach().zero_()
        rooms = table.feature_rooms(records, classes, width)
        room = _device.Workspace(rooms, hidden.device)
        arrays = (hidden, targets, weights, loss, dhidden)
        kernel, instance = _instance(packed, table.FEATURES_TILE, table.FEATURES_FLAT)
        names = layouts.FEATURE_ARRAYS.fields
        addresses = (tensor.data_ptr() for tensor in arrays)
        on.start(
            kernel,
            instance,
            cuda,
            plan=packed,
            sizes=_tables.one(layouts.FEATURE_SIZES, classes=classes, width=width),
            of=_tables.one(layouts.FEATURE_ARRAYS, **dict(zip(names, addresses, strict=True))),
            sums=_tables.one(layouts.FEATURE_SUMS, **{name: room[name] for name in rooms}),
        )
        given = {"of_records": room["columns"], "dweights": dweights}
        counts = {"records": records, "numbers": numbers}
        on.start(table.FEATURES_SUM, instance[:1], cuda, **counts, **given)
    increment_version(made)
    return made


def descend(
    on: Device,
    encoder: torch.Tensor,
    decoder: torch.Tensor,
    stopped: torch.Tensor,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    order: torch.Tensor,
    *,
    form: str,
    added: torch.Tensor | None = None,
    draws: torch.Tensor | None = None,
    rounding: torch.Tensor | None = None,
    **numbers: float,
) -> None:
    runs, users, features, units = encoder.shape
    tensors = {
        "encoder": encoder,
        "decoder": decoder,
        "stopped": stopped,
        "inputs": inputs,
        "targets": targets,
        "order": order,
        "added": added,
        "draws": draws,
        "rounding": rounding,
    }
    with _device.guard(encoder.device) as cuda:
        call = _tables.one(
            layouts.DESCENT,
            **{name: 0 if t is None else t.data_ptr() for name, t in tensors.items()},
            **numbers,
            runs=runs,
            users=users,
            features=features,
            units=units,
            steps=order.shape[1],
            records=inputs.shape[1],
            input_tables=len(inputs),
            target_tables=len(targets),
            form=COEF_FORMS.code(form),
        )
        value = _value(encoder)
        room = table.descent_room(value, features, units)
        assert room is not None
        on.start(table.DESCEND, (value, *map(str, room)), cuda, call=call)
    increment_version((encoder, decoder, stopped))


def _value(like: torch.Tensor) -> str:
    return "double" if like.dtype is torch.float64 else "float"


def _refuse_large(on: Device, encoder: torch.Tensor, *given: Any, **named: Any) -> str | None:
    _, users, features, units = encoder.shape
    value = _value(encoder)
    if users > table.DESCENT_USERS or table.descent_room(value, features, units) is None:
        most = table.DESCENT_ROOMS[value][-1]
        return (
            f"has registers for {table.DESCENT_USERS} users of {layouts.LANES * most[1]} features "
            f"and {most[0]} units of the code, got {users}, {features} and {units}"
        )
    return refuse_first(on, encoder)


def _refuse_wide(on: Device, hidden: torch.Tensor, *given: Any, **named: Any) -> str | None:
    if hidden.shape[1] > WIDEST:
        return f"holds rows of at most {WIDEST} features, got {hidden.shape[1]}"
    return refuse_first(on, hidden, *given, **named)


KERNELS: Rows = (
    ("coef.descend", descend, _refuse_large),
    ("coef.perturb", perturb, refuse_first),
    ("coef.quadratic", quadratic, refuse_first),
    ("coef.expanded", expanded, _refuse_wide),
)
"""``(op, run, refuse)``."""
