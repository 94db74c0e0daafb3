"""The update of sums that are noised in other coordinates: one launch for all of them.

A program makes the noise of some tiles, has the channel pairs whose first coordinate lies in all of
them but the last, and so makes the last tile of most programs twice (``csrc/cuda/update_mapped.cu``
does the same). Coordinates with their noise wait in memory of the program's own, which its other
threads lead back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ....base import layouts
from ... import update
from ..._count import Count, known
from .. import _launch_update, _tables
from . import chacha, lattice, sources
from . import update as plain
from .launch import INTERPRETED, launch, number
from .update import NUMBERS


def _word(field: str) -> tl.constexpr:
    """Return at which 64-bit word of its map a field stands."""
    return tl.constexpr(layouts.UPDATE_MAP.offsets[field] // 8)


WORDS = tl.constexpr(layouts.UPDATE_MAP.size // 8)
SIGNAL, BACK, PAIRS, CELL, FACTOR = map(_word, ("signal", "back", "pairs", "cell", "factor"))
RANK_TAPS, OWN = map(_word, ("rank", "own"))
"""Rank and taps share a word."""
BLOCK = (1 << 16) if INTERPRETED else 512
"""Entries that are led back together."""


@triton.jit
def _ceil(x, y):
    """Return x / y rounded up, of a positive y; 0 where x is negative."""
    return tl.where(x > 0, (x + y - 1) // y, 0)


@triton.jit
def _signal(total, matrix, pair, row, rank, taps, inside, T: tl.constexpr):
    """Return coordinates of taps, summed in float64 from the first tap to the last."""
    whole = tl.zeros(pair.shape, tl.float64)
    for tap in range(taps):
        value = tl.load(total + pair * taps + tap, mask=inside, other=0).to(tl.float64)
        whole += value * tl.load(matrix + tap * rank + row, mask=inside, other=0)
    return whole.to(T)


@triton.jit(do_not_specialize=["count", *chacha.STREAM, *sources.READ, *chacha.ROUNDING, *NUMBERS])
def mapped_update_kernel(
    tasks,
    maps,
    nonfinite,
    scratch,
    count: tl.int64,
    table,
    key0: tl.int64, key1: tl.int64, key2: tl.int64, key3: tl.int64, nonce: tl.int64,
    rounds: tl.int32,
    entries: tl.int64, start: tl.int64, shift: tl.int32,
    r_key0: tl.int64, r_key1: tl.int64, r_key2: tl.int64, r_key3: tl.int64, r_nonce: tl.int64,
    r_rounds: tl.int32,
    a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64,
    a4: tl.int64, a5: tl.int64, a6: tl.int64, a7: tl.int64,
    T: tl.constexpr,
    S: tl.constexpr,
    RULE: tl.constexpr,
    SOURCE: tl.constexpr,
    LAW: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Noise the coordinates of some channel pairs, lead them back and apply the rule."""
    FLOATS: tl.constexpr = S.is_floating()
    program = tl.program_id(0).to(tl.int64)
    which = plain.number_of_task(tasks, count, program)
    task, mine = tasks + plain.WORDS * which, maps + WORDS * which
    rank = tl.load(mine + RANK_TAPS) & 0xFFFFFFFF
    taps = tl.load(mine + RANK_TAPS) >> 32
    own = tl.load(mine + OWN)
    window = (program - tl.load(task + plain.FIRST)) * own  # its first tile, of the tensor's
    position = tl.load(task + plain.POSITION)
    skip = position % lattice.TILE
    begin = window * lattice.TILE - skip
    first = _ceil(begin, rank)
    last = tl.minimum(_ceil(begin + own * lattice.TILE, rank), tl.load(mine + PAIRS))
    last = tl.maximum(first, last)
    total = plain.array_of(task, plain.SUM, S)
    room = scratch + program * (TILES * lattice.TILE) - begin

    lanes = tl.arange(0, lattice.LANES * TILES)
    tile, lane = window + lanes // lattice.LANES, lanes % lattice.LANES
    index0 = lattice.first_index(tile, lane, skip)
    tile += position // lattice.TILE
    stream = chacha.unpack(key0, key1, key2, key3, nonce, rounds)
    x = sources.draws(stream, table, entries, start, shift, tile, lane, SOURCE, LAW)
    unusable = tl.zeros((lane.shape[0], 8), tl.int32)
    if FLOATS:
        rounding = chacha.unpack(r_key0, r_key1, r_key2, r_key3, r_nonce, r_rounds)
        bits = lattice.rounding_bits(rounding, tile, lane)
        per_unit = number(tl.load(task + plain.PER_UNIT), T)
        cell = number(tl.load(mine + CELL), T)
    matrix = tl.load(mine + SIGNAL)
    for k in tl.static_range(0, 32, 8):
        index = index0[:, None] + lattice.LANES * (k + tl.arange(0, 8))[None, :]
        inside = (index >= first * rank) & (index < last * rank)
        drawn = lattice.side_by_side(x, k)
        if FLOATS:
            if matrix == 0:
                v = tl.load(total + index, mask=inside, other=0)
            else:
                pair = index // rank
                row = index - pair * rank
                signal = matrix.to(tl.pointer_type(tl.float64))
                v = _signal(total, signal, pair, row, rank, taps, inside, T)
            units = v * per_unit
            usable = lattice.finite(units)
            unusable += tl.where(usable, 0, 1)
            units = tl.where(usable, units, 0.0)
            y = lattice.release_floats(units, lattice.side_by_side(bits, k), drawn) * cell
        else:
            v = tl.load(total + index, mask=inside, other=0)
            y = lattice.release_integers(v, drawn)
        tl.store(room + index, y.to(tl.float64), mask=inside)
    if FLOATS:
        tl.atomic_add(nonfinite, tl.sum(unusable).to(tl.int64))
    tl.debug_barrier()  # what others of this program have put

    factor = number(tl.load(mine + FACTOR), tl.float64)
    back = tl.load(mine + BACK).to(tl.pointer_type(tl.float64))
    param = plain.array_of(task, plain.PARAM, T)
    state1, state2 = plain.array_of(task, plain.STATE1, T), plain.array_of(task, plain.STATE2, T)
    numbers = plain.numbers_of(a0, a1, a2, a3, a4, a5, a6, a7, T)
    for at in range(first * taps, last * taps, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        held = entry < last * taps
        pair = entry // taps
        tap = entry - pair * taps
        whole = tl.zeros((BLOCK,), tl.float64)
        for r in range(rank):
            coordinate = tl.load(room + pair * rank + r, mask=held, other=0)
            whole += coordinate * tl.load(back + r * taps + tap, mask=held, other=0)
        gradient = (whole * factor).to(T)
        plain.apply_rule(param, state1, state2, entry, held, gradient, numbers, RULE)


def _mapped(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: update.Rule,
    state: update.State,
    gradient_scale: float,
    noise: update.Noise,
    maps: update.PairMaps,
) -> torch.Tensor:
    """Update the parameters, all of which are mapped; return what is not finite, ``[1]``."""
    dtype, device = params[0].dtype, params[0].device
    code, numbers = plain.rule_of(rule, state.steps + 1, dtype)
    buffers = [state.buffers[name] for name in rule.buffer_names()]
    nonfinite = torch.zeros(1, dtype=torch.int64, device=device)
    tasks, _ = _launch_update.tasks_of(params, sums, buffers, gradient_scale, noise)
    if not len(tasks):
        return nonfinite
    of_maps, matrices = _launch_update.maps_of(params, sums, gradient_scale, noise, maps)
    skips = tasks["first_position"].astype(np.int64) % int(layouts.TILE)
    tiles = -(-(skips + of_maps["pairs"] * of_maps["rank"]) // int(layouts.TILE))
    each = max(2, lattice.tiles_per_program(int(tiles.max())))
    whole = of_maps["own"] == int(layouts.TILES_PER_BLOCK)  # no pair crosses the end of a tile
    of_maps["own"] = np.where(whole, each, each - 1)
    tasks["first_piece"], programs = _tables.starts(-(-tiles // of_maps["own"]))
    table = _tables.device_table(tasks, device).view(torch.int64)
    map_table = _tables.device_table(of_maps, device).view(torch.int64)
    scratch = torch.empty(programs * each * int(layouts.TILE), dtype=torch.float64, device=device)
    drawn, constants = sources.drawn(noise.draws, noise.stream, noise.distribution, device)
    launch(
        mapped_update_kernel,
        programs,
        table,
        *(table, map_table, nonfinite, scratch, len(tasks)),
        *(*drawn, *chacha.arguments(noise.rounding), *numbers),
        **constants,
        T=plain.TYPES[dtype],
        S=plain.TYPES[sums[0].dtype],
        RULE=code,
        TILES=each,
        BLOCK=BLOCK,
        maxnreg=255,
    )
    del matrices  # the stream's order keeps them: memory is used again behind the launch
    increment_version(params)
    return nonfinite


def _step(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: update.Rule,
    state: update.State,
    gradient_scale: float = 1.0,
    noise: update.Noise | None = None,
    maps: update.PairMaps | None = None,
) -> Count:
    given: dict[str, Any] = {"rule": rule, "gradient_scale": gradient_scale}
    if maps is None or not any(maps.each):
        return plain.step(params, sums, state=state, noise=noise, **given)
    assert noise is not None
    chosen = [i for i, each in enumerate(maps.each) if each is not None]
    rest = [i for i, each in enumerate(maps.each) if each is None]

    def part(of: Sequence[int]) -> dict[str, Any]:
        buffers = {name: [held[i] for i in of] for name, held in state.buffers.items()}
        positions = tuple(noise.positions[i] for i in of)
        scales = tuple(noise.scales[i] for i in of)
        return given | {
            "params": [params[i] for i in of],
            "sums": [sums[i] for i in of],
            "state": update.State(state.steps, buffers),
            "noise": replace(noise, positions=positions, scales=scales),
        }

    bad: Count = known(_mapped(**part(chosen), maps=maps.part(chosen))[0])
    if rest:
        bad = bad + plain.step(**part(rest))
    state.steps += 1
    return bad


KERNELS: tuple[tuple[str, Any, Any], ...] = (("update.step", _step, plain.refuse),)
"""``(op, run, refuse)``."""
