"""The noise of one step: the streams it is drawn from, and each parameter's place in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import add

from ..base.rng import Key, PackedStream, Purpose
from ..ops import update
from ..privacy.mechanisms.plan import Plan


def purpose_of(law: str) -> Purpose:
    """Return the nonce domain of a law's noise."""
    return Purpose.NOISE if law == "gaussian" else Purpose.LAPLACE


def noise_of(
    plan: Plan,
    key: Key,
    step: int,
    offsets: Sequence[int] | None = None,
    *,
    samples: int | None = None,
    draws: update.Draws | None = None,
) -> update.Noise | None:
    """Return the noise of step number ``step`` by this plan; None if there is none.

    ``offsets`` say where in each parameter the part begins that is noised here, ``samples`` how
    many noises of one sample each the sum gets: n independent ones of scale s are one of s sqrt(n).
    ``draws`` are prefetched for this step.
    """
    law = plan.distribution
    if law is None or samples == 0:
        return None
    scales = plan.scales
    if samples is not None:
        scales = tuple(scale * math.sqrt(samples) for scale in scales)
    return update.Noise(
        distribution=law,
        scales=scales,
        stream=key.stream(purpose_of(law), step),
        positions=plan.positions if offsets is None else tuple(map(add, plan.positions, offsets)),
        rounding=key.stream(Purpose.ROUNDING, step) if plan.arithmetic == "float" else None,
        draws=draws,
    )


Streams = tuple[str, PackedStream, PackedStream | None]
"""The law of a step's noise, its keystream, and that of the rounding, if there is one."""


def streams_of(plan: Plan, key: Key, step: int) -> Streams | None:
    """Return law and streams of ``noise_of`` as kernels take them; None if there is none."""
    law = plan.distribution
    if law is None:
        return None
    rounded = plan.arithmetic == "float"
    rounding = key.packed_stream(Purpose.ROUNDING, step) if rounded else None
    return law, key.packed_stream(purpose_of(law), step), rounding


def part(noise: update.Noise | None, indices: Sequence[int]) -> update.Noise | None:
    """Return the noise of these parameters: the same streams, each at its own place."""
    if noise is None:
        return None
    return replace(
        noise,
        scales=tuple(noise.scales[i] for i in indices),
        positions=tuple(noise.positions[i] for i in indices),
    )
