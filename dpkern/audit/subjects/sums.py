"""Audit an objective release: noisy sums of moments, with one record more or less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...base.errors import InvalidInput
from ...base.laws import SCALE_CELLS, SCALE_UNITS
from ...base.rng import Key
from ...objective import moments
from ...privacy.mechanisms import ObjectiveRelease
from .. import bits, claims
from ..claims import Claim
from ..findings import Check
from ..subject import Pair, Subject

LOOKED_AT = 200
"""Runs whose bits are examined."""


class LabelledFeatures(NamedTuple):
    """Integer features int64 ``[n, D]`` and labels int64 ``[n]``."""

    features: Tensor
    labels: Tensor

    def plus(self, feature: Tensor, label: int) -> LabelledFeatures:
        """Return the rows with one more."""
        labels = torch.cat([self.labels, torch.tensor([label])])
        return LabelledFeatures(torch.cat([self.features, feature[None]]), labels)


@dataclass(frozen=True, kw_only=True)
class SumsSubject(Subject):
    """One release of the moments of two records, or of three.

    Args:
        mechanism: its configuration.

    Raises:
        InvalidInput: a mechanism without noise.
    """

    usual_runs: ClassVar[int] = 20_000

    mechanism: ObjectiveRelease
    name: str = field(init=False)
    claimed: Claim = field(init=False)
    certified: Claim = field(init=False)

    def __post_init__(self) -> None:
        if not self.mechanism.noisy:
            raise InvalidInput(
                "mechanism",
                expected="a finite epsilon",
                got=self.mechanism.fingerprint,
                remedy="Set epsilon: without noise there is nothing to audit.",
            )
        proved = claims.of_event(self.mechanism.event_spec())
        made = {"claimed": proved, "certified": proved, "name": self.mechanism.name}
        for each, value in made.items():
            object.__setattr__(self, each, value)

    def release(self, data: LabelledFeatures, runs: int, seed: int) -> Tensor:
        """Return ``[runs, coordinates]`` in lattice units, float64."""
        del seed  # the key is the operating system's
        sums = moments.contributions(self.mechanism, data.features, data.labels)
        return moments.noised(self.mechanism, sums.repeat(runs, 1), Key.fresh())

    def noise_sd(self) -> float:
        """Return the certified scale of the noise on every coordinate."""
        return float(SCALE_UNITS)

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Return pairs with each adversarial record more, beside bystanders."""
        del weakest
        others = self._bystanders()
        return [
            Pair(name=name, without=others, present=others.plus(feature, label))
            for name, feature, label in adversarial_rows(self.mechanism)
        ]

    def null(self) -> LabelledFeatures:
        """Return the bystanders alone."""
        return self._bystanders()

    def _bystanders(self) -> LabelledFeatures:
        d, radius = self.mechanism.length, self.mechanism.radius
        features = torch.zeros(2, d, dtype=torch.int64)
        features[0, 0], features[1, d - 1] = radius // 2, -radius // 3
        return LabelledFeatures(features, torch.tensor([0, self.mechanism.classes - 1]))

    def checks(self, *, quick: bool) -> Sequence[Check]:
        """Measure what adversarial records move, in integers, and look at released bits."""
        del quick
        released = self.release(self.null(), LOOKED_AT, 0)
        cell = float(SCALE_UNITS // SCALE_CELLS)
        return (sensitivity_check(self.mechanism), bits.lattice(released, cell))


def adversarial_rows(mechanism: ObjectiveRelease) -> Iterator[tuple[str, Tensor, int]]:
    """Yield records that move the sums as far as a record can, or in all directions at once."""
    d, radius, last = mechanism.length, mechanism.radius, mechanism.classes - 1
    one = torch.zeros(d, dtype=torch.int64)
    one[d // 2] = radius
    yield "one feature", one, 0
    yield "one feature, negative", -one, last
    if d > 1:
        spread = torch.full((d,), int(radius / d**0.5), dtype=torch.int64)
        if int(spread.square().sum()) > radius**2:  # the root was rounded up
            spread -= 1
        yield "all features", spread, last
        yield "alternating", spread * (1 - 2 * (torch.arange(d) % 2)), 0


def sensitivity_check(mechanism: ObjectiveRelease) -> Check:
    """Whether no adversarial record moves the sums further than is certified; in integers."""
    nobody = torch.zeros(0, mechanism.length, dtype=torch.int64)
    others = LabelledFeatures(nobody, torch.zeros(0, dtype=torch.int64))
    largest = 0
    for _, feature, label in adversarial_rows(mechanism):
        present = others.plus(feature, label)
        moved = moments.contributions(mechanism, *present)
        moved -= moments.contributions(mechanism, *others)
        largest = max(largest, sum(int(each) ** 2 for each in moved.tolist()))
    bound = mechanism.squared_sensitivity
    return Check(
        layer="sensitivity",
        name="sums",
        passed=largest <= bound,
        text=f"a record moves the sums by {largest**0.5:.6g} lattice units at most, and "
        f"{bound**0.5:.6g} are certified",
        numbers={"moved": largest**0.5, "certified": bound**0.5},
    )
