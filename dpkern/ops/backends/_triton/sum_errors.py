"""Bound the loss of sums over positions that become integers: ``E`` of ``docs/exact.md``, lemma 3.

    E = share sum_t |a_t| |g_t| + tiny              linear layers; tied rows join with sum_s |e_s|
    E = share sqrt(sum_q m |x_q|^2 |g_q|^2) + tiny  convolutions of groups q

where no input meets more than m taps. Lengths are summed in float64. Not yet run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ...ghost._bounds import gamma, sum_numbers
from ...ghost.conv import Geometry
from .. import _numbers
from . import rows
from .launch import INTERPRETED, launch, number
from .operands import NO_PADDING
from .precision import CHUNK, LEAST_CHUNK, SIXTEEN

_POSITIONS, _BLOCK = (64, 1024) if INTERPRETED else (16, 128)
_PARTS = 128


@triton.jit
def _lengths(x, first, live, count, POSITIONS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the norms of rows of ``count`` numbers that begin at ``first``; 0 where not live."""
    square = tl.zeros([POSITIONS], tl.float64)
    for begin in range(0, count, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        mask = live[:, None] & (entry < count)[None, :]
        part = tl.load(x + first[:, None] + entry[None, :], mask=mask, other=0.0).to(tl.float64)
        square += tl.sum(part * part, 1)
    return tl.sqrt(square)


@triton.jit(do_not_specialize=["positions", "columns", "rows", "chunks", "stride"])
def products_kernel(
    a, g, parts,
    positions: tl.int64, columns: tl.int64, rows: tl.int64, chunks: tl.int64, stride: tl.int64,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum ``|a_t| |g_t|`` over one chunk of a sample's positions."""
    program = tl.program_id(0).to(tl.int64)
    sample, chunk = program // chunks, program % chunks
    t = chunk * POSITIONS + tl.arange(0, POSITIONS)
    place = sample * positions + t
    live = t < positions
    ones = _lengths(a, place * columns, live, columns, POSITIONS, BLOCK)
    others = _lengths(g, place * rows, live, rows, POSITIONS, BLOCK)
    tl.store(parts + sample * stride + chunk, tl.sum(ones * others))


@triton.jit(do_not_specialize=["positions", "columns", "chunks", "stride", "padding"])
def lookups_kernel(
    ids, e, parts,
    positions: tl.int64, columns: tl.int64, chunks: tl.int64, stride: tl.int64, padding: tl.int64,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum ``|e_s|`` over one chunk of a sample's lookups, those of the padding left out."""
    program = tl.program_id(0).to(tl.int64)
    sample, chunk = program // chunks, program % chunks
    s = chunk * POSITIONS + tl.arange(0, POSITIONS)
    place = sample * positions + s
    token = tl.load(ids + place, mask=s < positions, other=0)
    live = (s < positions) & (token != padding)
    lengths = _lengths(e, place * columns, live, columns, POSITIONS, BLOCK)
    tl.store(parts + sample * stride + chunk, tl.sum(lengths))


@triton.jit(do_not_specialize=["count", "share", "most", "tiny"])
def bound_kernel(
    parts, errors,
    count: tl.int64, share: tl.int64, most: tl.int64, tiny: tl.int64,
    ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a sample's parts, and write its error; infinite from ``most`` on, and for NaN."""
    sample = tl.program_id(0).to(tl.int64)
    lanes = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        lanes += tl.load(parts + sample * count + place, mask=place < count, other=0.0)
    total = tl.sqrt(tl.sum(lanes)) if ROOT else tl.sum(lanes)
    error = number(share, tl.float64) * total + number(tiny, tl.float64)
    known = total < number(most, tl.float64)
    tl.store(errors + sample, tl.where(known, error, float("inf")))


def roundings(dtype: torch.dtype, positions: int) -> int:
    """Return how many roundings a product meets in a sum over positions, at most.

    Products of 16 bits meet three for each term of a chunk, and one for each chunk, whichever
    length of chunks a tile has (``precision``).
    """
    if dtype not in SIXTEEN:
        return positions
    return 3 * CHUNK + 1 + -(-positions // LEAST_CHUNK)


def bound(
    dtype: torch.dtype,
    positions: int,
    entries: int,
    parts: torch.Tensor,
    *,
    others: int = 0,
    root: bool = False,
) -> torch.Tensor:
    """Return the errors ``[B]``.

    Args:
        dtype: of the operands.
        positions, entries: terms of a sum, and sums of a gradient.
        parts: float64 ``[B, n]``: what adds up to the size of all products, or to its square.
        others: numbers that are added one by one.
        root: whether it is the square.
    """
    single = torch.float32 if dtype in SIXTEEN else dtype
    share, most, tiny = sum_numbers(single, roundings(dtype, positions) + others, entries)
    if dtype in SIXTEEN:  # every product may underflow, and every addition
        tiny += 6 * positions * torch.finfo(single).smallest_normal * math.sqrt(entries)
    batch, count = parts.shape
    errors = parts.new_empty(batch)
    # The lengths are float64 sums themselves.
    numbers = (_numbers.bits(x) for x in (share * (1 + 2.0**-30), most, tiny))
    launch(bound_kernel, batch, parts, parts, errors, count, *numbers, ROOT=root, BLOCK=_PARTS)
    return errors


def _room(batch: int, chunks: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(batch, chunks, dtype=torch.float64, device=like.device)


def _products(a: torch.Tensor, g: torch.Tensor, parts: torch.Tensor) -> None:
    batch, positions, columns = a.shape
    chunks = -(-positions // _POSITIONS)
    sizes = positions, columns, g.shape[2], chunks, parts.shape[1]
    meta: dict[str, Any] = {"POSITIONS": _POSITIONS, "BLOCK": _BLOCK}
    launch(products_kernel, batch * chunks, a, a, g, parts, *sizes, **meta)


def linear_sum_error(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    parts = _room(len(a), -(-a.shape[1] // _POSITIONS), a)
    _products(a, g, parts)
    return bound(a.dtype, a.shape[1], a.shape[2] * g.shape[2], parts)


def tied_sum_error(
    ids: torch.Tensor,
    a: torch.Tensor,
    g: torch.Tensor,
    e: torch.Tensor,
    *,
    padding_idx: int | None = None,
) -> torch.Tensor:
    (batch, lookups), positions = ids.shape, a.shape[1]
    first, chunks = (-(-n // _POSITIONS) for n in (positions, lookups))
    parts = _room(batch, first + chunks, a)
    _products(a, g, parts)
    padding = NO_PADDING if padding_idx is None else padding_idx
    sizes = lookups, e.shape[2], chunks, first + chunks, padding
    meta: dict[str, Any] = {"POSITIONS": _POSITIONS, "BLOCK": _BLOCK}
    launch(lookups_kernel, batch * chunks, a, ids, e, parts[:, first:], *sizes, **meta)
    return bound(a.dtype, positions, a.shape[2] * g.shape[2], parts, others=lookups)


def conv_sum_error(x: torch.Tensor, g: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    batch, groups = geometry.batch, geometry.groups
    squares = torch.empty(2, batch, groups, dtype=torch.float64, device=x.device)
    for operand, square in zip((x, g), squares, strict=True):
        count = operand.numel() // max(1, batch * groups)
        rows.power_sums(operand, batch * groups, count, 2, square)
    parts = squares[0] * squares[1] * touches(geometry.kernel, geometry.stride, geometry.dilation)
    parts *= 1 + gamma(x[:1].numel() + g[:1].numel())
    entries = math.prod(geometry.weight_shape)
    return bound(x.dtype, geometry.positions, entries, parts, root=True)


def touches(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> int:
    """Return how many taps meet one input, at most.

    Tap k meets input i of an axis where ``stride o + dilation k = i + padding``: taps that do so
    are ``stride / gcd(stride, dilation)`` apart.
    """
    axes = zip(kernel, stride, dilation, strict=True)
    return math.prod(-(-k // (s // math.gcd(s, d))) for k, s, d in axes)
