"""Coefficients of polynomial losses on a set of launchers of the CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .. import _lattice, coef
from . import _device, _numbers, _tables
from ._launch_update import FROM_STREAM, MADE_AHEAD

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
) -> tuple[bytes, Tensors]:
    """``CoefPlan`` for this many linear coefficients and a call that moves these tensors in packs,
    and what it points to."""
    made = _tables.one(
        _tables.COEF_PLAN,
        rows=rows,
        columns=columns,
        form=coef.FORMS.index(form),
        wide=dtype is torch.float64,
    )
    kept: Tensors = ()
    addresses = [tensor.data_ptr() for tensor in moved]
    if noise is not None:
        behind = coef.quadratic_position(noise.position, rows * columns)
        made["linear"], made["quadratic"], made["noise"] = noise.position, behind, FROM_STREAM
        made["stream"] = _tables.stream(noise.stream)
        made["rounding"] = _tables.stream(noise.rounding or noise.stream)
        if isinstance(noise.scale, torch.Tensor):
            kept = tuple(f(noise.scale, dtype) for f in (_lattice.per_unit, _lattice.cell))
            made["per_units"], made["cells"] = (tensor.data_ptr() for tensor in kept)
        else:
            made["per_unit"] = _numbers.per_unit(noise.scale, dtype)
            made["cell"] = _numbers.cell(noise.scale, dtype)
        if noise.draws is not None:
            values, bits = noise.draws.values, noise.draws.rounding
            assert bits is not None
            places = noise.position - noise.draws.first, behind - noise.draws.first
            made["noise"], (made["linear_at"], made["quadratic_at"]) = MADE_AHEAD, places
            made["draws"], made["rounding_bits"] = values.data_ptr(), bits.data_ptr()
            addresses += [
                ahead.data_ptr() + ahead.element_size() * at
                for ahead in (values, bits)
                for at in places
            ]
    made["aligned16"] = all(address % 16 == 0 for address in addresses)
    return made.tobytes(), kept


def kernels(
    launchers: Any, check: Callable[[int], None], refusal: Callable[..., str | None]
) -> tuple[tuple[str, Callable[..., Any], Callable[..., str | None]], ...]:
    """``(op, run, refuse)``."""

    def perturb(
        targets: torch.Tensor,
        *,
        form: str,
        noise: coef.Noise | None = None,
        out: coef.Coefficients | None = None,
        backend: str | None = None,
    ) -> coef.Coefficients:
        coef.check_release(targets, noise)
        with _device.guard(targets.device) as cuda:
            made = out or coef.Coefficients(torch.empty_like(targets), torch.empty_like(targets))
            moved = targets, *made
            packed, _kept = plan(len(targets), targets.shape[1], targets.dtype, form, noise, moved)
            check(launchers.coef_perturb(packed, *(tensor.data_ptr() for tensor in moved), cuda))
        increment_version(made)
        return made

    def quadratic(
        z: torch.Tensor,
        targets: torch.Tensor,
        *,
        form: str,
        noise: coef.Noise | None = None,
        shift: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        backend: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        coef.check_release(targets, noise)
        with _device.guard(z.device) as cuda:
            made = out or (z.new_empty(len(z), dtype=torch.float64), torch.empty_like(z))
            packed, _kept = plan(len(z), z.shape[1], z.dtype, form, noise)
            places = (
                z.data_ptr(),
                targets.data_ptr(),
                0 if shift is None else shift.data_ptr(),
                *(tensor.data_ptr() for tensor in made),
            )
            if not z.numel():
                made[0].detach().zero_()
            check(launchers.coef_quadratic(packed, *places, cuda))
        increment_version(made)
        return made

    def expanded(
        hidden: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        *,
        noise: coef.Noise | None = None,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        backend: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = len(hidden), *weights.shape
        with _device.guard(hidden.device) as cuda:
            made = out or coef.empty_results(hidden, weights)
            packed, _kept = plan(sizes[0], weights.numel(), hidden.dtype, coef.FORMS[0], noise)
            room = _device.workspace(launchers.coef_expanded_workspace(*sizes), hidden.device)
            places = (tensor.data_ptr() for tensor in (hidden, targets, weights, *made, room))
            if 0 in sizes:
                for tensor in made:
                    tensor.detach().zero_()
            check(launchers.coef_expanded(packed, *sizes[1:], *places, cuda))
        increment_version(made)
        return made

    def refuse_wide(hidden: torch.Tensor, *given: Any, **named: Any) -> str | None:
        if hidden.shape[1] > WIDEST:
            return f"holds rows of at most {WIDEST} features, got {hidden.shape[1]}"
        return refuse(hidden, *given, **named)

    def refuse(
        first: torch.Tensor, *_: Any, noise: coef.Noise | None = None, **__: Any
    ) -> str | None:
        if noise is not None and noise.draws is not None and noise.draws.rounding is None:
            return "takes draws made ahead with their rounding bits only"
        return refusal(first)

    return (
        ("coef.perturb", perturb, refuse),
        ("coef.quadratic", quadratic, refuse),
        ("coef.expanded", expanded, refuse_wide),
    )
