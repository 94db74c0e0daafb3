"""Count noise."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...base.codes import DISTRIBUTIONS
from ...base.rng import Stream
from ...ops import noise
from ...ops._draws import Draws
from ...ops._update_noise import UpdateNoise
from ...ops.backends._structs import BYTES
from ._native import kernels, tallied
from ._tally import CountedRun, Kernel

_bytes = BYTES["Stream"]


def _keystream(
    stream: Stream, *, first_block: int, blocks: int, **_: Any
) -> tuple[torch.Tensor, CountedRun]:
    out = torch.empty(16 * blocks, dtype=torch.int32)
    packed = kernels().keystream(out.data_ptr(), _bytes(stream), first_block, blocks)
    return out, tallied(packed)[1]


def _lattice_draws(
    stream: Stream,
    *,
    position: int,
    count: int,
    distribution: str = "gaussian",
    out: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, CountedRun]:
    out = torch.empty(count, dtype=torch.int32) if out is None else out
    law = DISTRIBUTIONS.code(distribution)
    packed = kernels().lattice_draws(out.data_ptr(), _bytes(stream), law, position, count)
    return out, tallied(packed)[1]


def _rounding_bits(
    stream: Stream, *, position: int, count: int, out: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, CountedRun]:
    out = torch.empty(count, dtype=torch.int16) if out is None else out
    packed = kernels().rounding_bits(out.data_ptr(), _bytes(stream), position, count)
    return out, tallied(packed)[1]


def _source_draws(
    draws: Draws, *, position: int, count: int, out: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, CountedRun]:
    out = torch.empty(count, dtype=torch.int32) if out is None else out
    made = kernels().source_draws(out.data_ptr(), BYTES["Draws"](draws), position, count)
    return out, tallied(made)[1]


def _add_noise(
    x: torch.Tensor,
    *,
    stream: Stream,
    position: int = 0,
    distribution: str = "gaussian",
    scale: float | torch.Tensor | None = None,
    rounding: Stream | None = None,
    draws: Draws | None = None,
) -> tuple[torch.Tensor, CountedRun]:
    drawn = UpdateNoise(
        distribution=distribution,
        scales=(1.0,),  # the release's own is told apart
        stream=stream,
        positions=(position,),
        rounding=rounding,
        draws=draws,
    )
    made = BYTES["UpdateNoise"](drawn)
    place = position, x.numel()
    if x.dtype in noise.INTEGERS:
        packed = kernels().add_noise_integer(x.data_ptr(), x.dtype is torch.int64, made, *place)
        increment_version(x)
        return x, tallied(packed)[1]
    assert rounding is not None
    each = scale.contiguous() if isinstance(scale, torch.Tensor) else None
    scales = (
        (float(scale), 0, False)  # type: ignore[arg-type]
        if each is None
        else (1.0, each.data_ptr(), each.dtype is torch.float64)
    )
    wide = x.dtype is torch.float64
    packed = kernels().add_noise_float(x.data_ptr(), wide, made, *place, *scales)
    increment_version(x)
    return x, tallied(packed)[1]


KERNELS: dict[str, Kernel] = {
    "noise.keystream": _keystream,
    "noise.lattice_draws": _lattice_draws,
    "noise.rounding_bits": _rounding_bits,
    "noise.source_draws": _source_draws,
    "noise.add_noise": _add_noise,
}
