"""Coefficients of polynomial losses: made, released by the kernel of tensors, then evaluated.

All in one kernel would save the coefficients' way through memory, but take a minute to compile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ... import _lattice, coef
from .. import _numbers
from .launch import INTERPRETED, launch
from .noise import release

LANES = tl.constexpr(coef.LANES)
_ROWS = 8  # of a program that sums losses
_MOST_ROWS = 1024


@triton.jit
def _quadratic_of(x, PRINTED: tl.constexpr):
    if PRINTED:
        return x * 0.5 - 0.25
    else:
        return x * 0.0 + 0.125


@triton.jit(do_not_specialize=["rows", "columns"])
def loss_kernel(
    z,
    first,
    second,
    shift,
    loss,
    dz,
    rows: tl.int64,
    columns: tl.int64,
    NOISED: tl.constexpr,
    PRINTED: tl.constexpr,
    SHIFTED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the loss: of coefficients ``first`` and ``second`` if NOISED, else of ``first``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    sums = tl.zeros([ROWS, LANES], tl.float64)
    for start in range(0, columns, LANES):
        column = start + lane
        inside = (row < rows) & (column < columns)
        index = row * columns + column
        w = tl.load(z + index, mask=inside, other=0)
        if SHIFTED:
            w = w + tl.load(shift + row, mask=row < rows, other=0)
        given = tl.load(first + index, mask=inside, other=0)
        if NOISED:
            a1, a2 = given, tl.load(second + index, mask=inside, other=0)
        else:
            a1, a2 = 0.5 - given, _quadratic_of(given, PRINTED)
        tl.store(dz + index, (a2 + a2) * w + a1, mask=inside)
        wide = w.to(tl.float64)
        term = wide * (a1.to(tl.float64) + a2.to(tl.float64) * wide)
        sums += tl.where(inside, term, 0.0)
    half8 = tl.sum(tl.reshape(sums, [ROWS, 2, 8]), axis=1)
    half4 = tl.sum(tl.reshape(half8, [ROWS, 2, 4]), axis=1)
    half2 = tl.sum(tl.reshape(half4, [ROWS, 2, 2]), axis=1)
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(loss + at, tl.sum(half2, axis=1), mask=at < rows)


def never(*_: Any, **__: Any) -> None:
    return None


def _perturb(
    targets: torch.Tensor,
    *,
    form: coef.Form,
    noise: coef.Noise | None = None,
    out: coef.QuadraticCoefficients | None = None,
) -> coef.QuadraticCoefficients:
    coef.check_release(targets, noise)
    made = coef.perturb.reference(targets, form=form, out=out)  # a few operations of torch
    if noise is None:
        return made
    behind = coef.quadratic_position(noise.position, targets.numel())
    for values, position in zip(made, (noise.position, behind), strict=True):
        release_rows(values.detach(), noise, position)
    increment_version(made)
    return made


def release_rows(values: torch.Tensor, noise: coef.Noise, position: int) -> None:
    """Add noise in place. Factors of single rows multiply before and after the kernel."""
    per_unit = cell = 1.0
    if isinstance(noise.scale, torch.Tensor):
        values *= _lattice.per_unit(noise.scale, values.dtype)[:, None]
    else:
        per_unit = _numbers.per_unit(noise.scale, values.dtype)
        cell = _numbers.cell(noise.scale, values.dtype)
    release(
        values,
        values,
        torch.zeros(1, dtype=torch.int64, device=values.device),
        position=position,
        distribution="laplace",
        stream=noise.stream,
        rounding=noise.rounding,
        draws=noise.draws,
        per_unit=per_unit,
        unit=cell,
    )
    if isinstance(noise.scale, torch.Tensor):
        values *= _lattice.cell(noise.scale, values.dtype)[:, None]


def _quadratic(
    z: torch.Tensor,
    targets: torch.Tensor,
    *,
    form: coef.Form,
    noise: coef.Noise | None = None,
    shift: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    made = out or (z.new_empty(len(z), dtype=torch.float64), torch.empty_like(z))
    rows, columns = z.shape
    given = (targets, targets) if noise is None else _perturb(targets, form=form, noise=noise)
    each = min(_MOST_ROWS, triton.next_power_of_2(rows or 1)) if INTERPRETED else _ROWS
    launch(
        loss_kernel,
        -(-rows // each),
        z,
        z,
        *given,
        z if shift is None else shift,
        *made,
        rows,
        columns,
        NOISED=noise is not None,
        PRINTED=form == "printed",
        SHIFTED=shift is not None,
        ROWS=each,
    )
    increment_version(made)
    return made


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("coef.perturb", _perturb, never),
    ("coef.quadratic", _quadratic, never),
)
"""``(op, run, refuse)``."""
