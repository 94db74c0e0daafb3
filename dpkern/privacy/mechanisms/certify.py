"""Derive the privacy event of one release from the blocks of a plan.

Write ``n_l = bound_l stretch_l`` for the largest norm that one sample can have in the release
coordinates of block ``l`` alone, and ``s_l`` for its noise scale. The blocks of a clip group share
one bound, which a sample may spend on any of them; every group has its own:

    Gaussian   mu^2       = sum over groups of max over its blocks (n_l / s_l)^2
    Laplace    1 / (b/C1) = sum over groups of max over its blocks  n_l / s_l       (L1 norms)

*Proof.* In coordinates divided by each block's ``s_l`` the noise is standard. There a sample's
contribution to a group is at most ``max_l (stretch_l / s_l)`` times its clip norm; for L2 norms the
squares of groups add, for L1 norms the norms themselves. A linear map of a clipped gradient is such
a contribution, whatever its ``stretch``; what is done to the noisy values is post-processing.

A block without noise, without a bound or with an unprotected direction makes the whole release
non-private, and so does a multiplier below 2^-4, where the noise laws are not certified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from ...base.errors import InvalidInput
from ...base.laws import SCALE_UNITS
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import MIN_NOISE_MULTIPLIER
from .plan import Block

ROUNDING_STEP = 2.0**-16
"""Stochastic rounding with 16 bits moves a coordinate's mean by less than this many units."""

_LEAST = MIN_NOISE_MULTIPLIER * (1 - 2.0**-16)
"""The least multiplier, less what rounding takes from one that was asked for."""


def gaussian_spec(
    blocks: Sequence[Block], arithmetic: str, dimension: int | None = None
) -> EventSpec:
    """Return the Gaussian event of one release of these blocks.

    Args:
        blocks: of a plan.
        arithmetic: ``exact``: integer bounds, ``stretch`` 1 and one lattice unit per clip group;
            ``float``: real-number sums, whose rounding to the lattice adds 2^-36 sqrt(d) to mu.
        dimension: d. None takes the blocks' own number of coordinates.

    Raises:
        InvalidInput: blocks that integer sums cannot hold.
    """
    if why_not(blocks):
        return events.non_private()
    if arithmetic == "exact":
        multiplier = exact_multiplier([_exact_bound(group) for group in _groups(blocks)])
    else:
        ratios = [_worst(group) for group in _groups(blocks)]
        multiplier = float_multiplier(ratios, _dimension(blocks, dimension))
    return events.gaussian(multiplier) if multiplier >= _LEAST else events.non_private()


def laplace_spec(
    blocks: Sequence[Block], arithmetic: str, dimension: int | None = None
) -> EventSpec:
    """Return the Laplace event of one release of these blocks; bounds are L1 norms.

    Args and errors as in ``gaussian_spec``; rounding of float sums adds 2^-36 d.
    """
    if why_not(blocks):
        return events.non_private()
    if arithmetic == "exact":
        total = sum(_exact_bound(group) for group in _groups(blocks))
        multiplier = SCALE_UNITS / total
        if Fraction(multiplier) * total > SCALE_UNITS:
            multiplier = math.nextafter(multiplier, 0)
    else:
        mu = math.fsum(bound / scale for bound, scale in map(_worst, _groups(blocks)))
        mu += ROUNDING_STEP / SCALE_UNITS * _dimension(blocks, dimension)
        multiplier = (1 - 2.0**-48) / mu
    return events.laplace(multiplier) if multiplier >= _LEAST else events.non_private()


def why_not(blocks: Sequence[Block]) -> str:
    """Return why a release of these blocks is not private; empty if every one is protected."""
    for block in blocks:
        if block.noise_scale == 0:
            return f"parameter {block.index} is released without noise"
        if math.isinf(block.bound * block.sensitivity_factor):
            return f"no bound limits what one sample does to parameter {block.index}"
        if block.release is not None and not block.release.covers_all_directions:
            return f"parameter {block.index} has directions without noise"
    return ""


def exact_multiplier(integer_bounds: Sequence[int]) -> float:
    """Return 2^20 / sqrt(sum M_l^2), rounded down: noise / contribution on the integer lattice."""
    squares = sum(bound * bound for bound in integer_bounds)
    # floor(2^k sqrt(2^40 / S)) / 2^k with integers only; 2^60 keeps more digits than a float.
    scaled = math.isqrt(SCALE_UNITS**2 * (1 << 120) // squares)
    value = scaled / (1 << 60)
    return value if Fraction(value) * (1 << 60) <= scaled else math.nextafter(value, 0)


def float_multiplier(ratios: Sequence[tuple[float, float]], dimension: int) -> float:
    """Return 1 / (sqrt(sum (C_l / sd_l)^2) + 2^-36 sqrt(d)), rounded down.

    This is for float sums that are rounded to u.

    Args:
        ratios: ``(C, sd)`` per clip group.
        dimension: number of coordinates ``d``; rounding adds ``2^-16 sqrt(d) u`` to the norm.
    """
    mu = math.sqrt(math.fsum((bound / sd) ** 2 for bound, sd in ratios))
    mu += ROUNDING_STEP / SCALE_UNITS * math.sqrt(dimension)
    return (1 - 2.0**-48) / mu


def lattice_bound(bound: float, sd: float) -> int:
    """Return M, the largest integer with ``M sd / 2^20 <= bound``.

    Raises:
        InvalidInput: it is 0: nothing of a sample would be left.
    """
    block = Block(shape=(), clip_group=0, bound=bound, noise_scale=sd)
    integers = block.integer_bound
    if not integers:
        raise InvalidInput(
            "max_grad_norm",
            expected=f"bounds of at least one lattice unit, {block.unit}",
            got=bound,
            remedy="Raise this layer's bound or lower the noise multiplier.",
        )
    return integers


def _groups(blocks: Sequence[Block]) -> list[list[Block]]:
    members: dict[int, list[Block]] = {}
    for block in blocks:
        members.setdefault(block.clip_group, []).append(block)
    return [members[group] for group in sorted(members)]


def _worst(group: Sequence[Block]) -> tuple[float, float]:
    """Return ``(norm, scale)`` of the block that one sample moves most, in units of its noise."""
    worst = max(group, key=lambda block: block.bound * block.sensitivity_factor / block.noise_scale)
    return worst.bound * worst.sensitivity_factor, worst.noise_scale


def _exact_bound(group: Sequence[Block]) -> int:
    """Return M of a clip group whose samples are clipped as integers of one unit."""
    first = group[0]
    for block in group:
        norm = "release" if block.release is None else block.release.norm
        if (
            block.sensitivity_factor != 1
            or block.noise_scale != first.noise_scale
            or norm != "release"
        ):
            raise InvalidInput(
                "arithmetic",
                expected="'float' where clip norm and release norm differ, or noise differs "
                "within a clip group",
                got=f"'exact' with sensitivity factor {block.sensitivity_factor:g}, norm {norm!r}, "
                f"noise scale {block.noise_scale:g}",
                remedy="Use arithmetic='float', or a clip norm on the released coordinates.",
            )
    return lattice_bound(first.bound, first.noise_scale)


def _dimension(blocks: Sequence[Block], dimension: int | None) -> int:
    return max(1, sum(block.size for block in blocks)) if dimension is None else dimension
