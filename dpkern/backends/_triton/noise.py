"""Noise: keystream, lattice draws, and noise added in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ...ops import noise
from ...rng import Stream
from .. import _numbers
from . import chacha, lattice
from .launch import DEVICE, INTERPRETED, Aot, launch, number

_BLOCKS = 128  # of the cipher in a program
_MOST_TILES = 1024
REGISTERS = 128
"""Per thread, at most. Left alone, ptxas aims at fewer and spills."""


def tiles_of(position: int, count: int) -> tuple[int, int, int]:
    """The first tile of these coordinates, those before them in it, and how many tiles they meet"""
    first, skip = divmod(position, 512)
    return first, skip, -(-(skip + count) // 512)


def tiles_per_program(tiles: int) -> int:
    """The interpreter takes about as long for a thousand tiles as for one."""
    return min(_MOST_TILES, triton.next_power_of_2(tiles)) if INTERPRETED else 8


def programs(tiles: int) -> int:
    """That share these tiles."""
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
    "first", "skip", "n", "per_unit", "cell", *chacha.STREAM, *chacha.ROUNDING
])  # fmt: skip
def add_noise_kernel(
    values,
    table,
    key0: tl.int64, key1: tl.int64, key2: tl.int64, key3: tl.int64, nonce: tl.int64,
    rounds: tl.int32,
    r_key0: tl.int64, r_key1: tl.int64, r_key2: tl.int64, r_key3: tl.int64, r_nonce: tl.int64,
    r_rounds: tl.int32,
    first: tl.int64,
    skip: tl.int32,
    n: tl.int64,
    per_unit: tl.int64,
    cell: tl.int64,
    LAW: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    stream = chacha.unpack(key0, key1, key2, key3, nonce, rounds)
    tile, lane = lattice.lanes_of_program(TILES)
    start = lattice.first_index(tile, lane, skip)
    x = lattice.draws(stream, table, first + tile, lane, LAW)
    FLOATS: tl.constexpr = values.dtype.element_ty.is_floating()
    if FLOATS:
        rounding = chacha.unpack(r_key0, r_key1, r_key2, r_key3, r_nonce, r_rounds)
        bits = lattice.rounding_bits(rounding, first + tile, lane)
    for k in tl.static_range(32):
        index = start + 16 * k
        inside = (index >= 0) & (index < n)
        v = tl.load(values + index, mask=inside, other=0)
        if FLOATS:
            units = v * number(per_unit, v.dtype)
            units = tl.where(lattice.finite(units), units, 0.0)
            y = lattice.release_floats(units, bits[k], x[k]) * number(cell, v.dtype)
        else:
            y = lattice.release_integers(v, x[k])
        tl.store(values + index, y, mask=inside)


def _keystream(
    stream: Stream, *, first_block: int, blocks: int, backend: str | None = None
) -> torch.Tensor:
    out = torch.empty(16 * blocks, dtype=torch.int32, device=DEVICE)
    grid, given = -(-blocks // _BLOCKS), chacha.arguments(stream)
    launch(keystream_kernel, grid, out, out, *given, first_block, blocks, BLOCKS=_BLOCKS)
    return out.cpu()


def _lattice_draws(
    stream: Stream,
    *,
    position: int,
    count: int,
    distribution: str = "gaussian",
    backend: str | None = None,
) -> torch.Tensor:
    out = torch.empty(count, dtype=torch.int32, device=DEVICE)
    first, skip, tiles = tiles_of(position, count)
    launch(
        draws_kernel,
        programs(tiles),
        out,
        out,
        lattice.tables(distribution, out.device),
        *chacha.arguments(stream),
        first,
        skip,
        count,
        LAW=lattice.LAW_CODES[distribution],
        TILES=tiles_per_program(tiles),
    )
    return out.cpu()


def _refuse_add_noise(x: torch.Tensor, **kwargs: Any) -> str | None:
    if isinstance(kwargs.get("scale"), torch.Tensor):
        return "has one scale per call, got one per coordinate"
    return refuse_capture(x)


def refuse_capture(x: torch.Tensor) -> str | None:
    """A captured launch would repeat its noise at every replay."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return "draws no noise while a CUDA graph is captured: replays would repeat it"
    return None


def _add_noise(
    x: torch.Tensor,
    *,
    stream: Stream,
    position: int = 0,
    distribution: str = "gaussian",
    scale: float | None = None,
    rounding: Stream | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    per_unit = cell = 0
    if x.dtype in noise.FLOATS:
        assert scale is not None
        per_unit = _numbers.bits(_numbers.per_unit(scale, x.dtype))
        cell = _numbers.bits(_numbers.cell(scale, x.dtype))
    n = x.numel()
    first, skip, tiles = tiles_of(position, n)
    launch(
        add_noise_kernel,
        programs(tiles) if n else 0,
        x,
        x,
        lattice.tables(distribution, x.device),
        *chacha.arguments(stream),
        *chacha.arguments(rounding),
        first,
        skip,
        n,
        per_unit,
        cell,
        LAW=lattice.LAW_CODES[distribution],
        TILES=tiles_per_program(tiles),
        maxnreg=REGISTERS,
    )
    increment_version(x)
    return x


def _never(*_: Any, **__: Any) -> None:
    return None


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("noise.keystream", _keystream, _never),
    ("noise.lattice_draws", _lattice_draws, _never),
    ("noise.add_noise", _add_noise, _refuse_add_noise),
)
"""``(op, run, refuse)``."""

STREAM = {name: "i32" if name == "rounds" else "i64" for name in chacha.STREAM}
ROUNDING = {f"r_{name}": kind for name, kind in STREAM.items()}
"""Types of the kernels' arguments."""
PLACE = {"first": "i64", "skip": "i32", "n": "i64"}
_META = {"LAW": "constexpr", "TILES": "constexpr"}
AOT: tuple[Aot, ...] = (
    Aot(
        keystream_kernel,
        {"out": "*i32", **STREAM, "first": "i64", "n": "i64", "BLOCKS": "constexpr"},
        {"BLOCKS": _BLOCKS},
    ),
    *(
        Aot(
            draws_kernel,
            {"out": "*i32", "table": "*i32", **STREAM, **PLACE, **_META},
            {"LAW": law, "TILES": 8},
        )
        for law in (0, 1)
    ),
    *(
        Aot(
            add_noise_kernel,
            {
                "values": f"*{kind}",
                "table": "*i32",
                **STREAM,
                **ROUNDING,
                **PLACE,
                "per_unit": "i64",
                "cell": "i64",
                **_META,
            },
            {"LAW": 0, "TILES": 8},
            registers=REGISTERS,
        )
        for kind in ("i32", "i64", "fp32", "fp64")
    ),
)
