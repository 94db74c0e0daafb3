"""Randomized response: every symbol is kept with a probability known to the last bit.

A random word has 2^64 values: ``keep`` of them keep the symbol, and ``width`` give each of the
k - 1 others (the last one also takes the fewer than k - 1 that are left):

    keep = the largest T with T <= e^epsilon w(T),     width = w(T) = floor((2^64 - T) / (k - 1))

so that ``keep / width <= e^epsilon`` exactly, with ``e^epsilon`` replaced by a rational number
below it; nothing is rounded in between. The printed channel, ``e^epsilon / (e^epsilon + k - 1)``
for the symbol and ``1 / (e^epsilon + k - 1)`` for each other, is met to ``k 2^-63``.

Reference: lecture notes on private projected SGD, subsampling and local differential privacy;
Warner, Randomized Response, 1965; Kairouz, Oh and Viswanath, 2014, for k categories.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import torch

from ...base.errors import InvalidInput
from ...base.phase import LEARN, NOISE, phase
from ...base.rng import Key, Purpose, Stream
from ...base.validate import choice, integer, positive
from ...ops import symbols
from ..accounting import events, shown_bound
from ..accounting.events import EventSpec
from ._statement import MODES
from .examples import FEATURE, Audit, Example
from .labels import LabelMechanism
from .run_facts import RunFacts
from .work import OpAccount

MIN_EPSILON, MAX_EPSILON = 2.0**-20, 32.0
"""The range of epsilon. Below, 64-bit words hold the probabilities too coarsely; above, another
symbol has too few of them."""

_WORDS = 1 << 64
_FIXED_POINT = 256


@dataclass(frozen=True, kw_only=True)
class RandomizedResponse(LabelMechanism):
    """The randomized response mechanism on binary or k-ary symbols.

    It acts on symbols, not on gradients: ``randomize`` releases them once, and whatever is computed
    from them afterwards costs nothing more. One symbol per record.

    Args:
        epsilon: of one symbol, from 2^-20 to 32; pure, local, for replacing the record.
        categories: k, from 2 to 2^30.
        mode: both do the same; printed and corrected channel agree.

    Raises:
        InvalidInput: a field out of its range, or more categories than this epsilon can have.
    """

    name: ClassVar[str] = "randomized_response"
    title: ClassVar[str] = "Randomized response"
    source: ClassVar[str] = "Warner, 1965"
    examples: ClassVar[tuple[Example, ...]] = (
        Example({"epsilon": 1.0, "categories": lambda layer: max(2, layer.code)}),
    )
    audits: ClassVar[tuple[Audit, ...]] = (
        Audit(releases="response", fields={"epsilon": 1.0}, shapes=FEATURE, takes=("backend",)),
    )
    derived: ClassVar[tuple[str, ...]] = ("categories", "epsilon")
    budget: ClassVar[tuple[str, ...]] = MODES
    neighbouring: ClassVar[str] = "replace_one"

    epsilon: float
    categories: int = 2
    mode: str = "corrected"

    def __post_init__(self) -> None:
        choice(MODES, mode=self.mode)
        object.__setattr__(self, "epsilon", positive(epsilon=self.epsilon))
        if not MIN_EPSILON <= self.epsilon <= MAX_EPSILON:
            raise InvalidInput(
                "epsilon",
                expected="a number from 2^-20 to 32",
                got=self.epsilon,
                remedy="Choose one in this range: 64-bit words hold its probabilities.",
            )
        integer(2, symbols.MAX_CATEGORIES, categories=self.categories)
        # The remainder of 2^64 would make the last other symbol likelier than the symbol itself.
        if _WORDS - self.keep - (self.categories - 2) * self.width > self.keep:
            raise InvalidInput(
                "categories",
                expected=f"fewer, or another number, with epsilon={shown_bound(self.epsilon)}",
                got=self.categories,
                remedy="Raise epsilon: 64-bit words cannot hold so many equal probabilities.",
            )

    @cached_property
    def keep(self) -> int:
        """Number of the 2^64 words that keep the symbol."""
        lowest = _exp_below(self.epsilon)  # in units of 2^-256
        low, high = _WORDS // self.categories, _WORDS - self.categories + 1
        while low < high:
            middle = (low + high + 1) // 2
            width = symbols.alternative_width(middle, self.categories)
            if middle << _FIXED_POINT <= lowest * width:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def width(self) -> int:
        """Number of the 2^64 words for each other symbol but the last."""
        return symbols.alternative_width(self.keep, self.categories)

    @property
    def truth(self) -> float:
        """Probability of the symbol itself, p0."""
        return self.keep / _WORDS

    @property
    def lie(self) -> float:
        """Probability of each other symbol, q0."""
        return (_WORDS - self.keep) / (_WORDS * (self.categories - 1))

    def channel(self) -> list[list[Fraction]]:
        """Return exact probabilities; row x is the law of the response to x."""
        k = self.categories
        row = [Fraction(self.keep, _WORDS), *[Fraction(self.width, _WORDS)] * (k - 1)]
        row[-1] += 1 - sum(row)
        return [[row[(z - x) % k] for z in range(k)] for x in range(k)]

    @property
    def ldp_epsilon(self) -> float:
        """The true cost of one response, ``log(keep / width)``: at most ``epsilon``.

        The last other symbol has more words than the rest, and never more than the symbol itself:
        no other ratio is larger.
        """
        return math.log1p((self.keep - self.width) / self.width)

    def randomize(
        self, values: torch.Tensor, *, stream: Stream, position: int = 0, backend: str | None = None
    ) -> torch.Tensor:
        """Return the responses, a new tensor; see ``dpkern.ops.symbols.randomize``."""
        with phase(NOISE):
            return symbols.randomize(
                values,
                stream=stream,
                keep=self.keep,
                categories=self.categories,
                position=position,
                backend=backend,
            )

    def estimate(self, responses: torch.Tensor) -> torch.Tensor:
        """Return unbiased frequencies of the categories, float64 ``[k]``: ``(f - q0) / (p0 - q0)``.

        They sum to 1 and may be negative.

        Raises:
            InvalidInput: no responses, or one that is no category.
        """
        with phase(LEARN):
            counts = torch.bincount(responses.flatten().long(), minlength=self.categories)
            if not responses.numel() or len(counts) > self.categories:
                raise InvalidInput(
                    "responses",
                    expected=f"at least one, from 0 to {self.categories - 1}",
                    got=f"{responses.numel()} of {len(counts)} categories",
                    remedy="Pass what randomize() returned.",
                )
            shares = counts.double() / responses.numel()
            return (shares - self.lie) / (self.truth - self.lie)

    def variance(self, frequencies: Sequence[float], count: int) -> torch.Tensor:
        """Return the variance of ``estimate``, float64 ``[k]``, for ``count`` fixed records.

        A record of category v answers v with probability p0, any other with q0:
        ``(f p0 (1 - p0) + (1 - f) q0 (1 - q0)) / (count (p0 - q0)^2)``.
        """
        f = torch.tensor(frequencies, dtype=torch.float64)
        p, q = self.truth, self.lie
        spread = f * p * (1 - p) + (1 - f) * q * (1 - q)
        return spread / (integer(1, count=count) * (p - q) ** 2)

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return one response of one record, replace-one."""
        del dimension
        k = self.categories
        # The share of responses replaced by a uniform category, rounded down: never more private.
        replaced = float(k * Fraction(self.width, self.keep + (k - 1) * self.width))
        return {
            "event": events.RANDOMIZED_RESPONSE_EVENT,
            "noise_parameter": math.nextafter(replaced, 0),
            "num_buckets": k,
        }

    @classmethod
    def fields_of_run(cls, run: RunFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return one category for each label.

        Raises:
            InvalidInput: no epsilon.
        """
        if "epsilon" not in given:
            raise InvalidInput(
                "epsilon",
                expected="the epsilon of one response",
                got="none",
                remedy="Pass --epsilon; the probability of another symbol follows from it.",
            )
        return {"categories": run.classes}

    def count_response(self, work: OpAccount, records: int, dtype: torch.dtype) -> None:
        """Count one response of each record, and the estimate of the frequencies from them."""
        k = self.categories
        work.under(NOISE).op(
            "symbols.randomize",
            torch.empty((records,), dtype=dtype, device="meta"),
            stream=Key.from_unsafe_seed(0).stream(Purpose.SYMBOLS, 1),
            keep=self.keep,
            categories=k,
        )
        line = "frequencies"
        work = work.under(LEARN)
        if dtype is not torch.int64:
            work.each(line, records)
        work.counts(line, LOAD=records, ADD=records, STORE=k)
        work.converted(line, k, torch.int64, torch.float64)
        work.each(line, k, DIV=1)
        work.each(line, k, SUB=1)
        work.each(line, k, DIV=1)


def survey(
    mechanism: RandomizedResponse,
    answers: torch.Tensor,
    *,
    stream: Stream,
    repeats: int = 1,
) -> torch.Tensor:
    """Return estimated frequencies of repeated surveys of the same people, ``[repeats, k]``.

    They are float64.

    A simulator: every repeat would cost ``epsilon`` again.

    Raises:
        InvalidInput: answers that are no categories, or fewer than one repeat.
    """
    size = answers.numel()
    return torch.stack(
        [
            mechanism.estimate(
                mechanism.randomize(answers.contiguous(), stream=stream, position=number * size)
            )
            for number in range(integer(1, repeats=repeats))
        ]
    )


def _exp_below(x: float) -> int:
    """Return an integer of at most ``e^x 2^256``, by Taylor's series, each term rounded down."""
    exact = Fraction(x)
    term = total = 1 << _FIXED_POINT
    n = 0
    while term:
        n += 1
        term = term * exact.numerator // (exact.denominator * n)
        total += term
    return total
