"""The noise of one release of coefficients: its scale, its streams, and the positions in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..base import validate as check
from ..base.errors import InvalidInput
from ..base.place import check_recording
from ..base.rng import Stream
from ._draws import Draws, check_draws
from ._lattice import TILE
from ._scale import check_scale, check_scales
from .noise import (
    FLOATS,
    check_rounding,
    check_stream,
)

_LAST_POSITION = 2**62


@dataclass(frozen=True, kw_only=True)
class CoefNoise:
    """The Laplace noise of the linear and the quadratic coefficients of one release.

    Attributes:
        scale: certified Laplace scale, of all coefficients or of each record's, ``[B]``.
        stream: keystream of the noise, used for nothing else.
        rounding: keystream of the stochastic rounding; None only with draws that bring their bits.
        position: where the first linear coefficient stands in both streams. The quadratic ones
            begin at ``quadratic_position``.
        draws: prefetched output of the streams from ``position`` to the last quadratic coefficient.
            None draws inside the call.
    """

    scale: float | torch.Tensor
    stream: Stream
    rounding: Stream | None = None
    position: int = 0
    draws: Draws | None = None


def quadratic_position(position: int, count: int) -> int:
    """Return the first multiple of 512 behind ``count`` linear coefficients from ``position`` on.

    Raises:
        InvalidInput: a negative number.
    """
    check.integer(0, _LAST_POSITION, position=position)
    return -(-(position + check.integer(0, count=count)) // TILE) * TILE


def check_noise(
    noise: object, records: int, linear: int, quadratic: int, like: torch.Tensor
) -> None:
    """Check noise for so many coefficients of so many records, on the device of ``like``.

    Raises:
        InvalidInput: anything else.
        PrivacyError: words that would be used twice.
    """
    if not isinstance(noise, CoefNoise):
        raise InvalidInput(
            "noise",
            expected="a coef.Noise or None",
            got=type(noise).__name__,
            remedy="Make one with coef.Noise(scale=..., stream=..., rounding=...).",
        )
    check_stream(**{"noise.stream": noise.stream})
    check.integer(0, _LAST_POSITION, **{"noise.position": noise.position})
    if isinstance(noise.scale, torch.Tensor):
        check.tensor_at(
            "noise.scale",
            noise.scale,
            shape=(records,),
            dtypes=FLOATS,
            device=like.device,
            contiguous=True,
        )
        check_scales("noise.scale", noise.scale)
    else:
        check_scale("noise.scale", noise.scale)
    if noise.draws is not None:
        end = quadratic_position(noise.position, linear) + quadratic
        last = end if quadratic else noise.position
        check_draws("noise.draws", noise.draws, noise.position, last, like.device, "laplace")
    if noise.draws is None or noise.draws.rounding is None:
        check_rounding("noise.rounding", noise.rounding, noise.stream, noise.draws)
    check_recording(like.device)


__all__ = ["CoefNoise", "check_noise", "quadratic_position"]
