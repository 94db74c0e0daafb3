"""Noise: keystream, lattice draws, and noise added in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ....base.rng import Stream
from ... import noise
from ..._draws import Draws
from .. import _numbers, _rounding
from .._ahead import Ahead
from . import chacha, lattice, sources
from .lattice import programs, tiles_of, tiles_per_program
from .launch import at, launch, number
from .sources import BLOCK

_BLOCKS = 128  # of the cipher in a program
REGISTERS = 128
"""The maximum of registers per thread. Left alone, ptxas aims at fewer and spills."""


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


@triton.jit(do_not_specialize=["first", "skip", "n", *chacha.STREAM, *sources.READ])
def draws_kernel(
    out,
    table,
    key0: tl.int64, key1: tl.int64, key2: tl.int64, key3: tl.int64, nonce: tl.int64,
    rounds: tl.int32,
    entries: tl.int64, start: tl.int64, shift: tl.int32,
    first: tl.int64,
    skip: tl.int32,
    n: tl.int64,
    SOURCE: tl.constexpr,
    LAW: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    stream = chacha.unpack(key0, key1, key2, key3, nonce, rounds)
    tile, lane = lattice.lanes_of_program(TILES)
    begin = lattice.first_index(tile, lane, skip)
    x = sources.draws(stream, table, entries, start, shift, first + tile, lane, SOURCE, LAW)
    for k in tl.static_range(32):
        index = begin + 16 * k
        tl.store(out + index, x[k], mask=(index >= 0) & (index < n))


@triton.jit
def _release(values, out, index, inside, x, carry, per_unit, unit):
    """Release the values at ``index``; return 1 where a float is not finite."""
    unusable = tl.zeros(index.shape, tl.int32)
    v = tl.load(values + index, mask=inside, other=0)
    if values.dtype.element_ty.is_floating():
        units = v * number(per_unit, v.dtype)
        usable = lattice.finite(units)
        unusable += tl.where(usable, 0, 1)
        y = lattice.release_floats(tl.where(usable, units, 0.0), carry, x)
    else:
        y = lattice.release_integers(v, x)
    if out.dtype.element_ty.is_floating():
        y = y.to(out.dtype.element_ty) * number(unit, out.dtype.element_ty)
    tl.store(out + index, y, mask=inside)
    return unusable


@triton.jit(do_not_specialize=[
    "first", "skip", "n", "per_unit", "unit", *chacha.STREAM, *sources.READ, *chacha.ROUNDING
])  # fmt: skip
def release_kernel(
    values,
    out,
    nonfinite,
    table,
    key0: tl.int64, key1: tl.int64, key2: tl.int64, key3: tl.int64, nonce: tl.int64,
    rounds: tl.int32,
    entries: tl.int64, start: tl.int64, shift: tl.int32,
    r_key0: tl.int64, r_key1: tl.int64, r_key2: tl.int64, r_key3: tl.int64, r_nonce: tl.int64,
    r_rounds: tl.int32,
    first: tl.int64,
    skip: tl.int32,
    n: tl.int64,
    per_unit: tl.int64,
    unit: tl.int64,
    SOURCE: tl.constexpr,
    LAW: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Write ``y = floor((v + X) / 2^14)``, as ``unit y`` where ``out`` has floats.

    The noise stays in registers.
    """
    FLOATS: tl.constexpr = values.dtype.element_ty.is_floating()
    stream = chacha.unpack(key0, key1, key2, key3, nonce, rounds)
    tile, lane = lattice.lanes_of_program(TILES)
    begin = lattice.first_index(tile, lane, skip)
    x = sources.draws(stream, table, entries, start, shift, first + tile, lane, SOURCE, LAW)
    unusable = tl.zeros(lane.shape, tl.int32)
    if FLOATS:
        rounding = chacha.unpack(r_key0, r_key1, r_key2, r_key3, r_nonce, r_rounds)
        bits = lattice.rounding_bits(rounding, first + tile, lane)
    for k in tl.static_range(32):
        index = begin + 16 * k
        inside = (index >= 0) & (index < n)
        carry = bits[k] if FLOATS else 0
        unusable += _release(values, out, index, inside, x[k], carry, per_unit, unit)
    if FLOATS:
        tl.atomic_add(nonfinite, tl.sum(unusable).to(tl.int64))


@triton.jit(do_not_specialize=["n", "per_unit", "unit"])
def release_drawn_kernel(
    values,
    out,
    nonfinite,
    drawn,
    bits,
    n: tl.int64,
    per_unit: tl.int64,
    unit: tl.int64,
    BLOCK: tl.constexpr,
):
    """Release as ``release_kernel`` does, with draws and rounding bits that are in memory."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    x = tl.load(drawn + index, mask=inside, other=0)
    if values.dtype.element_ty.is_floating():
        carry = tl.load(bits + index, mask=inside, other=0).to(tl.int32) & 0xFFFF
        unusable = _release(values, out, index, inside, x, carry, per_unit, unit)
        tl.atomic_add(nonfinite, tl.sum(unusable).to(tl.int64))
    else:
        _release(values, out, index, inside, x, 0, per_unit, unit)


def release(
    values: torch.Tensor,
    out: torch.Tensor,
    nonfinite: torch.Tensor,
    *,
    position: int,
    distribution: str,
    stream: Stream,
    rounding: Stream | None,
    draws: Draws | None,
    per_unit: float,
    unit: float,
) -> None:
    """Add noise to ``values`` from ``position`` on; ``out`` may be the same tensor.

    Floats that are not finite count as zero and are added to ``nonfinite``, int64. Draws in memory
    that bring no rounding bits have them written there first.
    """
    n = values.numel()
    if draws is not None and draws.in_memory:
        stochastic = rounding if values.is_floating_point() else None
        held = _AHEAD.written(draws, position, n, values.device, stochastic)
        bits = held.values if held.rounding is None else held.rounding
        here = slice(position - held.first, position - held.first + n)
        given = values, out, nonfinite, held.values[here], bits[here], n
        numbers = _numbers.bits(per_unit), _numbers.bits(unit)
        launch(release_drawn_kernel, -(-n // BLOCK), values, *given, *numbers, BLOCK=BLOCK)
        return
    first, skip, tiles = tiles_of(position, n)
    drawn, constants = sources.drawn(draws, stream, distribution, values.device)
    launch(
        release_kernel,
        programs(tiles) if n else 0,
        values,
        values,
        out,
        nonfinite,
        *drawn,
        *chacha.arguments(rounding),
        first,
        skip,
        n,
        _numbers.bits(per_unit),
        _numbers.bits(unit),
        TILES=tiles_per_program(tiles),
        maxnreg=REGISTERS,
        **constants,
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
    stream: Stream, *, distribution: str = "gaussian", device: torch.device | str = "cpu", **to: Any
) -> torch.Tensor:
    return _made(*sources.drawn(None, stream, distribution, at(device)), device=device, **to)


def _source_draws(
    draws: Draws,
    *,
    position: int,
    count: int,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if draws.in_memory:
        made = draws.at(position, count).to(at(device))
        return made.to(device) if out is None else out.copy_(made)
    drawn = sources.drawn(draws, None, "gaussian", at(device))
    return _made(*drawn, device=device, position=position, count=count, out=out)


def _made(
    drawn: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    position: int,
    count: int,
    device: torch.device | str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return draws in memory."""
    made = torch.empty(count, dtype=torch.int32, device=at(device))
    first, skip, tiles = tiles_of(position, count)
    given = made, *drawn, first, skip, count
    grid = programs(tiles) if count else 0
    launch(draws_kernel, grid, made, *given, TILES=tiles_per_program(tiles), **constants)
    return made.to(device) if out is None else out.copy_(made)


def _add_noise(
    x: torch.Tensor,
    *,
    stream: Stream,
    position: int = 0,
    distribution: str = "gaussian",
    scale: float | torch.Tensor | None = None,
    rounding: Stream | None = None,
    draws: Draws | None = None,
) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        # Draws and bits go through memory: rare, and torch's operations release them as well.
        place: dict[str, Any] = {"position": position, "count": x.numel(), "device": x.device}
        if draws is None:
            draws = Draws(position, _lattice_draws(stream, distribution=distribution, **place))
        held = _AHEAD.written(draws, position, x.numel(), x.device, rounding)
        drawn = held.at(position, x.numel()), held.bits_at(position, x.numel())
        return noise.add_drawn(x, drawn, scale)
    release(
        x,
        x,
        torch.zeros(1, dtype=torch.int64, device=x.device),
        position=position,
        distribution=distribution,
        stream=stream,
        rounding=rounding,
        draws=draws,
        per_unit=_numbers.per_unit(scale, x.dtype) if scale is not None else 0.0,
        unit=_numbers.cell(scale, x.dtype) if scale is not None else 0.0,
    )
    increment_version(x)
    return x


def _never(*_: Any, **__: Any) -> None:
    return None


_rounding_bits = _rounding.from_keystream(_keystream)
_AHEAD = Ahead(_source_draws, _rounding_bits)

KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("noise.keystream", _keystream, _never),
    ("noise.lattice_draws", _lattice_draws, _never),
    ("noise.rounding_bits", _rounding_bits, _never),
    ("noise.source_draws", _source_draws, _never),
    ("noise.add_noise", _add_noise, _never),
)
"""``(op, run, refuse)``."""
