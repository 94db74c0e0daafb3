"""Block-circulant layers: products, norms, per-sample gradients and weighted sums.

Blocks of d values are transformed by products with cosines and sines, and each of ``d // 2 + 1``
frequencies then takes a complex product of its own: ``2 d^2`` operations for a block, some ``4 d``
for a pair of blocks, where a product with circulant matrices takes ``2 d^2`` for every pair. The
spectra of a few samples stand in memory, cosine and sine sums of a frequency in planes of their
own: with c and s those of a block, its transform is c - i s. Norms at one position keep the powers
of a frequency alone, in registers.

``docs/spectral.md`` proves the bounds of the norms. Not yet run on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ...spectral import circulant
from ...spectral._band import Band, half_weights
from ...spectral._plan import circle
from ...spectral._spectra import half_gains, on
from .. import _device_spectral
from . import rows as by_rows
from .launch import INTERPRETED, launch
from .operands import MULTIPLE, product
from .precision import up

LARGEST = 128
"""Largest block that is multiplied; products of larger ones take the library's transforms."""
LARGEST_NORM = 512
"""Largest block of a norm."""
DEPTH = 16
"""Terms of a sum in one product."""
BLOCK = 1024
_CHUNK = 1 << 25
"""Bytes of the spectra that stand in memory: they stay in a device's second-level cache."""
_PROGRAMS = 512
"""Programs that keep any device busy: weighted sums of few pairs are shared out to so many."""
_LEAST = 16 * DEPTH
"""Terms worth a program."""
_KEPT, _MASKED, _SCALED = 0, 1, 2
"""Uses of samples' factors by ``transform_kernel``."""


@triton.jit
def transform_kernel(
    x, matrix, factors, planes, lines, padded, places, positions, count,
    FACTORS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Write cosine and sine sums of blocks, ``[count, lines]``; a term has ``padded`` lines.

    FACTORS: 0 for none, 1 leaves samples of factor 0 out, 2 multiplies as well.
    """
    tiles = tl.cdiv(lines, COLUMNS)
    c = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    line = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    term = line // padded
    place = line % padded
    live = (line < lines) & (place < places)
    if FACTORS != 0:
        factor = tl.load(factors + term // positions, mask=live, other=0)
        live &= factor != 0  # what is not read cannot be NaN
    begins = (term * places + place) * SIZE
    total = tl.zeros([ROWS, COLUMNS], SUMS)
    for begin in range(0, SIZE, DEPTH):
        u = begin + tl.arange(0, DEPTH)
        mask = live[:, None] & (u < SIZE)[None, :]
        block = tl.load(x + begins[:, None] + u[None, :], mask=mask, other=0.0).to(SUMS)
        if FACTORS == 2:
            block *= factor[:, None]
        turns = tl.load(matrix + c[:, None] * WIDTH + u[None, :])
        total += product(turns, tl.trans(block), SUMS, "ieee")
    mask = (c < count)[:, None] & (line < lines)[None, :]
    tl.store(planes + c[:, None] * lines + line[None, :], total, mask=mask)


@triton.jit
def _plane(planes, row, rows, term, live, strides):
    """Load ``[rows, terms]`` of a plane."""
    mask = (row < rows)[:, None] & live[None, :]
    place = row[:, None] * strides[0] + term[None, :] * strides[1]
    return tl.load(planes + place, mask=mask, other=0.0)


@triton.jit
def _products(
    a, b, factors, i, j, first, end, rows, columns, a_strides, b_strides,
    FACTORS: tl.constexpr,
    CONJUGATE: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the sums over terms, with their factors, of ``conj(a^) b^``, or of ``a^ b^``.

    Strides are those of a row, of a term, from cosines to sines, and of a frequency.
    """
    re = tl.zeros([ROWS, COLUMNS], SUMS)
    im = tl.zeros([ROWS, COLUMNS], SUMS)
    for begin in range(first, end, DEPTH):
        term = begin + tl.arange(0, DEPTH)
        live = term < end
        if FACTORS:
            factor = tl.load(factors + term, mask=live, other=0.0)
            live &= factor != 0.0  # what is not read cannot be NaN
        a_cosine = _plane(a, i, rows, term, live, a_strides)
        a_sine = _plane(a + a_strides[2], i, rows, term, live, a_strides)
        if FACTORS:
            a_cosine *= factor[None, :]
            a_sine *= factor[None, :]
        b_cosine = tl.trans(_plane(b, j, columns, term, live, b_strides))
        b_sine = tl.trans(_plane(b + b_strides[2], j, columns, term, live, b_strides))
        re += product(a_cosine, b_cosine, SUMS, "ieee")
        im -= product(a_cosine, b_sine, SUMS, "ieee")
        sines = product(a_sine, b_sine, SUMS, "ieee")
        mixed = product(a_sine, b_cosine, SUMS, "ieee")
        re = re + sines if CONJUGATE else re - sines
        im = im + mixed if CONJUGATE else im - mixed
    return re, im


@triton.jit
def frequency_kernel(
    a, b, factors, out, sizes, read, terms, each, bins, a_strides, b_strides, out_strides,
    FACTORS: tl.constexpr,
    CONJUGATE: tl.constexpr,
    ADD: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Write (ADD: add) one frequency's tile of products.

    ``read`` are the rows and columns that operands have in memory, those behind ``sizes`` as zeros.
    """
    column_tiles = tl.cdiv(sizes[1], COLUMNS)
    tiles = tl.cdiv(sizes[0], ROWS) * column_tiles
    tile = tl.program_id(0) % tiles
    k = (tl.program_id(0) // tiles % bins).to(tl.int64)
    split = tl.program_id(0) // (tiles * bins)
    i = tile // column_tiles * ROWS + tl.arange(0, ROWS)
    j = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    first = split * each
    re, im = _products(
        a + k * a_strides[3], b + k * b_strides[3], factors, i, j,
        first, tl.minimum(first + each, terms), read[0], read[1], a_strides, b_strides,
        FACTORS, CONJUGATE, SUMS, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    out += 2 * (split * bins + k) * out_strides[2]
    entry = i[:, None] * out_strides[0] + j[None, :] * out_strides[1]
    mask = (i < sizes[0])[:, None] & (j < sizes[1])[None, :]
    if ADD:
        re += tl.load(out + entry, mask=mask)
        im += tl.load(out + out_strides[2] + entry, mask=mask)
    tl.store(out + entry, re, mask=mask)
    tl.store(out + out_strides[2] + entry, im, mask=mask)


@triton.jit
def inverse_kernel(
    planes, matrix, out, live, lines, count, splits,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Lead products back to blocks ``[live, SIZE]``; splits are added up in their order."""
    column_tiles = tl.cdiv(SIZE, COLUMNS)
    tiles = tl.cdiv(lines, ROWS) * column_tiles
    tile = tl.program_id(0) % tiles
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    planes += batch * splits * count * lines
    out += batch * live * SIZE
    line = tile // column_tiles * ROWS + tl.arange(0, ROWS)
    u = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], SUMS)
    for begin in range(0, count, DEPTH):
        c = begin + tl.arange(0, DEPTH)
        place = c[:, None] * lines + line[None, :]
        mask = (c < count)[:, None] & (line < lines)[None, :]
        spectra = tl.load(planes + place, mask=mask, other=0.0)
        for split in range(1, splits):
            spectra += tl.load(planes + split * count * lines + place, mask=mask, other=0.0)
        turns = tl.load(matrix + c[:, None] * WIDTH + u[None, :])
        total += product(tl.trans(spectra), turns, SUMS, "ieee")
    entry = line[:, None] * SIZE + u[None, :]
    mask = (line < live)[:, None] & (u < SIZE)[None, :]
    if ADD:
        total += tl.load(out + entry, mask=mask)
    tl.store(out + entry, total, mask=mask)


@triton.jit
def _wide(x, entry, entries):
    """Load entries as float64."""
    part = tl.load(x + entry, mask=entry < entries, other=0.0)
    return part if part.dtype == tl.float64 else part.to(tl.float32).to(tl.float64)


@triton.jit(do_not_specialize=["samples"])
def size_kernel(x, scales, squares, samples, entries, BLOCK: tl.constexpr):
    """Write the power of two that takes a sample's largest entry to [1, 2), and its square then."""
    sample = tl.program_id(0).to(tl.int64)
    x += sample * entries
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, entries, BLOCK):
        largest = tl.maximum(largest, tl.abs(_wide(x, begin + lanes, entries)))
    exponent = (tl.max(largest).to(tl.int64, bitcast=True) >> 52) & 0x7FF
    exponent = tl.minimum(tl.maximum(exponent, 1), 2045)  # a power of two that is a normal number
    scale = ((2046 - exponent) << 52).to(tl.float64, bitcast=True)
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, entries, BLOCK):
        part = _wide(x, begin + lanes, entries) * scale
        total += part * part
    tl.store(scales + sample, scale)
    tl.store(squares + sample, tl.sum(total))


@triton.jit
def _powers(
    x, matrix, scale, k, places,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the sums over a sample's blocks of the powers of frequencies k."""
    power = tl.zeros([ROWS], tl.float64)
    for first in range(0, places, COLUMNS):
        place = first + tl.arange(0, COLUMNS)
        cosine = tl.zeros([ROWS, COLUMNS], tl.float64)
        sine = tl.zeros([ROWS, COLUMNS], tl.float64)
        for begin in range(0, SIZE, DEPTH):
            u = begin + tl.arange(0, DEPTH)
            mask = (place < places)[:, None] & (u < SIZE)[None, :]
            block = tl.load(x + place[:, None] * SIZE + u[None, :], mask=mask, other=0.0)
            block = tl.trans(block.to(tl.float64) * scale)
            turns = matrix + 2 * k[:, None] * WIDTH + u[None, :]
            cosine += product(tl.load(turns), block, tl.float64, "ieee")
            sine += product(tl.load(turns + WIDTH), block, tl.float64, "ieee")
        power += tl.sum(cosine * cosine + sine * sine, 1)
    return power


@triton.jit
def power_kernel(
    x, g, matrix, weights, scales, partial, samples, ins, outs, bins,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Write a sample's sum over some frequencies of weight times the powers of both operands."""
    tiles = tl.cdiv(bins, ROWS)
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    k = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    scale = tl.load(scales + sample)
    of_x = _powers(
        x + sample * ins * SIZE, matrix, scale, k, ins, SIZE, WIDTH, ROWS, COLUMNS, DEPTH
    )
    scale = tl.load(scales + samples + sample)
    of_g = _powers(
        g + sample * outs * SIZE, matrix, scale, k, outs, SIZE, WIDTH, ROWS, COLUMNS, DEPTH
    )
    weight = tl.load(weights + k, mask=k < bins, other=0.0)
    tl.store(partial + tl.program_id(0), tl.sum(weight * (of_x * of_g)))


@triton.jit
def square_kernel(
    x, g, weights, partial, positions, ins, outs, bins,
    x_strides, g_strides, x_sample, g_sample,
    GRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Write one frequency's share of a sample's square: a tile of the spectrum, or of two Gram
    matrices over positions."""
    rows = positions if GRAMS else outs
    columns = positions if GRAMS else ins
    column_tiles = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * column_tiles
    tile = tl.program_id(0) % tiles
    k = tl.program_id(0) // tiles % bins
    sample = tl.program_id(0) // (tiles * bins)
    m = tile // column_tiles
    n = tile % column_tiles
    if GRAMS:  # noqa: SIM102 (known when compiled)
        if m > n:  # positions t, s count for s, t: the tiles are square
            tl.store(partial + tl.program_id(0), 0.0)
            return
    i = m * ROWS + tl.arange(0, ROWS)
    j = n * COLUMNS + tl.arange(0, COLUMNS)
    x += k * x_strides[3] + sample * x_sample
    g += k * g_strides[3] + sample * g_sample
    weight = tl.load(weights + k)
    if GRAMS:
        re, im = _products(
            g, g, weights, i, j, 0, outs, rows, columns, g_strides, g_strides,
            False, True, tl.float64, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        x_re, x_im = _products(
            x, x, weights, i, j, 0, ins, rows, columns, x_strides, x_strides,
            False, True, tl.float64, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        if m < n:
            weight *= 2.0
        re *= x_re
        im *= x_im
    else:
        re, im = _products(
            g, x, weights, i, j, 0, positions, rows, columns, g_strides, x_strides,
            False, True, tl.float64, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        re *= re
        im *= im
    tl.store(partial + tl.program_id(0), weight * tl.sum(tl.sum(re + im, 1)))


@triton.jit(do_not_specialize=["samples"])
def above_kernel(partial, scales, sizes, squares, samples, count, numbers, BLOCK: tl.constexpr):
    """Add a sample's shares, add what rounding can hide, and scale back."""
    sample = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    shares = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, count, BLOCK):
        mask = begin + lanes < count
        shares += tl.load(partial + sample * count + begin + lanes, mask=mask, other=0.0)
    size = tl.sqrt(tl.load(sizes + sample)) * tl.sqrt(tl.load(sizes + samples + sample))
    square = tl.sum(shares) + tl.cast(numbers[0], tl.float64) * size * size
    norm = tl.sqrt(tl.where(square < 0.0, 0.0, square)) + tl.cast(numbers[1], tl.float64) * size
    square = norm * norm * (1.0 + tl.cast(numbers[2], tl.float64))
    # The operands' common power of two, so far that what leaves the range does so in either case.
    one = tl.cast(1.0, tl.float64)
    power = (one / tl.load(scales + sample)) * (one / tl.load(scales + samples + sample))
    least = tl.cast((1023 - 600) << 52, tl.int64).to(tl.float64, bitcast=True)
    power = tl.minimum(tl.maximum(power, least), one / least)
    tiny = tl.cast(1, tl.int64).to(tl.float64, bitcast=True)
    tl.store(squares + sample, tl.where(square == 0.0, 0.0, square * power * power + tiny))


Strides = tuple[int, int, int, int]
"""The distances of rows, of terms, from cosines to sines, and of frequencies."""


@dataclass(frozen=True)
class Spectra:
    """Planes ``[2 K, terms, padded]`` of a few samples: ``places`` blocks in each of ``terms``."""

    planes: torch.Tensor
    terms: int
    places: int
    padded: int

    @property
    def over_terms(self) -> Strides:
        """Those where a sum goes over terms, and places are rows."""
        plane = self.terms * self.padded
        return 1, self.padded, plane, 2 * plane

    @property
    def over_places(self) -> Strides:
        """Those where it goes over the places of a term, and terms are rows."""
        plane = self.terms * self.padded
        return self.padded, 1, plane, 2 * plane


def _multiple(n: int) -> int:
    return -(-n // MULTIPLE) * MULTIPLE


def _bins(block: int) -> int:
    return block // 2 + 1


def sides_of(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of a tile of products: what fits the registers."""
    side = 32 if dtype is torch.float64 else 64
    most = 128 if INTERPRETED else side
    height, width = (
        min(most, max(MULTIPLE, int(triton.next_power_of_2(n)))) for n in (rows, columns)
    )
    return {
        "ROWS": height,
        "COLUMNS": width,
        "DEPTH": 128 if INTERPRETED else DEPTH,
        "warps": 8 if height * width >= side**2 else 4,
        "fused": True,
        "maxnreg": 255,
    }


def tiles_of(rows: int, columns: int, sides: dict[str, Any]) -> int:
    return int(triton.cdiv(rows, sides["ROWS"]) * triton.cdiv(columns, sides["COLUMNS"]))


def sums_of(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype is torch.float64 else tl.float32


def _waves(block: int) -> np.ndarray[Any, Any]:
    """Return cosines and sines of each frequency in turn, ``[2 K, d]``."""
    turns = np.outer(np.arange(_bins(block)), np.arange(block)) % block
    return circle(block)[:, turns].transpose(1, 0, 2).reshape(-1, block)


def filled(waves: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a table with zeros behind its rows and columns, for tiles that reach beyond them."""
    count, block = waves.shape
    table = np.zeros((count + 2 * 128, -(-block // 128) * 128))
    table[:count, :block] = waves
    return torch.from_numpy(table).to(dtype)


def _there(block: int, dtype: torch.dtype) -> torch.Tensor:
    return filled(_waves(block), dtype)


def _back(block: int, band: Band | None, dtype: torch.dtype) -> torch.Tensor:
    weights = half_weights(block) / block
    if band is not None:
        weights = weights * half_gains(band).flatten().numpy()
    return filled(_waves(block) * np.stack([weights, -weights], 1).reshape(-1, 1), dtype)


def _transformed(
    x: torch.Tensor, dtype: torch.dtype, factors: torch.Tensor | None = None, how: int = _KEPT
) -> Spectra:
    """Return the spectra of ``x [B, T, n, d]``."""
    batch, positions, places, block = x.shape
    terms, padded, count = batch * positions, _multiple(places), 2 * _bins(block)
    lines = terms * padded
    planes = x.new_empty(count, lines, dtype=dtype)
    matrix = on(x.device, _there, block, dtype)
    sides = sides_of(count, lines, dtype)
    launch(
        transform_kernel,
        tiles_of(count, lines, sides),
        x,
        *(x, matrix, x if factors is None else factors, planes),
        *(lines, padded, places, positions, count),
        FACTORS=how,
        SIZE=block,
        WIDTH=matrix.shape[1],
        SUMS=sums_of(dtype),
        **sides,
    )
    return Spectra(planes, terms, places, padded)


def led_back(
    planes: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, block: int, *, add: bool
) -> None:
    """Write ``[batch, live, block]`` of products ``[batch, splits, 2 K, lines]``, by a table."""
    batch, splits, count, lines = planes.shape
    live = out.numel() // (batch * block)
    sides = sides_of(lines, block, out.dtype)
    launch(
        inverse_kernel,
        batch * tiles_of(lines, block, sides),
        out,
        *(planes, matrix, out, live, lines, count, splits),
        ADD=add,
        SIZE=block,
        WIDTH=matrix.shape[1],
        SUMS=sums_of(out.dtype),
        **sides,
    )


def share(programs: int, terms: int) -> int:
    """Return how many terms a program adds up, where there are so many besides."""
    return max(_LEAST, -(-terms * programs // _PROGRAMS))


def _parts(x: torch.Tensor, places: int, dtype: torch.dtype) -> list[slice]:
    """Return ranges of samples whose spectra, ``places`` blocks of each position, fill a chunk."""
    positions, block = x[0].numel() // (x.shape[-2] * x.shape[-1]), x.shape[-1]
    samples = max(1, _CHUNK // (positions * places * 2 * _bins(block) * dtype.itemsize))
    return [slice(begin, begin + samples) for begin in range(0, len(x), samples)]


def _product(
    x: torch.Tensor, weight: torch.Tensor, *, convention: Literal["row", "column"] = "row"
) -> torch.Tensor:
    (batch, ins, block), outs, dtype = x.shape, len(weight), x.dtype
    if block > LARGEST:
        return circulant.circulant_product.reference(x, weight, convention=convention)
    y = x.new_zeros(batch, outs, block)
    if not (x.numel() and weight.numel()):
        return y
    w = _transformed(weight[:, None], dtype)
    for part in _parts(x, _multiple(ins) + outs, dtype):
        xs = _transformed(x[part, None], dtype)
        lines = _multiple(xs.terms * outs)
        products = x.new_empty(1, 1, 2 * _bins(block), lines)
        sides = sides_of(outs, xs.terms, dtype)
        launch(
            frequency_kernel,
            tiles_of(outs, xs.terms, sides) * _bins(block),
            x,
            *(w.planes, xs.planes, x, products, (outs, xs.terms), (outs, xs.terms)),
            *(xs.padded, xs.padded, _bins(block), w.over_places, xs.over_places, (1, outs, lines)),
            FACTORS=False,
            CONJUGATE=convention == "row",
            ADD=False,
            SUMS=sums_of(dtype),
            **sides,
        )
        back = on(x.device, _back, block, None, dtype)
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
    parts = _parts(x, _multiple(ins) + _multiple(outs), dtype)
    terms = len(x[parts[0]]) * positions
    each = share(tiles_of(outs, ins, sides_of(outs, ins, dtype)) * _bins(block), terms)
    splits = -(-terms // each)
    products = x.new_zeros(1, splits, 2 * _bins(block), _multiple(outs * ins))
    for part in parts:
        xs = _transformed(x[part], dtype, factors[part], _MASKED)
        gs = _transformed(g[part], dtype, factors[part], _SCALED)
        _correlated(gs, xs, products[0], each, _bins(block), add=True)
    led_back(products, on(x.device, _back, block, band, dtype), out, block, add=True)
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
    lines = _multiple(outs * ins)
    for part in _parts(x, _multiple(ins) + _multiple(outs) + -(-lines // positions), dtype):
        xs, gs = _transformed(x[part], dtype), _transformed(g[part], dtype)
        products = x.new_empty(len(x[part]), 1, 2 * _bins(block), lines)
        _correlated(gs, xs, products[:, 0], positions, _bins(block), add=False)
        led_back(products, on(x.device, _back, block, None, dtype), grads[part], block, add=False)
    by_rows.power_sums(grads, batch, grads[0].numel(), 2, squares)
    return grads, squares


def _norm(x: torch.Tensor, g: torch.Tensor, *, band: Band | None = None) -> torch.Tensor:
    batch, positions, _, block = x.shape
    if block > LARGEST_NORM:
        return _device_spectral.circulant_norm(x, g, band=band)
    squares = x.new_zeros(batch, dtype=torch.float64)
    if not (x.numel() and g.numel()):
        return squares
    scales, sizes = scaled(x, g)
    weights = on(x.device, circulant.weights_of, block, band)
    partial = _powers_of(x, g, scales, weights) if positions == 1 else _at(x, g, scales, weights)
    most = 1.0 if band is None else float(np.abs(band.gains).max()) ** 2
    numbers = _errors(x, g, partial.shape[1], most)
    given = partial, scales, sizes, squares, batch, partial.shape[1], numbers
    launch(above_kernel, batch, x, *given, BLOCK=BLOCK)
    return squares


def scaled(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[2, B]`` powers of two for both operands' samples, and their squares then."""
    scales, sizes = x.new_empty(2, 2, len(x), dtype=torch.float64).unbind()
    for i, operand in enumerate((x, g)):
        given = operand, scales[i], sizes[i], len(x), operand[0].numel()
        launch(size_kernel, len(x), x, *given, BLOCK=BLOCK, maxnreg=255)
    return scales, sizes


def _powers_of(
    x: torch.Tensor, g: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return shares ``[B, n]`` of the squares of samples with one position."""
    (batch, _, ins, block), outs, bins = x.shape, g.shape[2], len(weights)
    matrix = on(x.device, _there, block, torch.float64)
    sides = sides_of(bins, MULTIPLE, torch.float64)  # two sums beside each other
    tiles = triton.cdiv(bins, sides["ROWS"])
    partial = scales.new_empty(batch, tiles)
    launch(
        power_kernel,
        batch * tiles,
        x,
        *(x, g, matrix, weights, scales, partial, batch, ins, outs, bins),
        SIZE=block,
        WIDTH=matrix.shape[1],
        **sides,
    )
    return partial


def _at(
    x: torch.Tensor, g: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return shares ``[B, n]`` of the squares of samples with several positions."""
    (batch, positions, ins, _), outs = x.shape, g.shape[2]
    grams, dtype = circulant.norm_route(x, g) == "positions", torch.float64
    rows, columns = (positions, positions) if grams else (_multiple(outs), _multiple(ins))
    sides = sides_of(rows, columns, dtype)
    if grams and not INTERPRETED:
        sides |= {"ROWS": MULTIPLE, "COLUMNS": MULTIPLE, "warps": 4}  # four sums beside each other
    count = tiles_of(rows, columns, sides) * len(weights)
    partial = scales.new_empty(batch, count)
    for part in _parts(x, _multiple(ins) + _multiple(outs), dtype):
        xs = _transformed(x[part], dtype, scales[0, part], _SCALED)
        gs = _transformed(g[part], dtype, scales[1, part], _SCALED)
        strides = [s.over_places if grams else s.over_terms for s in (xs, gs)]
        launch(
            square_kernel,
            len(x[part]) * count,
            x,
            *(xs.planes, gs.planes, weights, partial[part]),
            *(positions, xs.padded, gs.padded, len(weights), *strides),
            *(positions * xs.padded, positions * gs.padded),
            GRAMS=grams,
            **sides,
        )
    return partial


_CHAIN = 64
"""Roundings of a chunk's products, three for each of them (docs/ghost.md), and of coefficients."""


def _errors(x: torch.Tensor, g: torch.Tensor, count: int, most: float) -> tuple[float, ...]:
    """Return what docs/spectral.md proves that rounding can hide, of the scaled operands.

    Relative to the operands' squares, to the product of their norms, and to the result; ``most`` is
    the largest squared gain.
    """
    (_, positions, ins, block), outs, unit = x.shape, g.shape[2], 2.0**-53
    entries = max(x[0].numel(), g[0].numel())
    last = count + -(-entries // BLOCK) + _CHAIN  # of sums of squares
    transform = block + _CHAIN
    squared = norm = 0.0
    if positions == 1:
        squared = 6 * transform + 2 * (ins + outs) + _bins(block) + last
    else:
        norm = 2 * transform
        if circulant.norm_route(x, g) == "positions":
            squared = 1.5 * (2 * (ins + outs) + 2 * _CHAIN + last)
        else:
            norm += 2 * positions + _CHAIN
    return tuple(
        up(1.01 * error * unit)
        for error in (block * squared * most, 1.5 * math.sqrt(block * most) * norm, 4 * last)
    )


def _refuse(x: torch.Tensor, g: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Refuse samples, or a weight, whose spectra have no indices of 32 bits."""
    for operand, blocks in ((x, x[:1].numel()), (g, g[:1].numel())):
        if blocks and blocks // operand.shape[-2] * (operand.shape[-2] + MULTIPLE) * 3 >= 2**31:
            return "has samples of up to 2^29 numbers"
    return None


def _refuse_product(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> str | None:
    return _refuse(x, weight[None])


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("spectral.circulant_norm", _norm, _refuse),
    ("spectral.circulant_product", _product, _refuse_product),
    ("spectral.circulant_gradient", _gradient, _refuse),
    ("spectral.circulant_sum", _sum, _refuse),
)
"""``(op, run, refuse)``."""
