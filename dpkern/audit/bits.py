"""Layer 4 on outputs: detect what the low bits of released numbers reveal.

A floating-point sum of data and noise lies on a grid that depends on the data: near 0 the numbers
are closer together than near 1. The event "the output is no multiple of 2^-24" then has a positive
probability under one input and none under its neighbour, whatever the noise distribution. Noise on
a lattice that is fixed beforehand has no such event.

Sources: Mironov, On significance of the least significant bits for differential privacy, 2012;
Haney et al., Precision-based attacks and interval refining, 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base import validate as check
from ..base.errors import InvalidInput
from .findings import Check
from .noise_reuse import repeats
from .subject import Pair

LAYER = "bits"
EVERY_GRID = 2048.0
"""The exponent of zero, infinities and NaN, above any exponent of a float: they fit every grid."""

_FORMATS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
"""The integer dtype of the bits, the fraction's width, and the exponent's bias."""


def grid_exponent(values: torch.Tensor) -> torch.Tensor:
    """Return the largest e for which each value is a multiple of 2^e, float64 of the same shape.

    It is the exponent of the lowest set bit; ``EVERY_GRID`` for zeros, infinities and NaN.

    Args:
        values: floats or integers. float16 and bfloat16 are exact in float32.

    Raises:
        InvalidInput: complex numbers or truth values.
    """
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    if values.is_complex() or values.dtype is torch.bool:
        raise InvalidInput(
            "values",
            expected="floats or integers",
            got=str(values.dtype),
            remedy="Pass torch.view_as_real(values) for complex numbers.",
        )
    if not values.is_floating_point():
        whole = values.long()
        return _lowest(whole, torch.zeros_like(whole), whole == 0)
    bits_type, fraction, bias = _FORMATS[values.dtype]
    bits = values.contiguous().view(bits_type).long()
    stored = bits & ((1 << fraction) - 1)
    exponent = (bits >> fraction) & (2 * bias + 1)
    normal = exponent > 0
    significand = torch.where(normal, stored | (1 << fraction), stored)
    unit = torch.where(normal, exponent, 1) - bias - fraction
    return _lowest(significand, unit, (significand == 0) | ~torch.isfinite(values))


def _lowest(whole: torch.Tensor, unit: torch.Tensor, any_grid: torch.Tensor) -> torch.Tensor:
    """Return ``unit`` plus the place of the lowest set bit of ``whole``."""
    # A power of two, whose logarithm is exact; -2^63 is its own lowest bit.
    place = torch.log2((whole & -whole).double().abs())
    return torch.where(any_grid, EVERY_GRID, place + unit.double())


@dataclass(frozen=True)
class Precision:
    """A score: the exponent of the finest bit that some coordinate of a run has set.

    Attributes:
        coordinates: coordinates that are examined. None selects all of them.
    """

    coordinates: tuple[int, ...] | None = None

    def __call__(self, released: torch.Tensor) -> torch.Tensor:
        """Return scores float64 ``[runs]``; a coarse grid says "present"."""
        seen = released if self.coordinates is None else released[:, list(self.coordinates)]
        return grid_exponent(seen).amin(dim=1)


def precision_pairs(
    without: Any, present: Any, *, coordinates: Sequence[int] | None = None, name: str = "precision"
) -> tuple[Pair, ...]:
    """Return the neighbour pair with the score of the precision attack, both ways round.

    Which side has the coarser grid is not known beforehand: a canary on sums of zero makes it
    coarser, one that cancels a sum makes it finer.

    Args:
        without, present: the pair's inputs for the subject's ``release``.
        coordinates: coordinates that the canary moves. None examines all.
        name: name of the pairs.
    """
    score = Precision(None if coordinates is None else tuple(coordinates))
    given: dict[str, Any] = {"score": score, "layer": LAYER}
    return (
        Pair(name=name, without=without, present=present, **given),
        Pair(name=f"{name}, exchanged", without=present, present=without, **given),
    )


def lattice(released: torch.Tensor, cell: float | torch.Tensor, *, name: str = "lattice") -> Check:
    """Whether every released float is ``fl(k fl(cell))`` for a whole number k.

    Args:
        released: ``[runs, d]`` float32 or float64; integers count cells and always pass.
        cell: output cell, one for all coordinates or one for each ``[d]``.

    Raises:
        InvalidInput: another dtype, or a cell that is not a positive number.
    """
    if not released.is_floating_point() and not released.is_complex():
        return Check(
            layer=LAYER,
            name=name,
            passed=True,
            text=f"{released.numel()} integers",
            numbers={"values": released.numel(), "off": 0},
        )
    check.choice(tuple(_FORMATS), dtype=released.dtype)
    width = torch.as_tensor(cell, dtype=torch.float64).to(released.dtype)
    if not bool(torch.isfinite(width).all() & (width > 0).all()):
        raise InvalidInput(
            "cell",
            expected="positive numbers of the released dtype",
            got=f"{float(width.min())} .. {float(width.max())}",
            remedy="Pass scale / 64, the output cell of dpkern's noise.",
        )
    k = torch.round(released.double() / width.double())
    # The product is the one that the release itself ended with.
    off = released != k.to(released.dtype) * width
    count = int(off.sum())
    text = f"{released.numel()} values, {count} of them no multiple of the cell"
    if count:
        first = released[off][0].item()
        text += f", such as {float(first).hex()}"
    return Check(
        layer=LAYER,
        name=name,
        passed=count == 0,
        text=text,
        numbers={"values": released.numel(), "off": count},
    )


def uniform_low_bits(
    integers: torch.Tensor, *, bits: int, level: float = 1e-9, name: str = "low bits"
) -> Check:
    """Run chi-square tests of the lowest bits: all values together, and coordinate by coordinate.

    Args:
        integers: ``[runs, d]`` draws, or released counts of cells.
        bits: number of bits that must be uniform, 1 to 16; ``LOW_BITS`` for counts of cells.
        level: probability that sound bits fail, all tests together.
        name: name of the check.

    Raises:
        InvalidInput: no integers, or a number out of range.
    """
    if integers.is_floating_point() or integers.is_complex() or integers.dtype is torch.bool:
        raise InvalidInput(
            "integers",
            expected="integers",
            got=str(integers.dtype),
            remedy="Divide released floats by their cell and round.",
        )
    check.integer(1, 16, bits=bits)
    check.probability(level=level)
    buckets = 1 << bits
    rows = integers.reshape(len(integers), -1)
    low = (rows & (buckets - 1)).long()
    if low.numel() < 20 * buckets:
        return _not_asked(name, f"{low.numel()} values, too few for {bits} bits")
    tests = [_chi_square(torch.bincount(low.flatten(), minlength=buckets).double())]
    if low.shape[1] > 1 and len(low) >= 20 * buckets:
        columns = torch.arange(low.shape[1]) * buckets
        counts = torch.bincount((low + columns).flatten(), minlength=buckets * low.shape[1])
        tests += [_chi_square(each) for each in counts.double().view(low.shape[1], buckets)]
    least = min(tests)
    return Check(
        layer=LAYER,
        name=name,
        passed=least * len(tests) >= level,
        text=f"the lowest {bits} bits of {low.numel()} values: least p {least:.2g} of "
        f"{len(tests)} chi-square tests",
        numbers={"values": low.numel(), "bits": bits, "tests": len(tests), "least_p": least},
    )


LOW_BITS = {"gaussian": 4, "laplace": 2}
"""The low bits of a count of cells that noise of 64 cells makes uniform.

Probabilities differ by less than 4e-5 (Gaussian) or 2e-4 (Laplace) of themselves, which tests of
10^7 values cannot see.
"""


def cells(released: torch.Tensor, cell: float | torch.Tensor) -> torch.Tensor:
    """Return released floats as whole cells, int64; integers stay as they are.

    Args:
        released: ``[runs, d]`` values that ``lattice`` passes.
        cell: output cell, as for ``lattice``.
    """
    if not released.is_floating_point():
        return released.long()
    width = torch.as_tensor(cell, dtype=torch.float64).to(released.dtype)
    return torch.round(released.double() / width.double()).long()


def lattice_noise(
    released: torch.Tensor, cell: float | torch.Tensor = 1.0, *, law: str = "gaussian"
) -> tuple[Check, ...]:
    """Check released lattice noise: on the lattice, low bits uniform, nothing repeated.

    Args:
        released: ``[runs, d]`` releases of zeros; 10^4 runs of 32 coordinates ask every question.
        cell: scale / 64 for floats.
        law: ``gaussian`` or ``laplace``.
    """
    bits = LOW_BITS[check.choice(tuple(LOW_BITS), law=law)]
    on = lattice(released, cell)
    if on.passed is False:
        return (on,)
    counted = cells(released, cell)
    return (on, uniform_low_bits(counted, bits=bits), *repeats(counted))


def _chi_square(counts: torch.Tensor) -> float:
    """Return the probability that uniform counts are spread at least as much."""
    expected = counts.sum() / len(counts)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def _not_asked(name: str, why: str) -> Check:
    return Check(layer=LAYER, name=name, passed=None, text=why)


__all__ = [
    "EVERY_GRID",
    "LAYER",
    "Precision",
    "cells",
    "grid_exponent",
    "lattice",
    "lattice_noise",
    "precision_pairs",
    "uniform_low_bits",
]
