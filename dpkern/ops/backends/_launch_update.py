"""The update on device kernels: a plan, and a table of the tensors in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ...base import layouts
from ...base.codes import DISTRIBUTIONS, NoiseOrigin, SumType
from ...base.dtypes import by_dtype
from ...base.laws import SCALE_CELLS
from .. import update
from .._count import Count, known
from .._pair_map import MOST_COORDINATES, PairMap
from . import _device, _numbers, _tables
from . import _kernels as table
from ._launch_noise import FLOATS, INTEGERS, ahead, made_in_tiles
from ._start import Device, Rows, refuse_first

Tensors = Sequence[torch.Tensor]

_SUM_CODES = by_dtype(SumType)


@dataclass(frozen=True)
class Planned:
    """The arguments that a launch reads.

    Attributes:
        plan: ``UpdatePlan``.
        tasks: the table, which a recorded launch needs for as long as it is replayed.
        maps: that of the coordinates, if any sum is noised in others, with its matrices.
        kernel, instance: the kernel that computes it, and its template arguments.
    """

    plan: _tables.Table
    tasks: torch.Tensor
    maps: torch.Tensor | None
    held: tuple[torch.Tensor, ...]
    kernel: table.CudaKernel
    instance: table.Instance

    @classmethod
    def of(
        cls,
        params: Tensors,
        sums: Tensors,
        *,
        rule: update.Rule,
        state: update.State,
        gradient_scale: float = 1.0,
        noise: update.Noise | None = None,
        maps: update.PairMaps | None = None,
    ) -> Planned:
        """Plan these arguments of ``update.step``, at least one parameter."""
        first = params[0]
        buffers = [state.buffers[name] for name in rule.buffer_names()]
        tasks, pieces = tasks_of(params, sums, buffers, gradient_scale, noise, maps)
        plan = _tables.one(
            layouts.UPDATE_PLAN,
            rule=_tables.rule_numbers(rule, state.steps + 1),
            tasks=len(tasks),
            pieces=pieces,
            sum_type=_SUM_CODES.get(sums[0].dtype, SumType.float),
            wide=first.dtype is torch.float64,
        )
        if noise is not None:
            in_tiles = made_in_tiles(noise.draws)
            plan["noise"] = NoiseOrigin.stream if in_tiles else NoiseOrigin.draws
            plan["law"] = DISTRIBUTIONS.code(noise.distribution)
            plan["draws"] = _tables.draws(noise.draws or noise.stream)
            plan["rounding"] = _tables.stream(noise.rounding or noise.stream)
            plan["step_counter"] = (
                0 if noise.step_counter is None else noise.step_counter.data_ptr()
            )
        kernel, instance = _kernel(first.dtype, sums[0].dtype, noise, mapped=maps is not None)
        given: list[torch.Tensor] = []
        mapped = None
        if maps is not None:
            assert noise is not None
            of_maps, given = maps_of(params, sums, gradient_scale, noise, maps)
            mapped = _tables.device_table(of_maps, first.device)
        table_of = _tables.device_table(tasks, first.device)
        return cls(plan, table_of, mapped, tuple(given), kernel, instance)

    def arguments(self, nonfinite: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of the launch."""
        maps = {} if self.maps is None else {"maps": self.maps}
        return {"plan": self.plan, "tasks": self.tasks, **maps, "nonfinite": nonfinite}


def _kernel(
    param: torch.dtype, total: torch.dtype, noise: update.Noise | None, *, mapped: bool
) -> tuple[table.CudaKernel, table.Instance]:
    value = FLOATS[param]
    if noise is None:
        return table.UPDATE_FLAT, (value, value, "false")
    sums = INTEGERS.get(total, value)
    drawn = noise.distribution.capitalize() if noise.draws is None else table.SOURCE
    if mapped:
        return table.UPDATE_MAPPED, (value, sums, drawn)
    if not made_in_tiles(noise.draws):
        return table.UPDATE_FLAT, (value, sums, "true")
    return table.UPDATE_TILE, (value, sums, drawn)


def step(
    on: Device,
    params: list[torch.Tensor],
    sums: list[torch.Tensor],
    *,
    rule: update.Rule,
    state: update.State,
    gradient_scale: float = 1.0,
    noise: update.Noise | None = None,
    maps: update.PairMaps | None = None,
) -> Count:
    if not params:
        return 0
    if maps is not None and not any(maps.each):
        maps = None
    device = params[0].device
    if noise is not None and noise.step_counter is None:
        _device.refuse_noise_in_graphs(device)
    with _device.guard(device) as cuda:
        nonfinite = torch.zeros(1, dtype=torch.int64, device=device)
        if noise is not None and not made_in_tiles(noise.draws) and maps is None:
            noise = ahead(on).of_update(noise, sums)
        numbers: dict[str, Any] = {"rule": rule, "state": state, "gradient_scale": gradient_scale}
        planned = Planned.of(params, sums, **numbers, noise=noise, maps=maps)
        on.start(planned.kernel, planned.instance, cuda, **planned.arguments(nonfinite))
    increment_version(params)
    state.steps += 1
    return 0 if sums[0].dtype in _SUM_CODES else known(nonfinite[0])


def prepare(on: Device, params: list[torch.Tensor], *arguments: Any, **named: Any) -> Planned:
    """Load and copy whatever ``update.step`` with these arguments needs, without launching it.

    A CUDA graph may then record the launch. The result must live as long as the graph.
    """
    with _device.guard(params[0].device):
        on.check(on.starter.preload())
        return Planned.of(params, *arguments, **named)


def advance(on: Device, step_counter: torch.Tensor, *, rule: update.Rule) -> torch.Tensor:
    beta1, beta2 = rule.betas if isinstance(rule, update.Adam) else (1.0, 1.0)
    with _device.guard(step_counter.device) as cuda:
        on.start(table.ADVANCE, (), cuda, step_counter=step_counter, beta1=beta1, beta2=beta2)
    increment_version(step_counter)
    return step_counter


def _refuse(on: Device, params: Tensors, sums: Tensors, **kwargs: Any) -> str | None:
    maps = kwargs.get("maps")
    ranks = [] if maps is None else [each.rank for each in maps.each if each is not None]
    if max(ranks, default=0) > MOST_COORDINATES:
        return f"has up to {MOST_COORDINATES} coordinates of a channel pair, got {max(ranks)}"
    return on.refusal(*params)


def tasks_of(
    params: Tensors,
    sums: Tensors,
    buffers: Sequence[Tensors],
    gradient_scale: float,
    noise: update.Noise | None,
    maps: update.PairMaps | None = None,
) -> tuple[_tables.Table, int]:
    """Return one task for every tensor with entries, and the number of pieces of all of them.

    With maps every task has whole blocks of pieces.
    """
    used = [i for i, param in enumerate(params) if param.numel()]
    dtype = params[0].dtype
    tasks = np.zeros(len(used), _tables.dtype(layouts.UPDATE_TASK))
    tasks["param"] = [params[i].data_ptr() for i in used]
    tasks["sum"] = [sums[i].data_ptr() for i in used]
    tasks["size"] = size = np.array([params[i].numel() for i in used], np.int64)
    for name, group in zip(("state1", "state2"), buffers, strict=False):
        tasks[name] = [group[i].data_ptr() for i in used]
    touched = tasks["param"] | tasks["sum"] | tasks["state1"] | tasks["state2"]
    pieces = -(-size // layouts.UPDATE_PIECE)
    if noise is None:
        tasks["step"] = _numbers.rounded(gradient_scale, dtype)
    else:
        tasks["first_position"] = first = np.array([noise.positions[i] for i in used], np.int64)
        tasks["per_unit"] = [_numbers.per_unit(noise.scales[i], dtype) for i in used]
        tasks["step"] = [_numbers.step(noise.scales[i], gradient_scale, dtype) for i in used]
        if maps is not None:
            blocks = [_blocks(params[i], noise.positions[i], maps.each[i]) for i in used]
            pieces = np.array(blocks, np.int64) * int(layouts.TILES_PER_BLOCK)
        elif noise.draws is None or made_in_tiles(noise.draws):
            pieces = -(-(first % layouts.TILE + size) // layouts.TILE)
        else:
            tasks["draws_at"] = at = first - noise.draws.first
            for made in (noise.draws.values, noise.draws.rounding):
                if made is not None:
                    touched |= (made.data_ptr() + made.element_size() * at).astype(touched.dtype)
    tasks["aligned16"] = touched % 16 == 0
    tasks["first_piece"], total = _tables.starts(pieces)
    return tasks, total


def _blocks(param: torch.Tensor, position: int, each: PairMap | None) -> int:
    """Return how many blocks have a tensor's noise tiles, or its channel pairs."""
    size = param.numel() if each is None else each.coordinates(param.numel())
    tiles = -(-(position % layouts.TILE + size) // layouts.TILE)
    return -(-tiles // _own(each, position))


def _own(each: PairMap | None, position: int) -> int:
    """Return the tiles of a block in which its channel pairs begin: they may end in the next."""
    whole = int(layouts.TILES_PER_BLOCK)
    if each is None or layouts.TILE % each.rank == position % each.rank == 0:
        return whole
    return whole - 1


def maps_of(
    params: Tensors,
    sums: Tensors,
    gradient_scale: float,
    noise: update.Noise,
    maps: update.PairMaps,
) -> tuple[_tables.Table, list[torch.Tensor]]:
    """Return the map of every task, and the matrices that they point to."""
    used = [i for i, param in enumerate(params) if param.numel()]
    made = np.zeros(len(used), _tables.dtype(layouts.UPDATE_MAP))
    held: list[torch.Tensor] = []
    for row, i in zip(made, used, strict=True):
        each, scale, dtype = maps.each[i], noise.scales[i], params[i].dtype
        if each is None:
            continue
        signal, back = each.on(params[i].device)
        held += [back] if signal is None else [signal, back]
        row["signal"] = 0 if signal is None else signal.data_ptr()
        row["back"] = back.data_ptr()
        row["pairs"] = params[i].numel() // each.taps
        row["rank"], row["taps"] = each.rank, each.taps
        row["own"] = _own(each, noise.positions[i])
        row["cell"] = _numbers.cell(scale, dtype)
        counts = scale / SCALE_CELLS if sums[i].dtype in INTEGERS else 1.0
        row["factor"] = gradient_scale * counts
    return made, held


KERNELS: Rows = (
    ("update.step", step, _refuse),
    ("update.advance", advance, refuse_first),
)
"""``(op, run, refuse)``."""
