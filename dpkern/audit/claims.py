"""Privacy claims as trade-off functions: least false negative rate for a false positive rate.

A test that tells two neighbouring inputs apart from the released values has a false positive rate
``a`` and a false negative rate ``b``. A claim ``f`` says ``b >= f(a)`` for every test:

    Gaussian     f(a) = Phi(Phi^-1(1 - a) - mu)
    Laplace      f(a) = F(F^-1(1 - a) - shift),    F the Laplace distribution of scale 1
    Approximate  f(a) = max(0, 1 - delta - e^eps a, e^-eps (1 - delta - a))
    Pure         delta = 0
    Nothing      f(a) = 0

``Claim.refuted_below`` turns a test's error rates into the weakest claim of the same family that
the test leaves standing. It is stronger than the claim exactly where the test contradicts the
claim, and both are converted to an epsilon by the same ``epsilon``: the two can stand side by side.

The numbers of a claim are those of the audited neighbours: under ``replace_one`` the distance is
that of two records.

Source: Dong, Roth and Su, Gaussian differential privacy, 2019, definitions 2.3 and 2.6,
proposition 2.5; lemma A.6 (Laplace).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..base.errors import PrivacyError
from ..base.renamed import old_names
from ..base.validate import non_negative
from ..privacy.accounting import events, shown_bound, shown_lower_bound
from ..privacy.accounting.shown import shown_exactly
from ..privacy.theory.gaussian import exact_epsilon
from .bounds import NORMAL, epsilon_lower, mu_lower


class Claim(ABC):
    """A claim about one call of a release."""

    @abstractmethod
    def tradeoff(self, false_positives: float) -> float:
        """Return the least false negative rate of a test with this false positive rate."""

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """Return the least epsilon that is claimed at ``delta``; infinite if nothing is."""

    @property
    @abstractmethod
    def number(self) -> float:
        """The parameter of the claim's family; a smaller one claims more."""

    @abstractmethod
    def refuted_below(self, fpr_upper: float, fnr_upper: float) -> Claim | None:
        """Return the largest claim of this family that a test with these error rates allows.

        The test contradicts every smaller claim of the family. None means that the family has one
        member, which nothing contradicts.
        """

    @abstractmethod
    def written(self, shown: Callable[[float], str]) -> str:
        """Return the claim in words, its number written by ``shown``."""

    @property
    def text(self) -> str:
        """The claim in words, its number rounded up."""
        return self.written(shown_bound)

    @property
    def lower_text(self) -> str:
        """The claim that a test leaves standing, in words: its number rounded down."""
        return self.written(shown_lower_bound)

    @property
    def mu(self) -> float | None:
        """The mu of a Gaussian claim; None for other claims."""
        return None


@dataclass(frozen=True)
class GaussianDP(Claim):
    """The claim that two neighbours are at least as hard to tell apart as N(0, 1) and N(mu, 1)."""

    distance: float

    def __post_init__(self) -> None:
        non_negative(distance=self.distance)

    @property
    def mu(self) -> float:
        """The distance between the two normal distributions."""
        return self.distance

    def tradeoff(self, false_positives: float) -> float:
        if not 0 < false_positives < 1:
            return 1.0 if false_positives <= 0 else 0.0
        return NORMAL.cdf(-NORMAL.inv_cdf(false_positives) - self.distance)

    def epsilon(self, delta: float) -> float:
        return exact_epsilon(1 / self.distance, delta) if self.distance > 0 else 0.0

    @property
    def number(self) -> float:
        return self.distance

    def refuted_below(self, fpr_upper: float, fnr_upper: float) -> GaussianDP:
        return GaussianDP(mu_lower(fpr_upper, fnr_upper))

    def written(self, shown: Callable[[float], str]) -> str:
        return f"mu {shown(self.distance)}"


@dataclass(frozen=True)
class Laplace(Claim):
    """The claim of Laplace noise: as hard as telling Laplace(0, 1) from the same, shifted."""

    shift: float

    def __post_init__(self) -> None:
        non_negative(shift=self.shift)

    def tradeoff(self, false_positives: float) -> float:
        a, spread = false_positives, math.exp(-self.shift)
        if a <= 0:
            return 1.0
        if a < spread / 2:
            return 1 - a / spread
        return spread / (4 * a) if a <= 0.5 else spread * (1 - a)

    def epsilon(self, delta: float) -> float:
        return max(0.0, self.shift + 2 * math.log1p(-delta))

    @property
    def number(self) -> float:
        return self.shift

    def refuted_below(self, fpr_upper: float, fnr_upper: float) -> Laplace:
        if fpr_upper + fnr_upper >= 1:
            return Laplace(0.0)
        return Laplace(-_laplace_quantile(fpr_upper) - _laplace_quantile(fnr_upper))

    def written(self, shown: Callable[[float], str]) -> str:
        return f"Laplace, epsilon {shown(self.shift)}"


@dataclass(frozen=True)
class ApproximateDP(Claim):
    """The claim of (epsilon, delta)-differential privacy."""

    bound: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        non_negative(bound=self.bound)
        non_negative(delta=self.delta)

    def tradeoff(self, false_positives: float) -> float:
        left = 1 - self.delta
        if self.bound > 700:  # exp overflows; the claim is as good as none
            return 0.0
        grown = math.exp(self.bound) * false_positives
        return max(0.0, left - grown, math.exp(-self.bound) * (left - false_positives))

    def epsilon(self, delta: float) -> float:
        return self.bound if delta >= self.delta else math.inf

    @property
    def number(self) -> float:
        return self.bound

    def refuted_below(self, fpr_upper: float, fnr_upper: float) -> ApproximateDP:
        return ApproximateDP(epsilon_lower(fpr_upper, fnr_upper, self.delta), self.delta)

    def written(self, shown: Callable[[float], str]) -> str:
        bound = shown(self.bound)
        return f"({bound}, {shown_exactly(self.delta)})" if self.delta else f"epsilon {bound}"


class PureDP(ApproximateDP):
    """The claim of epsilon-differential privacy, with delta 0."""

    def __init__(self, epsilon: float) -> None:
        super().__init__(epsilon, 0.0)


@dataclass(frozen=True)
class NoClaim(Claim):
    """The empty claim, which nothing can contradict."""

    def tradeoff(self, false_positives: float) -> float:
        return 0.0

    def epsilon(self, delta: float) -> float:
        return math.inf

    @property
    def number(self) -> float:
        return math.inf

    def refuted_below(self, fpr_upper: float, fnr_upper: float) -> None:
        return None

    def written(self, shown: Callable[[float], str]) -> str:
        return "nothing"


def _laplace_quantile(rate: float) -> float:
    """Return where the Laplace distribution of scale 1 has this mass to the left, 0 < rate < 1."""
    return math.log(2 * rate) if rate <= 0.5 else -math.log(2 * (1 - rate))


def of_event(spec: Mapping[str, Any], *, neighbouring: str = "add_remove", steps: int = 1) -> Claim:
    """Return the joint claim of ``steps`` releases of an event, every record taking part in each.

    Several Laplace releases, or Laplace noise beside other noise, claim the sum of their pure
    epsilons.

    Args:
        spec: an event specification; multipliers are relative to ONE record's contribution.
        neighbouring: ``replace_one`` doubles the distance.
        steps: releases with fresh noise each.

    Raises:
        InvalidInput: no event specification.
        PrivacyError: an event with sampling, or one whose trade-off is not known here.
    """
    found = events.leaves(spec, steps)
    factor = 2.0 if neighbouring == "replace_one" else 1.0
    if any(leaf.kind == events.NON_PRIVATE_EVENT for leaf in found):
        return NoClaim()
    if any(leaf.sampled or leaf.parts for leaf in found):
        raise _unknown(spec, "a release of all records; an audit puts the canary into every one")
    if all(leaf.kind == events.GAUSSIAN_EVENT for leaf in found):
        square = math.fsum(leaf.count / leaf.multiplier**2 for leaf in found)
        return GaussianDP(factor * math.sqrt(square))
    if len(found) == 1 and found[0].count == 1 and found[0].kind == events.LAPLACE_EVENT:
        return Laplace(factor / found[0].multiplier)
    return PureDP(math.fsum(leaf.count * _pure(spec, leaf, factor) for leaf in found))


def _pure(spec: Mapping[str, Any], leaf: events.ElementaryEvent, factor: float) -> float:
    """Return the epsilon of one elementary release, with delta 0."""
    if leaf.kind == events.LAPLACE_EVENT:
        return factor / leaf.multiplier
    if leaf.kind == events.RANDOMIZED_RESPONSE_EVENT:
        numbers = dict(leaf.parameters)
        lie = numbers["noise_parameter"] / numbers["num_buckets"]  # the chance of each other symbol
        return math.log1p((1 - numbers["noise_parameter"]) / lie)
    raise _unknown(spec, "Gaussian releases alone, or Laplace releases and randomized responses")


def _unknown(spec: Mapping[str, Any], expected: str) -> PrivacyError:
    return PrivacyError(
        "event",
        expected=expected,
        got=dict(spec),
        remedy="State the claim of one release: GaussianDP, Laplace, PureDP or ApproximateDP.",
    )


OLD_NAMES = {
    "Approximate": "ApproximateDP",
    "Gaussian": "GaussianDP",
    "Nothing": "NoClaim",
    "Pure": "PureDP",
}
"""Old names of claims, which warn."""

__getattr__ = old_names(__name__, OLD_NAMES)
