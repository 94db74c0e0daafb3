"""Check from the yielded indices whether batches were drawn as the accounting says.

A sum of independent 0-1 draws of chance ``p`` has ``m`` successes in ``n`` or a count further from
``n p`` on that side with probability at most

    exp(-n KL(m/n || p)),        KL(a || p) = a log(a/p) + (1-a) log((1-a)/(1-p))

(Chernoff; by Hoeffding, Probability inequalities for sums of bounded random variables, 1963,
theorem 4, for draws without replacement too). A batch law fails a check when such a bound, times
twice the number of counts that the checks examined, is below 1 - confidence: all checks of one
call together accuse a sound sampler with at most that probability.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.errors import InvalidInput
from ..base.validate import choice, integer, open_unit, probability, require
from .findings import Check

LAWS = ("poisson", "fixed", "shuffled")
_LEVELS = (0.01, 0.25, 0.5, 0.75, 0.99)
"""Probabilities at which the ranges of counts end."""


@dataclass(frozen=True)
class _Batches:
    """The yielded batches, and the level of a check."""

    rows: tuple[tuple[int, ...], ...]
    records: int
    rate: float
    level: float

    @property
    def epoch(self) -> int:
        """The number of batches in which a shuffled record appears once."""
        return max(1, math.floor(1 / self.rate * (1 + 1e-12)))


def of_loader(loader: Any, epochs: int) -> list[tuple[int, ...]]:
    """Return the indices that a torch ``DataLoader`` draws in some epochs; no record is read.

    A ``PrivateLoader`` yields physical batches: pass its ``batches`` to ``checks`` instead.

    Raises:
        InvalidInput: a loader without a batch sampler of indices.
    """
    integer(minimum=1, epochs=epochs)
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None:
        raise InvalidInput(
            "loader",
            expected="a DataLoader with a batch_sampler",
            got=type(loader).__name__,
            remedy="Pass the batches of indices themselves to checks().",
        )
    return [tuple(int(i) for i in batch) for _ in range(epochs) for batch in sampler]


def checks(
    batches: Iterable[Iterable[int]],
    *,
    law: str,
    records: int,
    sample_rate: float,
    confidence: float = 0.999,
) -> tuple[Check, ...]:
    """Compare batches of indices with a declared law.

    Args:
        batches: batches in the order in which they were drawn, empty ones included.
        law: ``poisson``, ``fixed`` or ``shuffled``, as in ``accounting``.
        records: size of the data set; indices are ``0 .. records - 1``.
        sample_rate: declared expected batch size / records.
        confidence: probability that a sound sampler passes all checks.

    Raises:
        InvalidInput: no batches, an argument out of range, or batches of a fixed size with a rate
            that is no whole number of records.
    """
    choice(LAWS, law=law)
    integer(minimum=1, records=records)
    probability(sample_rate=sample_rate)
    open_unit(confidence=confidence)
    rows = tuple(tuple(int(i) for i in batch) for batch in batches)
    if not rows:
        raise InvalidInput(
            "batches",
            expected="at least one batch",
            got="none",
            remedy="Draw at least one batch first.",
        )
    size = round(sample_rate * records)
    if law == "fixed" and abs(sample_rate * records - size) > 1e-6 * size:
        raise InvalidInput(
            "sample_rate",
            expected="batch size / records for a whole batch size",
            got=f"{sample_rate} of {records} records = {sample_rate * records}",
            remedy="Pass the rate that is accounted for batches of one size.",
        )
    asked = {"poisson": 6, "fixed": 3, "shuffled": 1}[law]
    drawn = _Batches(rows, records, sample_rate, (1 - confidence) / asked)
    common = (_indices(drawn), _once_in_a_batch(drawn))
    if common[0].passed is False:
        return common
    if law == "poisson":
        return (
            *common,
            _total(drawn),
            _sizes(drawn),
            _counts(drawn),
            _each_record(drawn),
            _coverage(drawn),
            _neighbours(drawn),
        )
    same = _fixed_size(drawn)
    if law == "fixed":
        return (*common, same, _each_record(drawn), _neighbours(drawn), _same_batches(drawn))
    return (*common, same, _once_in_an_epoch(drawn))


def _check(name: str, passed: bool | None, text: str, **numbers: float | int | str) -> Check:
    return Check(layer="plan", name=f"sampler: {name}", passed=passed, text=text, numbers=numbers)


def log_chance(count: float, trials: float, chance: float) -> float:
    """Return the log of the bound ``exp(-n KL)`` on a count this far from ``n p``; 0 at ``n p``."""
    share = count / trials
    if share == chance:
        return 0.0
    if not 0 < chance < 1:
        return -math.inf
    terms = 0.0
    if share > 0:
        terms += share * math.log(share / chance)
    if share < 1:
        terms += (1 - share) * math.log((1 - share) / (1 - chance))
    return -trials * max(terms, 0.0)


def _judge(
    drawn: _Batches,
    name: str,
    what: str,
    counts: Sequence[tuple[str, float, float, float]],
    looked_at: int = 0,
) -> Check:
    """Judge the most surprising of some counts ``(label, count, trials, chance)``.

    ``looked_at``: how many counts these were chosen from, if from more.
    """
    if not counts:
        return _check(name, None, f"too few batches to look at {what}")
    worst = min(counts, key=lambda each: log_chance(*each[1:]))
    label, count, trials, chance = worst
    log_p = log_chance(count, trials, chance) + math.log(2 * max(looked_at, len(counts)))
    text = f"{what}: {label}{count:g} of {trials:g}, expected {trials * chance:.6g}"
    passed = log_p >= math.log(drawn.level)
    return _check(name, passed, text, count=count, expected=trials * chance, log_chance=log_p)


def _indices(drawn: _Batches) -> Check:
    wrong = [i for row in drawn.rows for i in row if not 0 <= i < drawn.records]
    text = f"indices are 0 .. {drawn.records - 1}"
    return _check("indices", not wrong, text if not wrong else f"{wrong[0]} is no record's index")


def _once_in_a_batch(drawn: _Batches) -> Check:
    """Check that no record is twice in a batch, where it would count for twice its bound."""
    for place, row in enumerate(drawn.rows):
        if len(set(row)) < len(row):
            index, times = Counter(row).most_common(1)[0]
            text = f"record {index} is {times} times in batch {place}: drawn with replacement"
            return _check("once in a batch", False, text)
    return _check("once in a batch", True, "no record is twice in a batch")


def _total(drawn: _Batches) -> Check:
    """Compare all draws together with the declared rate."""
    count = sum(len(row) for row in drawn.rows)
    trials = drawn.records * len(drawn.rows)
    return _judge(drawn, "rate", "records drawn", [("", count, trials, drawn.rate)])


def _sizes(drawn: _Batches) -> Check:
    """Check that batch sizes spread as binomial ones; fixed sizes all fall into one range."""
    looked = _spread([len(row) for row in drawn.rows], drawn.records, drawn.rate)
    return _judge(drawn, "batch sizes", "batches", looked)


def _counts(drawn: _Batches) -> Check:
    """Check that the records' counts spread as binomial ones: none is left out."""
    counts = Counter(i for row in drawn.rows for i in row)
    looked = _spread([counts[i] for i in range(drawn.records)], len(drawn.rows), drawn.rate)
    return _judge(drawn, "counts", "records drawn so often", looked)


def _spread(
    values: Sequence[int], trials: int, rate: float
) -> list[tuple[str, float, float, float]]:
    """Return how many of some independent binomial counts fall into each range."""
    cuts, chances = _ranges(trials, rate)
    found = Counter(sum(value > cut for cut in cuts) for value in values)
    return [
        (f"{_named(cuts, k)}: ", float(found[k]), float(len(values)), chance)
        for k, chance in enumerate(chances)
    ]


def _each_record(drawn: _Batches) -> Check:
    """Check that every record is drawn as often as the others."""
    counts = Counter(i for row in drawn.rows for i in row)
    steps = float(len(drawn.rows))
    often = max(range(drawn.records), key=lambda i: counts[i])
    seldom = min(range(drawn.records), key=lambda i: counts[i])
    looked = [(f"record {i} in ", float(counts[i]), steps, drawn.rate) for i in (often, seldom)]
    return _judge(
        drawn, "each record", "batches that hold a record", looked, looked_at=drawn.records
    )


def _coverage(drawn: _Batches) -> Check:
    """Check how many records an epoch's worth of batches holds exactly once; a permutation: all."""
    length = drawn.epoch
    windows = len(drawn.rows) // length
    if not windows or length == 1:
        return _judge(drawn, "coverage", "an epoch", [])
    once = 0
    for start in range(0, windows * length, length):
        counts = Counter(i for row in drawn.rows[start : start + length] for i in row)
        once += sum(1 for times in counts.values() if times == 1)
    chance = length * drawn.rate * (1 - drawn.rate) ** (length - 1)
    what = f"records that {length} batches in a row hold exactly once"
    return _judge(
        drawn, "coverage", what, [("", float(once), float(drawn.records * windows), chance)]
    )


def _neighbours(drawn: _Batches) -> Check:
    """Check what two batches have in common, next to each other and an epoch apart."""
    sets = [frozenset(row) for row in drawn.rows]
    looked = []
    for lag in sorted({1, drawn.epoch}):
        # Disjoint pairs are independent: blocks of 2 lag batches, the first half with the second.
        firsts = [
            t
            for block in range(0, len(sets) - lag, 2 * lag)
            for t in range(block, min(block + lag, len(sets) - lag))
        ]
        if not firsts:
            continue
        both = sum(len(sets[t] & sets[t + lag]) for t in firsts)
        chance = drawn.rate**2
        looked.append((f"{lag} apart: ", float(both), float(drawn.records * len(firsts)), chance))
    return _judge(drawn, "independent batches", "records that two batches share", looked)


def _ranges(trials: int, rate: float) -> tuple[list[int], list[float]]:
    """Return upper ends of ranges of a binomial count between ``_LEVELS``, and their chances."""
    # What lies beyond 40 deviations belongs to the last range.
    mean = trials * rate
    reach = 40 * math.sqrt(mean * (1 - rate)) + 40
    counts = np.arange(max(0, math.floor(mean - reach)), min(trials, math.ceil(mean + reach)) + 1)
    below = require("scipy.special").bdtr(counts, trials, rate)
    ends = np.unique(np.searchsorted(below, _LEVELS))
    return counts[ends].tolist(), np.diff(below[ends], prepend=0.0, append=1.0).tolist()


def _named(cuts: Sequence[int], k: int) -> str:
    low = 0 if k == 0 else cuts[k - 1] + 1
    return f"from {low} to {cuts[k]}" if k < len(cuts) else f"from {low}"


def _fixed_size(drawn: _Batches) -> Check:
    size = round(drawn.rate * drawn.records)
    other = [len(row) for row in drawn.rows if len(row) != size]
    text = f"every batch has {size} records"
    return _check("size", not other, text if not other else f"a batch of {other[0]}, not {size}")


def _same_batches(drawn: _Batches) -> Check:
    """Look for two equal batches among subsets that are far too many for that."""
    size = round(drawn.rate * drawn.records)
    log_subsets = (
        math.lgamma(drawn.records + 1)
        - math.lgamma(size + 1)
        - math.lgamma(drawn.records - size + 1)
    )
    pairs = len(drawn.rows) * (len(drawn.rows) - 1) / 2
    equal = len(drawn.rows) - len({frozenset(row) for row in drawn.rows})
    if pairs == 0 or math.log(pairs) - log_subsets > math.log(drawn.level):
        return _check("repeats", None, "equal batches are no surprise with so few records")
    return _check("repeats", equal == 0, f"{equal} batches repeat an earlier one")


def _once_in_an_epoch(drawn: _Batches) -> Check:
    """Check that a record comes at most once per epoch, for which one release is counted."""
    for start in range(0, len(drawn.rows), drawn.epoch):
        counts = Counter(i for row in drawn.rows[start : start + drawn.epoch] for i in row)
        index, times = counts.most_common(1)[0] if counts else (0, 0)
        if times > 1:
            where = f"batches {start} to {start + drawn.epoch - 1}"
            text = f"record {index} is in {times} of {where}, which are one epoch"
            return _check("once in an epoch", False, text)
    return _check("once in an epoch", True, "no record is twice in an epoch")
