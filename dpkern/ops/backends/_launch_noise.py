"""Noise on device kernels: keystream, draws, rounding bits, noise added in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...base.rng import Stream
from .. import noise
from .._draws import CdtDraws, Draws, SampleReads
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
        law = (distribution.capitalize(),)
        sizes = {"first": position, "n": count}
        on.start(table.DRAWS, law, cuda, stream=_tables.stream(stream), x=made, **sizes)
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
    held = draws.values.to(place)
    made = torch.empty(count, dtype=torch.int32, device=place)
    with _device.guard(made.device) as cuda:
        if isinstance(draws, SampleReads):
            sample = ("std::int16_t" if held.dtype is torch.int16 else "std::int32_t",)
            sizes = _ahead.reads(draws, position)
            on.start(table.SAMPLES, sample, cuda, table=held, x=made, n=count, **sizes)
        elif isinstance(draws, CdtDraws):
            stream, law, boundaries = _ahead.look_ups(draws)
            given = {"stream": _tables.stream(stream), "words": held, "x": made}
            sizes = {"boundaries": boundaries, "first": position, "n": count}
            on.start(table.CDT, (law.capitalize(),), cuda, **given, **sizes)
        else:
            made = draws.at(position, count).to(place)
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
    if draws is not None:
        return noise.add_drawn(x, _drawn(on, x, draws, position, rounding), scale)
    law = distribution.capitalize()
    with _device.guard(x.device) as cuda:
        given: dict[str, Any] = {"stream": _tables.stream(stream), "first": position, "x": x}
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


def _drawn(
    on: Device, x: torch.Tensor, draws: Draws, position: int, rounding: Stream | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return draws of a noise source for ``x``, and rounding bits if ``x`` holds floats."""
    at: dict[str, Any] = {"position": position, "count": x.numel(), "device": x.device}
    drawn = source_draws(on, draws, **at)
    if x.dtype in INTEGERS:
        return drawn, None
    if draws.rounding is not None:
        return drawn, draws.bits_at(position, x.numel())
    assert rounding is not None
    return drawn, rounding_bits(on, rounding, **at).to(torch.int32).bitwise_and_(0xFFFF)


def ahead(on: Device) -> _ahead.Ahead:
    """Return what writes a source's draws on this device."""
    return _ahead.Ahead(partial(source_draws, on), partial(rounding_bits, on))


KERNELS: Rows = (
    ("noise.keystream", keystream, refuse_nothing),
    ("noise.lattice_draws", lattice_draws, refuse_nothing),
    ("noise.rounding_bits", rounding_bits, refuse_nothing),
    ("noise.source_draws", source_draws, refuse_nothing),
    ("noise.add_noise", add_noise, refuse_first),
)
"""``(op, run, refuse)``."""
