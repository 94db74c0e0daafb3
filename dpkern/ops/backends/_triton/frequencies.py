"""Blocks of values to their frequencies, a complex product for each frequency, and the way back.

Blocks of d values are transformed by products with cosines and sines, and each of ``d // 2 + 1``
frequencies then takes a complex product of its own: ``2 d^2`` operations for a block, some ``4 d``
for a pair of blocks, where a product with circulant matrices takes ``2 d^2`` for every pair. The
spectra of a few samples stand in memory, cosine and sine sums of a frequency in planes of their
own: with c and s those of a block, its transform is c - i s. Not yet run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ...spectral._band import Band, half_weights
from ...spectral._lines import circle
from ...spectral._spectra import half_gains, on
from .launch import INTERPRETED, launch
from .operands import MULTIPLE, product

DEPTH = 16
"""Terms of a sum in one product."""
_CHUNK = 1 << 25
"""Bytes of the spectra that stand in memory: they stay in a device's second-level cache."""
_PROGRAMS = 512
"""Programs that keep any device busy: weighted sums of few pairs are shared out to so many."""
_LEAST = 16 * DEPTH
"""Terms worth a program."""
KEPT, MASKED, SCALED = 0, 1, 2
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
def products_of(
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
    re, im = products_of(
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


def multiple(n: int) -> int:
    return -(-n // MULTIPLE) * MULTIPLE


def bins_of(block: int) -> int:
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
    turns = np.outer(np.arange(bins_of(block)), np.arange(block)) % block
    return circle(block)[:, turns].transpose(1, 0, 2).reshape(-1, block)


def filled(waves: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a table with zeros behind its rows and columns, for tiles that reach beyond them."""
    count, block = waves.shape
    table = np.zeros((count + 2 * 128, -(-block // 128) * 128))
    table[:count, :block] = waves
    return torch.from_numpy(table).to(dtype)


def transform_table(block: int, dtype: torch.dtype) -> torch.Tensor:
    return filled(_waves(block), dtype)


def inverse_table(block: int, band: Band | None, dtype: torch.dtype) -> torch.Tensor:
    weights = half_weights(block) / block
    if band is not None:
        weights = weights * half_gains(band).flatten().numpy()
    return filled(_waves(block) * np.stack([weights, -weights], 1).reshape(-1, 1), dtype)


def transformed(
    x: torch.Tensor, dtype: torch.dtype, factors: torch.Tensor | None = None, how: int = KEPT
) -> Spectra:
    """Return the spectra of ``x [B, T, n, d]``."""
    batch, positions, places, block = x.shape
    terms, padded, count = batch * positions, multiple(places), 2 * bins_of(block)
    lines = terms * padded
    planes = x.new_empty(count, lines, dtype=dtype)
    matrix = on(x.device, transform_table, block, dtype)
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


def parts_of(x: torch.Tensor, places: int, dtype: torch.dtype) -> list[slice]:
    """Return ranges of samples whose spectra, ``places`` blocks of each position, fill a chunk."""
    positions, block = x[0].numel() // (x.shape[-2] * x.shape[-1]), x.shape[-1]
    samples = max(1, _CHUNK // (positions * places * 2 * bins_of(block) * dtype.itemsize))
    return [slice(begin, begin + samples) for begin in range(0, len(x), samples)]


def refuse(x: torch.Tensor, g: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Refuse samples, or a weight, whose spectra have no indices of 32 bits."""
    for operand, blocks in ((x, x[:1].numel()), (g, g[:1].numel())):
        if blocks and blocks // operand.shape[-2] * (operand.shape[-2] + MULTIPLE) * 3 >= 2**31:
            return "has samples of up to 2^29 numbers"
    return None
