"""Noise: keystream, lattice draws, and noise added in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ....base.rng import Stream
from ... import noise
from .. import _numbers, _rounding
from . import chacha, lattice
from .launch import INTERPRETED, at, launch, number

_BLOCKS = 128  # of the cipher in a program
_MOST_TILES = 1024
REGISTERS = 128
"""The maximum of registers per thread. Left alone, ptxas aims at fewer and spills."""


def tiles_of(position: int, count: int) -> tuple[int, int, int]:
    """Return the first tile, how many coordinates precede these in it, and how many tiles they
    meet.
    """
    first, skip = divmod(position, 512)
    return first, skip, -(-(skip + count) // 512)


def tiles_per_program(tiles: int) -> int:
    """Return how many tiles a program takes.

    The interpreter takes about as long for a thousand tiles as for one.
    """
    return min(_MOST_TILES, triton.next_power_of_2(tiles)) if INTERPRETED else 8


def programs(tiles: int) -> int:
    """Return how many programs share these tiles."""
    return -(-tiles // tiles_per_program(tiles)) if tiles else 0


@triton.jit(do_not_specialize=["first", "n", *chacha.STREAM])
def keystream_kernel(
    out,
    key0: tl.int64, key1: tl.int64, key2: tl.int64, key3: tl.int64, nonce: tl.int64,
    rounds: tl.int32,
    first: tl.int64,
    n: tl.int64,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    stream = chacha.unpack(key0, key1, key2, key3, nonce, rounds)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    words = chacha.blocks(stream, first + block)
    for i in tl.static_range(16):
        tl.store(out + 16 * block + i, words[i].to(tl.int32, bitcast=True), mask=block < n)


@triton.jit(do_not_specialize=["first", "skip", "n", *chacha.STREAM])
def draws_kernel(
    out,
    table,
    key0: tl.int64, key1: tl.int64, key2: tl.int64, key3: tl.int64, nonce: tl.int64,
    rounds: tl.int32,
    first: tl.int64,
    skip: tl.int32,
    n: tl.int64,
    LAW: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    stream = chacha.unpack(key0, key1, key2, key3, nonce, rounds)
    tile, lane = lattice.lanes_of_program(TILES)
    start = lattice.first_index(tile, lane, skip)
    x = lattice.draws(stream, table, first + tile, lane, LAW)
    for k in tl.static_range(32):
        index = start + 16 * k
        tl.store(out + index, x[k], mask=(index >= 0) & (index < n))


@triton.jit(do_not_specialize=[
    "first", "skip", "n", "per_unit", "unit", *chacha.STREAM, *chacha.ROUNDING
])  # fmt: skip
def release_kernel(
    values,
    out,
    nonfinite,
    table,
    key0: tl.int64, key1: tl.int64, key2: tl.int64, key3: tl.int64, nonce: tl.int64,
    rounds: tl.int32,
    r_key0: tl.int64, r_key1: tl.int64, r_key2: tl.int64, r_key3: tl.int64, r_nonce: tl.int64,
    r_rounds: tl.int32,
    first: tl.int64,
    skip: tl.int32,
    n: tl.int64,
    per_unit: tl.int64,
    unit: tl.int64,
    LAW: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Write ``y = floor((v + X) / 2^14)``, as ``unit y`` where ``out`` has floats.

    The noise stays in registers.
    """
    FLOATS: tl.constexpr = values.dtype.element_ty.is_floating()
    OUT: tl.constexpr = out.dtype.element_ty
    stream = chacha.unpack(key0, key1, key2, key3, nonce, rounds)
    tile, lane = lattice.lanes_of_program(TILES)
    start = lattice.first_index(tile, lane, skip)
    x = lattice.draws(stream, table, first + tile, lane, LAW)
    unusable = tl.zeros(lane.shape, tl.int32)
    if FLOATS:
        rounding = chacha.unpack(r_key0, r_key1, r_key2, r_key3, r_nonce, r_rounds)
        bits = lattice.rounding_bits(rounding, first + tile, lane)
    for k in tl.static_range(32):
        index = start + 16 * k
        inside = (index >= 0) & (index < n)
        v = tl.load(values + index, mask=inside, other=0)
        if FLOATS:
            units = v * number(per_unit, v.dtype)
            usable = lattice.finite(units)
            unusable += tl.where(usable, 0, 1)
            y = lattice.release_floats(tl.where(usable, units, 0.0), bits[k], x[k])
        else:
            y = lattice.release_integers(v, x[k])
        if OUT.is_floating():
            y = y.to(OUT) * number(unit, OUT)
        tl.store(out + index, y, mask=inside)
    if FLOATS:
        tl.atomic_add(nonfinite, tl.sum(unusable).to(tl.int64))


def release(
    values: torch.Tensor,
    out: torch.Tensor,
    nonfinite: torch.Tensor,
    *,
    position: int,
    distribution: str,
    stream: Stream,
    rounding: Stream | None,
    per_unit: float,
    unit: float,
) -> None:
    """Add noise to ``values`` from ``position`` on; ``out`` may be the same tensor.

    Floats that are not finite count as zero and are added to ``nonfinite``, int64.
    """
    n = values.numel()
    first, skip, tiles = tiles_of(position, n)
    launch(
        release_kernel,
        programs(tiles) if n else 0,
        values,
        values,
        out,
        nonfinite,
        lattice.tables(distribution, values.device),
        *chacha.arguments(stream),
        *chacha.arguments(rounding),
        first,
        skip,
        n,
        _numbers.bits(per_unit),
        _numbers.bits(unit),
        LAW=lattice.LAW_CODES[distribution],
        TILES=tiles_per_program(tiles),
        maxnreg=REGISTERS,
    )


def _keystream(
    stream: Stream,
    *,
    first_block: int,
    blocks: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    out = torch.empty(16 * blocks, dtype=torch.int32, device=at(device))
    grid, given = -(-blocks // _BLOCKS), chacha.arguments(stream)
    launch(keystream_kernel, grid, out, out, *given, first_block, blocks, BLOCKS=_BLOCKS)
    return out.to(device)


def _lattice_draws(
    stream: Stream,
    *,
    position: int,
    count: int,
    distribution: str = "gaussian",
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    made = torch.empty(count, dtype=torch.int32, device=at(device))
    first, skip, tiles = tiles_of(position, count)
    launch(
        draws_kernel,
        programs(tiles),
        made,
        made,
        lattice.tables(distribution, made.device),
        *chacha.arguments(stream),
        first,
        skip,
        count,
        LAW=lattice.LAW_CODES[distribution],
        TILES=tiles_per_program(tiles),
    )
    return made.to(device) if out is None else out.copy_(made)


def _refuse_add_noise(x: torch.Tensor, **kwargs: Any) -> str | None:
    if kwargs.get("draws") is not None:
        return "makes its draws in registers, got prefetched draws"
    return None


def _add_noise(
    x: torch.Tensor,
    *,
    stream: Stream,
    position: int = 0,
    distribution: str = "gaussian",
    scale: float | torch.Tensor | None = None,
    rounding: Stream | None = None,
    draws: None = None,
) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        # Draws and bits go through memory: rare, and torch's operations release them as well.
        place: dict[str, Any] = {"position": position, "count": x.numel(), "device": x.device}
        drawn = _lattice_draws(stream, distribution=distribution, **place)
        bits = _rounding_bits(rounding or stream, **place).to(torch.int32).bitwise_and_(0xFFFF)
        return noise.add_drawn(x, (drawn, bits), scale)
    release(
        x,
        x,
        torch.zeros(1, dtype=torch.int64, device=x.device),
        position=position,
        distribution=distribution,
        stream=stream,
        rounding=rounding,
        per_unit=_numbers.per_unit(scale, x.dtype) if scale is not None else 0.0,
        unit=_numbers.cell(scale, x.dtype) if scale is not None else 0.0,
    )
    increment_version(x)
    return x


def _never(*_: Any, **__: Any) -> None:
    return None


_rounding_bits = _rounding.from_keystream(_keystream)

KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("noise.keystream", _keystream, _never),
    ("noise.lattice_draws", _lattice_draws, _never),
    ("noise.rounding_bits", _rounding_bits, _never),
    ("noise.add_noise", _add_noise, _refuse_add_noise),
)
"""``(op, run, refuse)``."""
