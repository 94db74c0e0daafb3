"""Objects as the bytes of the structs that stand for them in compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch

from ...base import layouts
from ...base.codes import DISTRIBUTIONS, DrawSource
from ...base.rng import PackedStream, Stream
from .. import _cdt
from .._clip_request import ClipBounds
from .._coef_noise import CoefNoise
from .._draws import CdtDraws, Draws, SampleReads
from .._pair_map import PairMaps
from .._update_noise import UpdateNoise
from ..ghost._conv_geometry import Geometry


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
    """Return height and width; a single dimension is the width."""
    return (missing, *sizes)[-2:]


def _stream(value: Stream) -> bytes:
    return layouts.STREAM.pack(*value.packed())


def _draws(value: Draws) -> bytes:
    return layouts.DRAWS.pack(*_draws_fields(value))


_NO_STREAM = (b"", 0, 0, 0)
_NO_DRAWS = (DrawSource.stream, *(0,) * 9, *_NO_STREAM)


def _draws_fields(value: Draws | None) -> tuple[int | bytes, ...]:
    if value is None:
        return _NO_DRAWS
    address, size = value.values.data_ptr(), len(value.values)
    if isinstance(value, SampleReads):
        wide = value.values.dtype is torch.int32
        source = DrawSource.samples32 if wide else DrawSource.samples16
        table = address, size, value.cursor, value.shift
        return source, 0, value.first, 0, 0, 0, *table, *_NO_STREAM
    if isinstance(value, CdtDraws):
        assert value.stream is not None
        law = DISTRIBUTIONS.code(value.distribution)
        table = address, _cdt.boundaries_in(value.values), 0, 0
        return DrawSource.cdt, law, value.first, 0, 0, 0, *table, *value.stream.packed()
    bits = 0 if value.rounding is None else value.rounding.data_ptr()
    return DrawSource.values, 0, value.first, size, address, bits, 0, 0, 0, 0, *_NO_STREAM


def _update_noise(value: UpdateNoise) -> bytes:
    law = DISTRIBUTIONS.code(value.distribution)
    rounding = value.rounding or value.stream
    streams = *value.stream.packed(), *rounding.packed()
    return layouts.UPDATE_NOISE.pack(True, law, *streams, *_draws_fields(value.draws))


@cache
def _pack_noise() -> Callable[..., bytes]:
    return layouts.UPDATE_NOISE.packer.pack


def drawn_noise(law: str, stream: PackedStream, rounding: PackedStream | None) -> bytes:
    """Return the noise of an update that draws it itself, from streams in their packed form."""
    code = DISTRIBUTIONS.words.index(law)
    return _pack_noise()(True, code, *stream, *(rounding or stream), *_NO_DRAWS)


def _coef_noise(value: CoefNoise) -> bytes:
    each = value.scale if isinstance(value.scale, torch.Tensor) else None
    scale = 0.0 if isinstance(value.scale, torch.Tensor) else float(value.scale)
    rounding = value.rounding or value.stream
    return layouts.COEF_NOISE.pack(
        True,
        *value.stream.packed(),
        *rounding.packed(),
        *_draws_fields(value.draws),
        value.position,
        scale,
        0 if each is None else each.data_ptr(),
        each is not None and each.dtype is torch.float64,
    )


def _rule(numbers: tuple[float, ...]) -> bytes:
    return layouts.RULE.pack(*numbers)


def _clip_bounds(value: ClipBounds) -> bytes:
    return value.packed


def _pair_maps(value: PairMaps) -> bytes:
    return b"".join(
        _NO_MAP
        if each is None
        else layouts.PAIR_MAP.pack(
            0 if each.signal is None else each.signal.data_ptr(),
            *(each.back.data_ptr(), each.rank, each.taps),
        )
        for each in value.each
    )


_NO_MAP = bytes(layouts.PAIR_MAP.size)

BYTES: dict[str, Callable[[Any], bytes]] = {
    "ClipBound": _clip_bounds,
    "CoefNoise": _coef_noise,
    "Draws": _draws,
    "Geometry": _geometry,
    "PairMap": _pair_maps,
    "Rule": _rule,
    "Stream": _stream,
    "UpdateNoise": _update_noise,
}
"""Structs by the names of types in signatures; that of a list packs all of it."""
