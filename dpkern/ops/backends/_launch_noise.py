"""Noise on device kernels: keystream, draws, rounding bits, noise added in place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...base.rng import Stream
from .._draws import Draws
from . import _ahead, _device, _numbers, _tables
from . import _kernels as table
from ._start import Device, Rows, refuse_first, refuse_nothing

INTEGERS = {torch.int32: "std::int32_t", torch.int64: "std::int64_t"}
FLOATS = {torch.float32: "float", torch.float64: "double"}
"""Types of C++."""


def keystream(
    on: Device,
    stream: Stream,
    *,
    first_block: int,
    blocks: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    out = torch.empty(16 * blocks, dtype=torch.int32, device=on.place(device))
    with _device.guard(out.device) as cuda:
        packed = _tables.stream(stream)
        sizes = {"first_block": first_block, "blocks": blocks}
        on.start(table.KEYSTREAM, (), cuda, stream=packed, out=out, **sizes)
    return out.to(device)


def lattice_draws(
    on: Device,
    stream: Stream,
    *,
    position: int,
    count: int,
    distribution: str = "gaussian",
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    made = torch.empty(count, dtype=torch.int32, device=on.place(device))
    with _device.guard(made.device) as cuda:
        given = {"draws": _tables.draws(stream), "first": position, "n": count, "x": made}
        on.start(table.DRAWS, (distribution.capitalize(),), cuda, **given)
    return made.to(device) if out is None else out.copy_(made)


def source_draws(
    on: Device,
    draws: Draws,
    *,
    position: int,
    count: int,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    place = on.place(device)
    if draws.in_memory:
        made = draws.at(position, count).to(place)
        return made.to(device) if out is None else out.copy_(made)
    made = torch.empty(count, dtype=torch.int32, device=place)
    held = replace(draws, values=draws.values.to(place))
    with _device.guard(made.device) as cuda:
        given = {"draws": _tables.draws(held), "first": position, "n": count, "x": made}
        on.start(table.DRAWS, (table.SOURCE,), cuda, **given)
    return made.to(device) if out is None else out.copy_(made)


def rounding_bits(
    on: Device,
    stream: Stream,
    *,
    position: int,
    count: int,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    made = torch.empty(count, dtype=torch.int16, device=on.place(device))
    with _device.guard(made.device) as cuda:
        sizes = {"first": position, "n": count}
        on.start(table.ROUNDING, (), cuda, rounding=_tables.stream(stream), bits=made, **sizes)
    return made.to(device) if out is None else out.copy_(made)


def add_noise(
    on: Device,
    x: torch.Tensor,
    *,
    stream: Stream,
    position: int = 0,
    distribution: str = "gaussian",
    scale: float | torch.Tensor | None = None,
    rounding: Stream | None = None,
    draws: Draws | None = None,
) -> torch.Tensor:
    _device.refuse_noise_in_graphs(x.device)
    law = distribution.capitalize() if draws is None else table.SOURCE
    with _device.guard(x.device) as cuda:
        drawn = _tables.draws(stream if draws is None else draws)
        given: dict[str, Any] = {"draws": drawn, "first": position, "x": x}
        if x.dtype in INTEGERS:
            kernel, instance = table.ADD_NOISE_INTEGER, (INTEGERS[x.dtype], law)
        else:
            assert scale is not None
            kernel, instance = table.ADD_NOISE_FLOAT, (FLOATS[x.dtype], law)
            given["rounding"] = _tables.stream(rounding or stream)
            if isinstance(scale, torch.Tensor):
                kernel, given["scales"] = table.ADD_NOISE_SCALED, scale.double().contiguous()
            else:
                given["per_unit"] = _numbers.per_unit(scale, x.dtype)
                given["cell"] = _numbers.cell(scale, x.dtype)
            given["nonfinite"] = torch.zeros(1, dtype=torch.int64, device=x.device)
        on.start(kernel, instance, cuda, n=x.numel(), **given)
    increment_version(x)
    return x


def made_in_tiles(draws: Draws | None) -> bool:
    """Whether kernels make these draws themselves, by a law or a table, tile by tile."""
    return draws is None or not draws.in_memory


def ahead(on: Device) -> _ahead.Ahead:
    """Return what adds to draws in memory the rounding bits that they lack."""
    return _ahead.Ahead(partial(source_draws, on), partial(rounding_bits, on))


KERNELS: Rows = (
    ("noise.keystream", keystream, refuse_nothing),
    ("noise.lattice_draws", lattice_draws, refuse_nothing),
    ("noise.rounding_bits", rounding_bits, refuse_nothing),
    ("noise.source_draws", source_draws, refuse_nothing),
    ("noise.add_noise", add_noise, refuse_first),
)
"""``(op, run, refuse)``."""
