"""Check that a noise scale fits a lattice of float32."""

from __future__ import annotations

import torch

from ..base import validate as check
from ..base.errors import InvalidInput

_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-104, 2.0**116
"""The range of scales: outside, u = scale / 2^20 or an output y g would not be normal in
float32."""


def check_scale(name: str, scale: object) -> None:
    """Check that float32 can hold the lattice of this noise scale.

    Raises:
        InvalidInput: anything else.
    """
    if type(scale) is float and _SMALLEST_SCALE <= scale <= _LARGEST_SCALE:
        return
    if not _SMALLEST_SCALE <= check.positive_at(name, scale) <= _LARGEST_SCALE:
        raise InvalidInput(
            name,
            expected="a number from 2^-104 to 2^116",
            got=scale,
            remedy="Rescale the sums: the noise lattice must fit float32.",
        )


def check_scales(name: str, scales: torch.Tensor) -> None:
    """Check every entry of a tensor as ``check_scale`` does.

    Raises:
        InvalidInput: another entry.
    """
    if not bool(((scales >= _SMALLEST_SCALE) & (scales <= _LARGEST_SCALE)).all()):
        raise InvalidInput(
            name,
            expected="numbers from 2^-104 to 2^116",
            got="a tensor with other entries",
            remedy="Give every coordinate such a scale: one without noise cannot be released.",
        )


__all__ = ["check_scale", "check_scales"]
