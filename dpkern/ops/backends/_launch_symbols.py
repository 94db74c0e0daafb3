"""Randomized response on device kernels."""

from __future__ import annotations

from functools import lru_cache

import torch

from ...base import layouts
from ...base.rng import Stream
from .. import symbols as op
from . import _device, _tables
from . import _kernels as table
from ._start import Device, Rows, refuse_first


@lru_cache(maxsize=64)
def response_params(keep: int, categories: int) -> _tables.Table:
    """Return ``ResponseParams``, a cached constant that must not be changed."""
    width = op.alternative_width(keep, categories)
    fields = {"keep": keep, "width": width, "reciprocal": (2**64 - 1) // width}
    return _tables.one(layouts.RESPONSE_PARAMS, **fields, categories=categories)


def randomize(
    on: Device,
    symbols: torch.Tensor,
    *,
    stream: Stream,
    keep: int,
    categories: int = 2,
    position: int = 0,
) -> torch.Tensor:
    out = torch.empty_like(symbols)
    with _device.guard(symbols.device) as cuda:
        on.start(
            table.RANDOMIZE,
            (f"std::{str(symbols.dtype).removeprefix('torch.')}_t",),
            cuda,
            stream=_tables.stream(stream),
            first=position,
            response=response_params(keep, categories),
            x=symbols,
            n=symbols.numel(),
            out=out,
        )
    return out


KERNELS: Rows = (("symbols.randomize", randomize, refuse_first),)
"""``(op, run, refuse)``."""
