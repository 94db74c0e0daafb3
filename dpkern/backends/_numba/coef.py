"""Coefficients of polynomial losses, written or evaluated (csrc/cpu/coef.cpp)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ...ops import _lattice, coef
from .. import cpu
from .chacha import words_of
from .compile import Array, Number, inner, kernel
from .draws import TILE, draw_tile, law_of, release_float, room, rounding_tile
from .parallel import in_parts, team_of

_GRAIN = 16 * TILE  # coefficients worth a thread
_LANES = coef.LANES
_NO_STREAM = np.zeros(11, np.uint32)


@inner
def gather(streams: Any, law: Any, position: Number, count: Number, room_of: Any) -> None:
    """Draws and rounding bits of ``count`` positions; a tile is kept until another one is used."""
    stream, rounding = streams
    work, held, tile_x, tile_bits, x, bits = room_of
    done = 0
    while done < count:
        tile, offset = (position + done) // TILE, (position + done) % TILE
        if held[0] != tile:
            draw_tile(stream, law, tile, work, tile_x)
            rounding_tile(rounding, tile, work, tile_bits)
            held[0] = tile
        n = min(TILE - offset, count - done)
        x[done : done + n] = tile_x[offset : offset + n]
        bits[done : done + n] = tile_bits[offset : offset + n]
        done += n


@inner
def own_room() -> Any:
    """For ``gather``: generator, tile at hand, what it holds, and what was asked for."""
    return (
        room(),
        np.full(1, -1, np.int64),
        np.empty(TILE, np.int32),
        np.empty(TILE, np.int32),
        np.empty(TILE, np.int32),
        np.empty(TILE, np.int32),
    )


@inner
def add_noise(
    values: Array, release: Any, position: Number, row: Number, count: Number, room_of: Any
) -> None:
    _, streams, law, _, per_units, cells = release
    gather(streams, law, position, count, room_of)
    _, _, _, _, x, bits = room_of
    number = values.dtype.type
    per_unit, cell = per_units[row % len(per_units)], cells[row % len(cells)]
    for i in range(count):
        values[i] = cell * release_float(values[i] * per_unit, bits[i], x[i], number)


@inner
def coefficients(
    targets: Array, printed: bool, release: Any, index: Number, row: Number, count: Number, to: Any
) -> None:
    """Both coefficients of ``count`` targets from ``index`` on, all of one row if rows matter."""
    a1, a2, linear, quadratic = to
    on, _, _, places, _, _ = release
    number = a1.dtype.type
    for i in range(count):
        x = targets[index + i]
        a1[i] = number(0.5) - x
        a2[i] = x * number(0.5) - number(0.25) if printed else number(0.125)
    if on:
        add_noise(a1, release, places[0] + index, row, count, linear)
        add_noise(a2, release, places[1] + index, row, count, quadratic)


@kernel
def _perturb(
    targets: Array, printed: bool, release: Any, columns: int, out: Any, begin: int, end: int
) -> None:
    linear, quadratic, by_row = own_room(), own_room(), len(release[4]) > 1
    a1, a2 = out
    at = begin
    while at < end:
        row = at // columns
        count = min(TILE, end - at)
        if by_row:
            count = min(count, (row + 1) * columns - at)
        to = a1[at : at + count], a2[at : at + count], linear, quadratic
        coefficients(targets, printed, release, at, row, count, to)
        at += count


@inner
def sum_of_lanes(lanes: Array) -> Any:
    half = _LANES // 2
    while half > 0:
        for i in range(half):
            lanes[i] = lanes[i] + lanes[i + half]
        half //= 2
    return lanes[0]


@kernel
def _quadratic(
    z: Array,
    targets: Array,
    shift: Array,
    printed: bool,
    release: Any,
    columns: int,
    out: Any,
    begin: int,
    end: int,
) -> None:
    linear, quadratic = own_room(), own_room()
    a1, a2 = np.empty(TILE, z.dtype), np.empty(TILE, z.dtype)
    loss, dz = out
    for row in range(begin, end):
        lanes = np.zeros(_LANES, np.float64)
        for column in range(0, columns, TILE):
            at, count = row * columns + column, min(TILE, columns - column)
            to = a1, a2, linear, quadratic
            coefficients(targets, printed, release, at, row, count, to)
            for i in range(count):
                w = z[at + i]
                if len(shift) > 0:
                    w = w + shift[row]
                dz[at + i] = (a2[i] + a2[i]) * w + a1[i]
                wide = np.float64(w)
                term = wide * (np.float64(a1[i]) + np.float64(a2[i]) * wide)
                lanes[i % _LANES] += term
        loss[row] = sum_of_lanes(lanes)


def release_of(noise: coef.Noise | None, linear: int, targets: torch.Tensor) -> tuple[Any, ...]:
    """On, streams, law, positions, and what each record (or all) are scaled by."""
    number = targets.detach().flatten()[:0].numpy().dtype
    if noise is None:
        nothing = np.ones(1, number)
        streams, places = (_NO_STREAM, _NO_STREAM), np.zeros(2, np.int64)
        return False, streams, law_of("laplace"), places, nothing, nothing
    assert noise.rounding is not None
    first = noise.position
    places = np.array([first, coef.quadratic_position(first, linear)], np.int64)
    each = torch.as_tensor(noise.scale, dtype=torch.float64).reshape(-1)
    scaled = (f(each, targets.dtype).numpy() for f in (_lattice.per_unit, _lattice.cell))
    streams = words_of(noise.stream), words_of(noise.rounding)
    return True, streams, law_of("laplace"), places, *scaled


def refuse(first: torch.Tensor, *_: Any, noise: coef.Noise | None = None, **__: Any) -> str | None:
    if noise is not None and noise.draws is not None:
        return "makes its draws in registers, got draws made ahead"
    return cpu._on_cpu(first)


def flat(*tensors: torch.Tensor) -> tuple[Array, ...]:
    return tuple(tensor.detach().view(-1).numpy() for tensor in tensors)


def _run_perturb(
    targets: torch.Tensor,
    *,
    form: str,
    noise: coef.Noise | None = None,
    out: coef.Coefficients | None = None,
    backend: str | None = None,
) -> coef.Coefficients:
    coef.check_release(targets, noise)
    made = out or coef.Coefficients(torch.empty_like(targets), torch.empty_like(targets))
    (x,), places, columns = flat(targets), flat(*made), targets.shape[1]
    printed, release = form == "printed", release_of(noise, targets.numel(), targets)
    in_parts(
        len(x),
        team_of(len(x), _GRAIN),
        lambda _, begin, end: _perturb(x, printed, release, columns, places, begin, end),
    )
    increment_version(made)
    return made


def _run_quadratic(
    z: torch.Tensor,
    targets: torch.Tensor,
    *,
    form: str,
    noise: coef.Noise | None = None,
    shift: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    coef.check_release(targets, noise)
    made = out or (torch.empty(len(z), dtype=torch.float64), torch.empty_like(z))
    moved = z.new_empty(0) if shift is None else shift
    logits, x, c = flat(z, targets, moved)
    printed, release = form == "printed", release_of(noise, targets.numel(), targets)
    places, columns = flat(*made), z.shape[1]
    in_parts(
        len(z),
        team_of(len(x), _GRAIN),
        lambda _, *rows: _quadratic(logits, x, c, printed, release, columns, places, *rows),
    )
    increment_version(made)
    return made


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("coef.perturb", _run_perturb, refuse),
    ("coef.quadratic", _run_quadratic, refuse),
)
"""``(op, run, refuse)``."""
