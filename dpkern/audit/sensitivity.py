"""Layer 5: measure what one record can do to a sum, with adversarial records, without rounding.

A summation turns records ``[B, d]`` into the sum of their clipped contributions, before noise. The
claim is that one record moves it by at most ``bound`` in the p-norm, whatever it holds and whatever
the others hold. Norms are compared as exact rationals (``exact_norm``), because a float32 clip
exceeds its bound by some 1e-7 in about half of all cases, and adds up much worse where many small
squares meet a large one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..base.errors import DPKernError, InvalidInput
from ..base.validate import choice, integer, positive
from .exact_norm import power_sum
from .findings import Check

Summed = Callable[[Tensor], Tensor]
"""A function from records ``[B, d]`` to the sum of their clipped contributions, without noise."""

WIDTHS = (1, 3, 1000, 1 << 16)
LONG = 1 << 25
"""Equal entries at which a float32 sum of squares has stopped growing: 2^24 of them."""

_RECORDS = 24
_HUGE = Fraction(10) ** 300
"""A ceiling: squares of the largest floats are no floats."""


@dataclass(frozen=True, kw_only=True)
class Summation:
    """A sum and the claim about it.

    Attributes:
        summed: function of type ``Summed``; it is called often and must not keep anything between
            calls.
        bound: largest p-norm of one record's contribution, in units of the sum times ``unit``.
        p: 1 or 2.
        unit: lattice unit of an integer sum. None means that the sum is in the bound's units.
        widths: the d that records may have.
        dtype: dtype of the records.
        twice: the same sum after its backward pass, or its last batch, was given a second time; it
            must be rejected (a ``DPKernError``) or change nothing. None means that this cannot be
            tested.
        slack: part by which float sums may exceed the bound: 0 where the bound is exact.
    """

    summed: Summed
    bound: float
    p: int = 2
    unit: float | None = None
    widths: Sequence[int] = WIDTHS
    dtype: torch.dtype = torch.float32
    twice: Summed | None = None
    slack: float = 0.0

    def __post_init__(self) -> None:
        positive(bound=self.bound)
        choice((1, 2), p=self.p)
        if self.unit is not None:
            positive(unit=self.unit)
        for width in self.widths:
            integer(minimum=1, width=width)
        if not self.dtype.is_floating_point or not self.widths:
            raise InvalidInput(
                "dtype" if self.widths else "widths",
                expected="a floating dtype and at least one width",
                got=f"{self.dtype}, {list(self.widths)}",
                remedy="Pass dtype=torch.float32 and widths such as (16, 1000).",
            )

    @property
    def _most(self) -> Fraction:
        """The value bound^p in the sum's own units."""
        unit = Fraction(1) if self.unit is None else Fraction(self.unit)
        return (Fraction(self.bound) * (1 + Fraction(self.slack)) / unit) ** self.p

    def excess(self, contribution: Tensor) -> float:
        """Return norm / bound: above 1 if and only if it exceeds; infinite for NaN or infinity."""
        if contribution.dtype.is_floating_point and not bool(torch.isfinite(contribution).all()):
            return math.inf
        power = power_sum(contribution, self.p)
        ratio = float(min(power / self._most, _HUGE)) ** (1 / self.p)
        # The rounding of the root must not hide an excess, nor make one.
        over = power > self._most
        return float(max(ratio, math.nextafter(1, 2)) if over else min(ratio, 1.0))


def checks(summation: Summation, *, quick: bool = True, seed: int = 0) -> tuple[Check, ...]:
    """Run every check of this layer.

    Args:
        summation: sum to check.
        quick: leave out a record of 2^25 equal entries (seconds, and 1 GiB), which is only asked
            where the widths are the usual ones.
        seed: seed of the ordinary records among the adversarial ones.
    """
    return (
        _bounded(summation, quick or tuple(summation.widths) != WIDTHS, seed),
        _not_finite(summation, seed),
        _empty(summation),
        _remove_one(summation, seed),
        _order(summation, seed),
        _chunks(summation, seed),
        _repeated(summation, seed),
        _given_twice(summation, seed),
    )


def adversarial_records(
    width: int, bound: float, p: int, dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield records ``[d]`` that clips get wrong, by name; all finite.

    ``bound``: the one that they are just below, on and above.
    """
    info = torch.finfo(dtype)
    one = torch.ones(width, dtype=torch.float64)
    length = width ** (1 / p)
    yield "zeros", torch.zeros(width, dtype=dtype)
    yield "negative zeros", -torch.zeros(width, dtype=dtype)
    yield "denormals", torch.full((width,), info.smallest_normal / 4, dtype=dtype)
    yield "smallest normals", torch.full((width,), info.smallest_normal, dtype=dtype)
    yield "1e38", torch.full((width,), min(1e38, info.max), dtype=dtype)
    yield "largest floats", torch.full((width,), info.max, dtype=dtype)
    yield "equal entries", torch.ones(width, dtype=dtype)
    for name, factor in (("below", 1 - 1e-7), ("on", 1.0), ("above", 1 + 1e-7), ("over", 1.5)):
        yield f"equal entries {name} the bound", (one * (bound * factor / length)).to(dtype)
    spike = torch.zeros(width, dtype=dtype)
    spike[width // 2] = min(1e30, info.max)
    yield "one huge entry", spike
    yield "one huge entry among ones", spike + 1
    # The square of a small entry is at most half a unit in the last place of the large one's.
    swallowed = torch.full((width,), math.sqrt(info.eps / 4), dtype=torch.float64)
    swallowed[0] = 1.0
    yield "small entries that a large one swallows", (swallowed * bound * 2).to(dtype)
    signs = one.clone()
    signs[1::2] = -1
    yield "alternating signs", (signs * bound).to(dtype)
    wide = torch.logspace(-30, 30, width, dtype=torch.float64).clamp(max=info.max)
    yield "sixty powers of ten", wide.to(dtype)
    if width <= 1 << 12:
        random = torch.randn(
            _RECORDS, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        for i, row in enumerate(random):
            yield f"random {i}", (row * (bound * 3 / float(row.norm(p=p)))).to(dtype)


def _check(name: str, passed: bool | None, text: str, **numbers: float | int | str) -> Check:
    return Check(layer="sensitivity", name=name, passed=passed, text=text, numbers=numbers)


def _bounded(summation: Summation, quick: bool, seed: int) -> Check:
    """Check the exact norm of every adversarial record's contribution."""
    worst, where, count, refused = 0.0, "none", 0, 0
    for name, record in _records(summation, quick, seed):
        try:
            ratio = summation.excess(summation.summed(record[None]))
        except DPKernError:
            refused += 1
            continue
        count += 1
        if ratio > worst:
            worst, where = ratio, f"{name}, d = {len(record)}"
    text = f"largest exact norm / bound of {count} records: {worst:.9g} ({where})"
    if refused:
        text += f"; {refused} were refused"
    return _check("bounded norm", worst <= 1 if count else None, text, worst=worst, records=count)


def _records(summation: Summation, quick: bool, seed: int) -> Iterator[tuple[str, Tensor]]:
    for width in summation.widths:
        yield from adversarial_records(width, summation.bound, summation.p, summation.dtype, seed)
    if not quick:
        yield "equal entries", torch.ones(LONG, dtype=summation.dtype)


def _ordinary(summation: Summation, count: int, seed: int) -> Tensor:
    """Return records ``[count, d]`` of norms around the bound."""
    width = min(summation.widths, key=lambda d: abs(d - 1000))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, width, dtype=torch.float64, generator=generator)
    norms = torch.linspace(0.1, 5, count, dtype=torch.float64) * summation.bound
    lengths = rows.norm(p=summation.p, dim=1)
    scaled: Tensor = rows * (norms / lengths)[:, None]
    return scaled.to(summation.dtype)


def _close(summation: Summation, one: Tensor, other: Tensor, terms: int) -> tuple[bool, float]:
    """Whether two sums of the same terms agree: integers exactly, floats up to their rounding."""
    if one.shape != other.shape or not _finite(one, other):
        return False, math.inf
    if not one.dtype.is_floating_point:
        return bool(torch.equal(one, other)), float((one - other).abs().max()) if one.numel() else 0
    gap = float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    # Each of the additions rounds a number of at most terms * bound.
    allowed = 4 * terms * terms * torch.finfo(one.dtype).eps * summation.bound
    return gap <= allowed, gap


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _not_finite(summation: Summation, seed: int) -> Check:
    """Check that a record of NaN or infinities is bounded, and does no harm to its neighbours."""
    name = "records that are not finite"
    others = _ordinary(summation, 3, seed)
    alone = summation.summed(others)
    for value in (math.nan, math.inf, -math.inf):
        for entries in ("one entry", "every entry"):
            record = others[:1].clone()
            record[0, : 1 if entries == "one entry" else None] = value
            what = f"{entries} {value}"
            try:
                ratio = summation.excess(summation.summed(record))
                moved = summation.summed(torch.cat((others, record))) - alone
            except DPKernError as error:
                return _check(name, None, f"{what}: the batch is refused: {error.expected}")
            if ratio > 1:
                return _check(name, False, f"{what}: norm / bound is {ratio:.6g}", worst=ratio)
            if not _finite(moved) or not _near_bound(summation, moved, 4):
                return _check(name, False, f"{what}: the sum of the other records is lost")
    return _check(name, True, "NaN and infinities are bounded and leave other records alone")


def _near_bound(summation: Summation, moved: Tensor, terms: int) -> bool:
    """Whether a difference of sums is within the bound: of floats, up to their rounding."""
    if not moved.dtype.is_floating_point:
        return summation.excess(moved) <= 1
    norm = float(moved.double().norm(p=summation.p)) * (summation.unit or 1.0)
    rounding = terms * terms * torch.finfo(summation.dtype).eps
    rounding *= math.sqrt(moved.numel()) if summation.p == 2 else moved.numel()
    return norm <= summation.bound * (1 + 4 * rounding)


def _empty(summation: Summation) -> Check:
    """Check that no records give zeros of the sum's shape."""
    name = "empty batch"
    records = _ordinary(summation, 2, 0)
    try:
        nothing = summation.summed(records[:0])
    except DPKernError as error:
        return _check(name, False, f"refused: {error.expected}; Poisson samples may be empty")
    shape = summation.summed(records).shape
    if nothing.shape != shape:
        return _check(name, False, f"shape {list(nothing.shape)} instead of {list(shape)}")
    zeros = _finite(nothing) and not bool(nothing.any())
    return _check(name, zeros, "zeros" if zeros else "the sum of no records is not zero")


def _remove_one(summation: Summation, seed: int) -> Check:
    """Check that a record changes the sum by its own contribution, which is bounded."""
    name = "remove one record"
    records = _ordinary(summation, 12, seed)
    whole = summation.summed(records)
    worst = 0.0
    for i in range(len(records)):
        rest = summation.summed(torch.cat((records[:i], records[i + 1 :])))
        own = summation.summed(records[i : i + 1])
        same, gap = _close(summation, whole - rest, own, len(records))
        worst = max(worst, gap)
        if not same:
            text = f"record {i} changes the sum by something else than its own contribution"
            return _check(name, False, f"{text}: they differ by {gap:.4g}", gap=gap)
    exact = not whole.dtype.is_floating_point
    text = "each record changes the sum by its own contribution"
    return _check(name, True, f"{text}, {'exactly' if exact else 'up to rounding'}", gap=worst)


def _order(summation: Summation, seed: int) -> Check:
    """Check that the order of the records does not matter."""
    records = _ordinary(summation, 12, seed)
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed))
    same, gap = _close(
        summation, summation.summed(records), summation.summed(records[order]), len(records)
    )
    text = "the sum does not depend on the order of the records"
    return _check("order", same, text if same else f"another order changes the sum by {gap:.4g}")


def _chunks(summation: Summation, seed: int) -> Check:
    """Check that sums of parts add up to the sum of the whole."""
    records = _ordinary(summation, 12, seed)
    parts = [summation.summed(part) for part in torch.split(records, 5)]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    same, gap = _close(summation, summation.summed(records), total, len(records))
    text = "sums of parts add up to the sum of the whole"
    return _check("parts of a batch", same, text if same else f"parts differ by {gap:.4g}")


def _repeated(summation: Summation, seed: int) -> Check:
    """Check that nothing is left from one call to the next."""
    records = _ordinary(summation, 4, seed)
    first = summation.summed(records).clone()
    summation.summed(records[:2])
    again = summation.summed(records)
    same = first.shape == again.shape and bool(torch.equal(first, again))
    text = "a second call with the same records gives the same bits"
    return _check(
        "repeated call", same, text if same else "a call leaves something behind for the next"
    )


def _given_twice(summation: Summation, seed: int) -> Check:
    """Check a backward pass, or a batch, that comes a second time before the release."""
    name = "batch given twice"
    if summation.twice is None:
        return _check(
            name, None, "no matter of a sum alone: what a trainer does is asked where it can be run"
        )
    record = _ordinary(summation, 2, seed)[1:]
    try:
        ratio = summation.excess(summation.twice(record))
    except DPKernError as error:
        return _check(name, True, f"refused: {error.expected}")
    text = f"one record given twice has norm / bound {ratio:.6g}"
    return _check(name, ratio <= 1, text, worst=ratio)
