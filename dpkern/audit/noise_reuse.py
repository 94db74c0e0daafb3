"""Layer 4 on outputs: detect noise that is used more than once.

Equal noise in two releases, in two coordinates, or at two places of a stream makes the noise's
covariance singular: some combination of released numbers has no noise at all. The checks look for
exact equalities of stretches that are so long that sound noise has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..base import validate as check
from ..base.errors import InvalidInput
from .findings import Check

LAYER = "bits"
COLLISION = 1 / 128
"""Bound on the probability of any noise value, and so of two being equal.

Gaussian noise of sd 64 cells: 1/160, and 1/227; Laplace noise of 64 cells: 1/130, and 1/256; floats
far less.
"""


def repeats(
    noise: torch.Tensor, *, level: float = 1e-9, collision: float = COLLISION
) -> list[Check]:
    """Whether runs, coordinates or stretches of the noise are equal.

    Args:
        noise: releases ``[runs, d]`` of data that is the same in every run and every coordinate,
            such as zeros; floats or integers.
        level: probability that sound noise fails, for each check.
        collision: bound on the probability of any single value.

    Returns:
        Three checks: no two runs are equal; no coordinate's noise is another one's, or its
        negative; no stretch of a run is found at another place of any run. A check is not asked
        (``passed`` None) where there are too few values for chance equalities to be excluded.

    Raises:
        InvalidInput: no matrix, or probabilities out of range.
    """
    check.probability(level=level)
    check.probability(collision=collision)
    if noise.dim() != 2 or noise.is_complex():
        raise InvalidInput(
            "noise",
            expected="a real matrix [runs, d]",
            got=f"{noise.dtype} {list(noise.shape)}",
            remedy="Flatten each release into one row.",
        )
    words = _words(noise)
    return [
        _equal_runs(words, level, collision),
        _equal_lanes(noise, level, collision),
        _equal_stretches(words, level, collision),
    ]


def _words(values: torch.Tensor) -> torch.Tensor:
    """Return the values' bits as int64; both zeros are one."""
    if not values.is_floating_point():
        return values.long()
    # Adding 0 makes -0 into 0.
    return (values.double() + 0.0).view(torch.int64)


def _needed(pairs: float, level: float, collision: float) -> int:
    """Return the length at which a chance equality of any of so many pairs is rare enough."""
    return max(1, math.ceil(math.log(max(pairs, 1.0) / level) / -math.log(collision)))


def _equal_runs(words: torch.Tensor, level: float, collision: float) -> Check:
    runs, d = words.shape
    name, needed = "equal runs", _needed(runs * runs / 2, level, collision)
    if d < needed:
        return _not_asked(name, f"{d} coordinates; {needed} are needed")
    found = _first_pair(_hashes(words), lambda i, j: bool(torch.equal(words[i], words[j])))
    text = f"no two of {runs} runs are equal"
    if found is not None:
        text = f"runs {found[0]} and {found[1]} of {runs} are equal"
    return _answer(name, found is None, text, runs=runs)


def _equal_lanes(noise: torch.Tensor, level: float, collision: float) -> Check:
    runs, d = noise.shape
    # Twice the pairs: of either sign.
    name, needed = "equal lanes", 1 + _needed(d * d, level, collision)
    if d < 2 or runs < needed:
        return _not_asked(name, f"{runs} runs of {d} coordinates; {needed} runs are needed")
    # Differences to the first run: the data are gone, exactly so for integers and on a lattice
    # of a power of two.
    moved = (noise if noise.is_floating_point() else noise.long())[1:] - noise[0]
    first = torch.sign(moved.gather(0, (moved != 0).to(torch.uint8).argmax(0, keepdim=True)))
    lanes = _words(moved * first).t().contiguous()
    found = _first_pair(_hashes(lanes), lambda i, j: bool(torch.equal(lanes[i], lanes[j])))
    text = f"no two of {d} coordinates have the same noise"
    if found is not None:
        text = f"coordinates {found[0]} and {found[1]} of {d} have the same noise, up to its sign"
    return _answer(name, found is None, text, coordinates=d)


def _equal_stretches(words: torch.Tensor, level: float, collision: float) -> Check:
    runs, d = words.shape
    name, needed = "equal stretches", _needed((runs * d) ** 2 / 2, level, collision)
    if d <= needed:
        return _not_asked(name, f"{d} coordinates; more than {needed} are needed")
    stretches = words.unfold(1, needed, 1)
    places = stretches.shape[1]

    def equal(i: int, j: int) -> bool:
        mine, other = stretches[i // places, i % places], stretches[j // places, j % places]
        return bool(torch.equal(mine, other))

    found = _first_pair(_hashes(words, needed).flatten(), equal)
    text = f"no {needed} values in a row come twice in {runs} runs of {d}"
    if found is not None:
        (a, at), (b, other) = divmod(found[0], places), divmod(found[1], places)
        text = (
            f"{needed} values from coordinate {at} of run {a} on come again from coordinate "
            f"{other} of run {b} on"
        )
    return _answer(name, found is None, text, runs=runs, coordinates=d, stretch=needed)


def _hashes(words: torch.Tensor, length: int | None = None) -> torch.Tensor:
    """Hash every row, or every stretch of this length ``[rows, places]``, by odd multipliers.

    ``sum_j m_j w_(i+j) mod 2^64``; equal stretches have equal hashes.
    """
    whole = length is None
    length = words.shape[1] if length is None else length
    generator = torch.Generator().manual_seed(length)
    factors = torch.randint(-(2**62), 2**62, (length,), generator=generator) * 2 + 1
    places = words.shape[1] - length + 1
    total = torch.zeros((len(words), places), dtype=torch.int64)
    for j, factor in enumerate(factors.tolist()):
        total += _mixed(words[:, j : j + places]) * factor
    return total.squeeze(1) if whole else total


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Mix high bits into low ones: floats of few digits differ in their high bits only."""
    return words ^ (words >> 29)


def _first_pair(hashes: torch.Tensor, equal: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """Return two places with equal hashes that are equal indeed, or None."""
    ordered, places = torch.sort(hashes, stable=True)
    same = torch.nonzero(ordered[1:] == ordered[:-1]).flatten().tolist()
    for at in same:
        i, j = int(places[at]), int(places[at + 1])
        if equal(i, j):
            return i, j
    return None


def _answer(name: str, passed: bool, text: str, **numbers: int) -> Check:
    return Check(layer=LAYER, name=name, passed=passed, text=text, numbers=numbers)


def _not_asked(name: str, why: str) -> Check:
    return Check(layer=LAYER, name=name, passed=None, text=why)


__all__ = ["COLLISION", "repeats"]
