"""Noise: keystream, lattice draws, and noise added in place (csrc/cpu/noise.cpp)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ....base.rng import Stream
from ... import noise
from ..._draws import Draws
from .. import _numbers, _rounding
from .._ahead import Ahead
from .._extension import on_cpu
from . import chacha
from .chacha import words_of
from .compile import Array, entries, kernel, like
from .draws import TILE, release_float, release_integer, room, rounding_tile
from .parallel import in_parts, team_of
from .sources import draw_tile, source_of

_GRAIN = 16 * TILE  # coordinates worth a thread


@kernel
def _draws(stream: Array, source: Any, first: int, out: Array, begin: int, end: int) -> None:
    work, x = room(), np.empty(TILE, np.int32)
    at = begin
    while at < end:
        tile, offset = (first + at) // TILE, (first + at) % TILE
        count = min(TILE - offset, end - at)
        draw_tile(stream, source, tile, work, x)
        out[at : at + count] = x[offset : offset + count]
        at += count


@kernel
def _noise_integers(
    stream: Array, source: Any, first: int, address: int, like: Array, begin: int, end: int
) -> None:
    work, x = room(), np.empty(TILE, np.int32)
    values = entries(address, end, like)
    at = begin
    while at < end:
        tile, offset = (first + at) // TILE, (first + at) % TILE
        count = min(TILE - offset, end - at)
        draw_tile(stream, source, tile, work, x)
        part, drawn = values[at : at + count], x[offset : offset + count]
        for i in range(count):
            part[i] = release_integer(part[i], drawn[i])
        at += count


@kernel
def _noise_floats(
    streams: Any, source: Any, grid: Array, first: int, address: int, begin: int, end: int
) -> None:
    stream, rounding = streams
    per_unit, cell = grid[0], grid[1]
    number = grid.dtype.type
    work, x, bits = room(), np.empty(TILE, np.int32), np.empty(TILE, np.int32)
    values = entries(address, end, grid)
    at = begin
    while at < end:
        tile, offset = (first + at) // TILE, (first + at) % TILE
        count = min(TILE - offset, end - at)
        draw_tile(stream, source, tile, work, x)
        rounding_tile(rounding, tile, work, bits)
        part, drawn = values[at : at + count], x[offset : offset + count]
        carries = bits[offset : offset + count]
        for i in range(count):
            units = part[i] * per_unit
            units = units if np.isfinite(units) else number(0)
            part[i] = cell * release_float(units, carries[i], drawn[i], number)
        at += count


def _keystream(
    stream: Stream,
    *,
    first_block: int,
    blocks: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    out = torch.empty(16 * blocks, dtype=torch.int32, device="cpu")
    words, target = words_of(stream), out.numpy().view(np.uint32)
    in_parts(
        blocks,
        team_of(blocks, _GRAIN // 16),
        lambda _, begin, end: chacha.keystream(words, first_block, target, begin, end),
    )
    return out.to(device)


def _lattice_draws(stream: Stream, *, distribution: str = "gaussian", **to: Any) -> torch.Tensor:
    return _drawn(source_of(None, stream, distribution), **to)


def source_draws(
    draws: Draws,
    *,
    position: int,
    count: int,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if draws.in_memory:
        values = draws.at(position, count)
        return values.to(device, copy=True) if out is None else out.copy_(values)
    source = source_of(draws, None, "gaussian")
    return _drawn(source, position=position, count=count, device=device, out=out)


def _drawn(
    source: Any,
    *,
    position: int,
    count: int,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    made = torch.empty(count, dtype=torch.int32, device="cpu") if out is None else out
    target = made.numpy()

    words, table = source

    def fill(_: int, begin: int, end: int) -> None:
        _draws(words, table, position, target, begin, end)

    in_parts(count, team_of(count, _GRAIN), fill)
    increment_version(made)
    return made.to(device)


def _refuse_add_noise(x: torch.Tensor, **kwargs: Any) -> str | None:
    if isinstance(kwargs.get("scale"), torch.Tensor):
        return "has one scale per call, got one per coordinate"
    return on_cpu(x)


def _add_noise(
    x: torch.Tensor,
    *,
    stream: Stream,
    position: int = 0,
    distribution: str = "gaussian",
    scale: float | None = None,
    rounding: Stream | None = None,
    draws: Draws | None = None,
) -> torch.Tensor:
    if draws is not None and draws.in_memory:
        stochastic = rounding if x.is_floating_point() else None
        held = AHEAD.written(draws, position, x.numel(), x.device, stochastic)
        bits = held.bits_at(position, x.numel()) if x.is_floating_point() else None
        return noise.add_drawn(x, (held.at(position, x.numel()), bits), scale)
    words, source = source_of(draws, stream, distribution)
    n, place = x.numel(), (position, x.data_ptr())
    team, kind = team_of(n, _GRAIN), like(x.dtype)
    if x.dtype in noise.INTEGERS:
        in_parts(n, team, lambda _, *part: _noise_integers(words, source, *place, kind, *part))
    else:
        assert scale is not None
        assert rounding is not None
        streams = words, words_of(rounding)
        rounded = _numbers.per_unit(scale, x.dtype), _numbers.cell(scale, x.dtype)
        grid = np.array(rounded, kind.dtype)
        in_parts(n, team, lambda _, *part: _noise_floats(streams, source, grid, *place, *part))
    increment_version(x)
    return x


def _refuse_source(draws: Draws, **_: Any) -> str | None:
    place = draws.values.device
    return None if place.type == "cpu" else f"runs on the CPU, got draws on {place}"


AHEAD = Ahead(source_draws, _rounding.from_keystream(_keystream))

KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("noise.keystream", _keystream, None),
    ("noise.lattice_draws", _lattice_draws, None),
    ("noise.rounding_bits", AHEAD.rounding_bits, None),
    ("noise.source_draws", source_draws, _refuse_source),
    ("noise.add_noise", _add_noise, _refuse_add_noise),
)
"""``(op, run, refuse)``."""
