"""The operands of a weight's per-sample gradients, of linear layers and convolutions alike.

The gradient of sample b and group of channels q is a matrix of sums over positions,

    M[i, j] = sum_t g[b, q, i, t] a[b, q, j, t]

with rows i (output features or channels) and columns j: the input features, or, of a convolution,
(input channel, tap), where ``a`` is read at ``stride t + dilation tap - padding``, never unfolded.
Where a group's channels are a multiple of 16, a copy of ``a`` with the channels innermost is read,
and columns are (tap, input channel): a thread then loads 16 bytes at a time, and computes once for
all of them where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from ...ghost.conv import Geometry
from .launch import INTERPRETED
from .precision import SIXTEEN

_INTERPRETED = tl.constexpr(INTERPRETED)
_WIDE, MULTIPLE = 1024, 16
"""Widths from the first on, such as a vocabulary of 50257, are filled up to multiples of the
second: Triton makes wide loads only of sizes that are multiples of 16."""
NO_PADDING = -(2**62)
"""An id that no table has."""
_FLAT = (1,) * 18  # no geometry: columns lie where they are


@dataclass(frozen=True)
class Operands:
    """The tensors, sizes and strides of one call.

    Attributes:
        a, g: inputs and output gradients.
        groups, positions, rows, columns: of one sample; rows and columns of one group.
        channels: of ``a`` in one group.
        a_strides, g_strides: of sample, channel (row) and position.
        geometry: of a convolution: input sizes (3), output sizes without the first (2), kernel
            sizes without the first (2), taps, then stride, padding and dilation (3 each), and the
            channels of one group.
        dense: columns are channels, read at their position.
        last: the channels of ``a`` lie innermost, and columns are (tap, channel).
        read_rows: rows that ``g`` has in memory: those behind ``rows`` are zeros, so that loads of
            16 bytes need no edge inside of them.
    """

    a: torch.Tensor
    g: torch.Tensor
    groups: int
    positions: int
    rows: int
    columns: int
    channels: int
    a_strides: tuple[int, int, int]
    g_strides: tuple[int, int, int]
    geometry: tuple[int, ...] = _FLAT
    dense: bool = True
    last: bool = False
    read_rows: int = 0

    @property
    def wide(self) -> bool:
        """Whether threads load 16 bytes at a time."""
        return self.dense or self.last

    @property
    def batch(self) -> int:
        return int(self.a.shape[0])

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the form that kernels take."""
        sizes = self.positions, self.rows, self.columns, self.groups, self.channels
        return (*sizes, self.read_rows or self.rows)

    @property
    def sums(self) -> torch.dtype:
        """The type of gradients, factors and weighted sums."""
        return torch.float32 if self.a.dtype in SIXTEEN else self.a.dtype

    @property
    def empty(self) -> bool:
        """Whether every gradient is zero or has no entries."""
        return not (self.a.numel() and self.g.numel())

    @staticmethod
    def linear(a: torch.Tensor, g: torch.Tensor) -> Operands:
        """Return ``a [B, T, d]`` and ``g [B, T, p]`` as operands."""
        _, positions, d = a.shape
        p = g.shape[2]
        if positions > 1 and p >= _WIDE and p % MULTIPLE:
            g = torch.nn.functional.pad(g, (0, -p % MULTIPLE))
        width = g.shape[2]
        strides = (positions * d, 1, d), (positions * width, 1, width)
        return Operands(a, g, 1, positions, p, d, d, *strides, read_rows=width)

    @staticmethod
    def convolution(x: torch.Tensor, g: torch.Tensor, geometry: Geometry) -> Operands:
        """Return ``x [B, ci, *S]`` and ``g [B, co, *O]`` as operands."""
        places = x[0, 0].numel() if x.shape[0] else 1
        channels = geometry.in_channels // geometry.groups
        taps = geometry.taps
        steps = {*geometry.stride, *geometry.dilation}
        dense = taps == 1 and steps == {1} and not any(geometry.padding)
        last = not dense and channels % MULTIPLE == 0
        strides = (geometry.in_channels * places, places, 1)
        if last:
            x = x.movedim(1, -1).contiguous()
            strides = (geometry.in_channels * places, 1, geometry.in_channels)
        positions, outs = geometry.positions, geometry.out_channels
        g_strides = (outs * positions, positions, 1)
        if positions % MULTIPLE and outs // geometry.groups % MULTIPLE == 0:
            g = g.movedim(1, -1).contiguous()
            g_strides = (outs * positions, 1, outs)
        return Operands(
            x,
            g,
            geometry.groups,
            positions,
            outs // geometry.groups,
            channels * taps,
            channels,
            strides,
            g_strides,
            (
                *_three(geometry.input, 1),
                *_three(geometry.output, 1)[1:],
                *_three(geometry.kernel, 1)[1:],
                taps,
                *_three(geometry.stride, 1),
                *_three(geometry.padding, 0),
                *_three(geometry.dilation, 1),
                channels,
            ),
            dense=dense,
            last=last,
        )


def too_large(a: torch.Tensor, g: torch.Tensor, positions: int) -> str | None:
    """Return why not, if indices inside a sample or over all positions do not fit into 32 bits."""
    if max(a[:1].numel(), g[:1].numel(), positions) >= 2**31:
        return "has samples of up to 2^31 numbers and 2^31 positions in all"
    return None


def _three(sizes: tuple[int, ...], missing: int) -> tuple[int, ...]:
    return (missing,) * (3 - len(sizes)) + sizes


@triton.jit
def tile_at(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows and columns of a program's tile, and which of a tile's programs it is."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * column_tiles
    tile = tl.program_id(0) % tiles
    i = tile // column_tiles * ROWS + tl.arange(0, ROWS)
    j = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    return i, j, tl.program_id(0) // tiles


@triton.jit
def outputs(g, i, place, live, rows, stride):
    """Load ``[rows, positions]`` of g.

    ``place`` is where the positions begin, ``live`` which count.
    """
    mask = (i < rows)[:, None] & live[None, :]
    return tl.load(g + i[:, None] * stride + place[None, :], mask=mask, other=0.0)


@triton.jit
def inputs(
    a, j, t, sample, live, columns, strides, geometry, DENSE: tl.constexpr, LAST: tl.constexpr
):
    """Load ``[positions, columns]`` of a; ``sample`` is where each position's sample begins."""
    mask = live[:, None] & (j < columns)[None, :]
    if DENSE:
        place = (sample + t * strides[2])[:, None] + j[None, :] * strides[1]
    else:
        width = geometry[4]
        height = geometry[3]
        tap = j // geometry[17] if LAST else j % geometry[7]
        column = tap % geometry[6]
        row = (tap // geometry[6]) % geometry[5]
        plane = tap // (geometry[6] * geometry[5])
        z = (t // (width * height) * geometry[8] - geometry[11])[:, None]
        z += (plane * geometry[14])[None, :]
        y = ((t // width) % height * geometry[9] - geometry[12])[:, None]
        y += (row * geometry[15])[None, :]
        x = (t % width * geometry[10] - geometry[13])[:, None]
        x += (column * geometry[16])[None, :]
        mask &= (z >= 0) & (z < geometry[0]) & (y >= 0) & (y < geometry[1])
        mask &= (x >= 0) & (x < geometry[2])
        place = (z * geometry[1] + y) * geometry[2] + x
        if LAST:
            place = place * strides[2] + (j % geometry[17])[None, :] + sample[:, None]
        else:
            place += (j // geometry[7] * strides[1])[None, :] + sample[:, None]
    return tl.load(a + place, mask=mask, other=0.0)


@triton.jit
def product(left, right, SUMS: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``left right`` with sums that begin at zero; in tf32 only if ``PRECISION`` says so.

    Without the last argument the compiler would take the total that the result is added to as the
    product's own accumulator, and a tensor core's truncation would act on it.
    """
    # The interpreter multiplies the bits of bfloat16 numbers.
    if SUMS == tl.float64 or _INTERPRETED:
        left = left.to(SUMS)
        right = right.to(SUMS)
    depth: tl.constexpr = left.shape[1]
    return tl.dot(
        left, right, input_precision=PRECISION, out_dtype=SUMS, max_num_imprecise_acc=depth
    )
