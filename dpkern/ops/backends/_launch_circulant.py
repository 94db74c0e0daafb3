"""Block-circulant layers on device kernels: norms, products and weighted sums.

Larger blocks take the platform's transforms.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...base import layouts
from ..spectral import circulant
from ..spectral._band import Band, half_weights
from ..spectral._lines import circle
from ..spectral._spectra import half_gains, on
from . import _device, _device_spectral, _tables
from . import _kernels as table
from ._launch_noise import FLOATS
from ._start import Device, Rows, refuse_first


def _turns(block: int, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(circle(block))).to(dtype)


def _back_weights(block: int, band: Band | None, dtype: torch.dtype) -> Tensor:
    """Return ``w Gamma / d``, what each frequency counts on the way back."""
    weights = torch.from_numpy(half_weights(block)) / block
    return (weights if band is None else weights * half_gains(band).flatten()).to(dtype)


@torch.no_grad()
def circulant_norm(start: Device, x: Tensor, g: Tensor, *, band: Band | None = None) -> Tensor:
    block, device = x.shape[3], x.device
    if block > layouts.CIRCULANT_NORM_BLOCK:
        return _device_spectral.circulant_norm(x, g, band=band)
    squares = torch.zeros(len(x), dtype=torch.float64, device=device)
    if not (x.numel() and g.numel()):
        return squares
    turns = on(device, _turns, block, torch.float64)
    weights = on(device, circulant.weights_of, block, band)
    most = 1.0 if band is None else float(np.abs(band.gains).max()) ** 2
    if x.shape[1] > 1:
        call = _at_positions(x, g, turns, weights, most)
        partial = torch.empty(len(x) * int(call["tiles"]), dtype=torch.float64, device=device)
        with _device.guard(device) as cuda:
            value, given = (FLOATS[x.dtype],), {"x": x, "g": g, "partial": partial}
            start.start(table.CIRCULANT_POSITIONS, value, cuda, call=call, **given)
            start.start(table.CIRCULANT_ABOVE, value, cuda, call=call, **given, squares=squares)
        return squares
    bins, blocks = block // 2 + 1, x.shape[2] + g.shape[2]
    # As on the CPU, of sums of all entries of a block instead of folded ones.
    terms = 6 * (block + 16) + 2 * blocks + bins + 12
    call = _tables.one(
        layouts.CIRCULANT_NORM,
        turns=turns.data_ptr(),
        weights=weights.data_ptr(),
        ins=x.shape[2],
        outs=g.shape[2],
        error=block * terms * 2.0**-53 * most,
        block=block,
        bins=bins,
    )
    with _device.guard(device) as cuda:
        value = (FLOATS[x.dtype],)
        start.start(table.CIRCULANT_NORM, value, cuda, call=call, x=x, g=g, squares=squares)
    return squares


def _at_positions(
    x: Tensor, g: Tensor, turns: Tensor, weights: Tensor, most: float
) -> _tables.Table:
    """Return ``CirculantPositions``, with what docs/spectral.md proves that rounding can hide.

    ``most`` is the largest squared gain.
    """
    (_, positions, ins, block), outs = x.shape, g.shape[2]
    grams = circulant.norm_route(x, g) == "positions"
    rows, columns = (positions, positions) if grams else (outs, ins)
    across = -(-columns // layouts.CIRCULANT_TILE)
    tiles, bins, unit = -(-rows // layouts.CIRCULANT_TILE) * across, block // 2 + 1, 2.0**-53
    # Sums of a thread, over its block and over tiles, one behind the other; then those of squares.
    last = 2 * bins + tiles + 64
    products = 0.0 if grams else 2 * positions
    squared = 2 * (ins + outs) + last if grams else 0.0
    last += positions * max(ins, outs) * block
    return _tables.one(
        layouts.CIRCULANT_POSITIONS,
        turns=turns.data_ptr(),
        weights=weights.data_ptr(),
        ins=ins,
        outs=outs,
        positions=positions,
        tiles=tiles,
        across=across,
        square_error=1.5 * block * squared * most * unit,
        norm_error=1.5 * math.sqrt(block * most) * (2 * (block + 16) + products) * unit,
        spare=1 + 4 * last * unit,
        block=block,
        bins=bins,
        grams=grams,
    )


@torch.no_grad()
def circulant_product(
    start: Device, x: Tensor, weight: Tensor, *, convention: Literal["row", "column"] = "row"
) -> Tensor:
    (batch, ins, block), outs, device = x.shape, len(weight), x.device
    if block > layouts.CIRCULANT_BLOCK:
        return circulant.circulant_product.reference(x, weight, convention=convention)
    y = x.new_zeros(batch, outs, block)
    if not (x.numel() and weight.numel()):
        return y
    turns = on(device, _turns, block, x.dtype)
    weights = on(device, _back_weights, block, None, x.dtype)
    call = _tables.one(
        layouts.CIRCULANT_PAIRS,
        turns=turns.data_ptr(),
        weights=weights.data_ptr(),
        rows=outs,
        columns=batch,
        terms=ins,
        positions=1,
        a_term=block,
        a_place=ins * block,
        b_term=block,
        b_place=ins * block,
        row_stride=block,
        column_stride=outs * block,
        block=block,
        bins=block // 2 + 1,
        sign=1 if convention == "row" else -1,
    )
    with _device.guard(device) as cuda:
        given: dict[str, Any] = {"a": weight, "b": x, "factors": None, "out": y}
        start.start(table.CIRCULANT_PAIRS, (FLOATS[x.dtype],), cuda, call=call, **given)
    return y


@torch.no_grad()
def circulant_sum(
    start: Device, x: Tensor, g: Tensor, factors: Tensor, out: Tensor, *, band: Band | None = None
) -> None:
    (batch, positions, ins, block), outs, device = x.shape, g.shape[2], x.device
    if block > layouts.CIRCULANT_BLOCK:
        return _device_spectral.circulant_sum(x, g, factors, out, band=band)
    if not (x.numel() and g.numel()):
        return None
    turns = on(device, _turns, block, x.dtype)
    weights = on(device, _back_weights, block, band, x.dtype)
    call = _tables.one(
        layouts.CIRCULANT_PAIRS,
        turns=turns.data_ptr(),
        weights=weights.data_ptr(),
        rows=outs,
        columns=ins,
        terms=batch * positions,
        positions=positions,
        a_term=outs * block,
        a_place=block,
        b_term=ins * block,
        b_place=block,
        row_stride=ins * block,
        column_stride=block,
        split_stride=out.numel(),
        block=block,
        bins=block // 2 + 1,
        sign=1,
    )
    splits, value = table.circulant_splits(call), (FLOATS[x.dtype],)
    with _device.guard(device) as cuda:
        partial = torch.empty(splits, out.numel(), dtype=out.dtype, device=device)
        given: dict[str, Any] = {"a": g, "b": x, "factors": factors, "out": partial}
        start.start(table.CIRCULANT_PAIRS, value, cuda, call=call, **given)
        added: dict[str, Any] = {"splits": splits, "numbers": out.numel(), "partial": partial}
        start.start(table.SPECTRAL_ADD, value, cuda, out=out, **added)
    increment_version(out)
    return None


KERNELS: Rows = (
    ("spectral.circulant_norm", circulant_norm, refuse_first),
    ("spectral.circulant_product", circulant_product, refuse_first),
    ("spectral.circulant_sum", circulant_sum, refuse_first),
)
"""``(op, run, refuse)``."""
