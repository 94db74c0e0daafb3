"""Products, per-sample gradients and weighted sums of block-circulant layers.

Not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.autograd.graph import increment_version

from ...spectral import circulant
from ...spectral._band import Band
from ...spectral._spectra import on
from .. import _device_spectral
from . import rows as by_rows
from .frequencies import (
    MASKED,
    SCALED,
    Spectra,
    bins_of,
    frequency_kernel,
    inverse_table,
    led_back,
    multiple,
    parts_of,
    refuse,
    share,
    sides_of,
    sums_of,
    tiles_of,
    transformed,
)
from .launch import launch

LARGEST = 128
"""Largest block that is multiplied; products of larger ones take the library's transforms."""


def _product(
    x: torch.Tensor, weight: torch.Tensor, *, convention: Literal["row", "column"] = "row"
) -> torch.Tensor:
    (batch, ins, block), outs, dtype = x.shape, len(weight), x.dtype
    if block > LARGEST:
        return circulant.circulant_product.reference(x, weight, convention=convention)
    y = x.new_zeros(batch, outs, block)
    if not (x.numel() and weight.numel()):
        return y
    w = transformed(weight[:, None], dtype)
    for part in parts_of(x, multiple(ins) + outs, dtype):
        xs = transformed(x[part, None], dtype)
        lines = multiple(xs.terms * outs)
        products = x.new_empty(1, 1, 2 * bins_of(block), lines)
        sides = sides_of(outs, xs.terms, dtype)
        launch(
            frequency_kernel,
            tiles_of(outs, xs.terms, sides) * bins_of(block),
            x,
            *(w.planes, xs.planes, x, products, (outs, xs.terms), (outs, xs.terms)),
            *(
                xs.padded,
                xs.padded,
                bins_of(block),
                w.over_places,
                xs.over_places,
                (1, outs, lines),
            ),
            FACTORS=False,
            CONJUGATE=convention == "row",
            ADD=False,
            SUMS=sums_of(dtype),
            **sides,
        )
        back = on(x.device, inverse_table, block, None, dtype)
        led_back(products, back, y[part], block, add=False)
    return y


def _correlated(
    g: Spectra, x: Spectra, products: torch.Tensor, each: int, bins: int, *, add: bool
) -> None:
    """Write ``sum_t conj(g^[t, i]) x^[t, j]`` over ``each`` terms to each of the products."""
    sides = sides_of(g.places, x.places, products.dtype)
    launch(
        frequency_kernel,
        tiles_of(g.places, x.places, sides) * bins * len(products),
        products,
        *(g.planes, x.planes, x.planes, products, (g.places, x.places), (g.padded, x.padded)),
        *(g.terms, each, bins, g.over_terms, x.over_terms, (x.places, 1, products.shape[-1])),
        FACTORS=False,
        CONJUGATE=True,
        ADD=add,
        SUMS=sums_of(products.dtype),
        **sides,
    )


def _sum(
    x: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    band: Band | None = None,
) -> None:
    (_, positions, ins, block), outs, dtype = x.shape, g.shape[2], x.dtype
    if block > LARGEST:
        return _device_spectral.circulant_sum(x, g, factors, out, band=band)
    if not (x.numel() and g.numel()):
        return None
    parts = parts_of(x, multiple(ins) + multiple(outs), dtype)
    terms = len(x[parts[0]]) * positions
    each = share(tiles_of(outs, ins, sides_of(outs, ins, dtype)) * bins_of(block), terms)
    splits = -(-terms // each)
    products = x.new_zeros(1, splits, 2 * bins_of(block), multiple(outs * ins))
    for part in parts:
        xs = transformed(x[part], dtype, factors[part], MASKED)
        gs = transformed(g[part], dtype, factors[part], SCALED)
        _correlated(gs, xs, products[0], each, bins_of(block), add=True)
    led_back(products, on(x.device, inverse_table, block, band, dtype), out, block, add=True)
    increment_version(out)
    return None


def _gradient(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, positions, ins, block), outs, dtype = x.shape, g.shape[2], x.dtype
    if block > LARGEST:
        return circulant.circulant_gradient.reference(x, g)
    grads = x.new_zeros(batch, outs, ins, block)
    squares = x.new_zeros(batch, dtype=torch.float64)
    if not (x.numel() and g.numel()):
        return grads, squares
    lines = multiple(outs * ins)
    for part in parts_of(x, multiple(ins) + multiple(outs) + -(-lines // positions), dtype):
        xs, gs = transformed(x[part], dtype), transformed(g[part], dtype)
        products = x.new_empty(len(x[part]), 1, 2 * bins_of(block), lines)
        _correlated(gs, xs, products[:, 0], positions, bins_of(block), add=False)
        led_back(
            products, on(x.device, inverse_table, block, None, dtype), grads[part], block, add=False
        )
    by_rows.power_sums(grads, batch, grads[0].numel(), 2, squares)
    return grads, squares


def _refuse_product(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> str | None:
    return refuse(x, weight[None])


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("spectral.circulant_product", _product, _refuse_product),
    ("spectral.circulant_gradient", _gradient, refuse),
    ("spectral.circulant_sum", _sum, refuse),
)
"""``(op, run, refuse)``."""
