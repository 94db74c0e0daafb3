"""Objects as the bytes of the structs that stand for them in compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..base import layouts
from ..ops.ghost._conv_geometry import Geometry
from ..rng import Stream


@lru_cache(maxsize=1024)
def _geometry(value: Geometry) -> bytes:
    planes = (
        *_plane(value.input, 1),
        *_plane(value.output, 1),
        *_plane(value.kernel, 1),
        *_plane(value.stride, 1),
        *_plane(value.padding, 0),
        *_plane(value.dilation, 1),
    )
    sizes = value.batch, value.in_channels, value.out_channels, value.groups
    return layouts.GEOMETRY.pack(*sizes, *planes)


def _plane(sizes: tuple[int, ...], missing: int) -> tuple[int, ...]:
    """Height and width; a single dimension is the width."""
    return (missing, *sizes)[-2:]


def _stream(value: Stream) -> bytes:
    return layouts.STREAM.pack(value.key, value.n0, value.n1, value.rounds)


BYTES: dict[str, Callable[[Any], bytes]] = {"Geometry": _geometry, "Stream": _stream}
"""By the names of types in signatures, which are those of the structs."""
