"""All ops on device kernels, for every backend that has them."""

from __future__ import annotations

from functools import partial

from ...base import dispatch
from . import (
    _device_products,
    _launch_circulant,
    _launch_clip,
    _launch_coef,
    _launch_explicit,
    _launch_noise,
    _launch_spectral,
    _launch_symbols,
    _launch_update,
    _library,
)
from ._start import Device, refuse_first


def kernels(on: Device) -> dispatch.Kernels:
    """Return rows ``(op, run, refuse)``."""
    own = [
        (op, partial(run, on), partial(refuse, on))
        for op, run, refuse in (
            *_launch_noise.KERNELS,
            *_launch_clip.KERNELS,
            *_launch_update.KERNELS,
            *_launch_explicit.KERNELS,
            *_device_products.KERNELS,
            *_launch_symbols.KERNELS,
            *_launch_coef.KERNELS,
            *_launch_spectral.KERNELS,
            *_launch_circulant.KERNELS,
        )
    ]
    taken = {op for op, _, _ in own}
    others = (row for row in _library.KERNELS if row[0] not in taken)
    return [*own, *((op, run, partial(refuse_first, on)) for op, run in others)]
