"""Certify AdLM's release of one record, with the reserves that rounding needs.

Every release with Laplace noise is counted with three numbers: the epsilon of all its coordinates
in real numbers, the most that one coordinate can have of it, by which the cut tails of the noise
are weighed, and a reserve:

* ``fl(x / u)`` rises with x, so for x in [0, rho] two lattice points differ by at most
  ``fl(rho / u)``. Stochastic rounding with 16 bits adds 2^-16 units, 2^-36 of the scale; between
  whole units the logarithm of a mixed law exceeds a straight line by 2^-43 at most. 2^-35 for each
  coordinate covers both.
* Sums and quotients of float64 have a relative error far below 2^-40.
* A mean relevance is at most 1 and its error 2^-53, where one record moves it by ``1 / |D|``: a
  relative reserve of ``2^-50 |D|``. (The sum itself is exact: ``nn.relevance.mean_relevance``.)

Reference: AdLM, lemmas 1-6, and the audit of its argument: noise per record, not per batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ...base.laws import SCALE_UNITS
from ..accounting import events
from ..accounting.events import ElementaryEvent, EventSpec
from ..accounting.tails import tail_delta
from ..theory import adlm
from .certify import ROUNDING_STEP
from .objective import MOST_TAIL

if TYPE_CHECKING:
    from .adlm import AdLM

ROUNDING = 2 * ROUNDING_STEP / SCALE_UNITS
"""Epsilon of one coordinate's stochastic rounding."""

_FLOATS = 2.0**-40


class LaplaceRelease(NamedTuple):
    """A release with Laplace noise.

    Attributes:
        coordinates: that get noise and depend on the record.
        epsilon: of all of them in real numbers.
        most: that one coordinate can have of it.
        floats: further epsilon for what is rounded before.
    """

    coordinates: int
    epsilon: float
    most: float
    floats: float = 0.0

    @property
    def whole(self) -> float:
        """The cost with all reserves."""
        return (self.epsilon + ROUNDING * self.coordinates + self.floats) * (1 + _FLOATS / 4)


def left(mechanism: AdLM, part: str) -> float:
    """Return the budget of the corrected mode's scales, which leaves room for the reserves."""
    features, classes = mechanism.setting.layer.features, mechanism.setting.classes
    index, coordinates, floats = {
        "relevances": (0, features, _of_means(mechanism)),
        "inputs": (1, features, 0.0),
        "labels": (2, classes, 0.0),
    }[part]
    return (mechanism.budgets[index] - ROUNDING * coordinates) * (1 - _FLOATS - floats)


def costs(mechanism: AdLM) -> dict[str, float]:
    """Return the pure epsilon of each part, in real numbers; infinite where it is not protected."""
    found = {"inputs": _inputs(mechanism), "labels": _labels(mechanism)}
    if mechanism.releases_relevance:
        found = {"relevances": _relevances(mechanism), **found}
    return found if mechanism.noisy else dict.fromkeys(found, math.inf)


def tail(mechanism: AdLM) -> float:
    """Return the delta of the cut noise tails; 0 where nothing is protected."""
    total = math.fsum(costs(mechanism).values())
    if math.isinf(total):
        return 0.0
    return math.fsum(
        part.coordinates * tail_delta(_leaf(part.most), "replace_one", 1, total)
        for part in _laplace_parts(mechanism)
    )


def epsilon(mechanism: AdLM) -> float:
    """Return the sum with all reserves.

    It is infinite if some part is, or if the tails weigh too much.
    """
    found = costs(mechanism)
    if math.isinf(math.fsum(found.values())) or tail(mechanism) > MOST_TAIL:
        return math.inf
    response = found["labels"] if mechanism.labels == "response" else 0.0
    return math.fsum([response, *(part.whole for part in _laplace_parts(mechanism))])


def event(mechanism: AdLM) -> EventSpec:
    """Return the composition of all parts; non-private where ``epsilon`` is infinite."""
    if math.isinf(epsilon(mechanism)):
        return events.non_private()
    found = [events.laplace(_multiplier(part.whole)) for part in _laplace_parts(mechanism)]
    if mechanism.labels == "response":
        found.append(mechanism.channel.event_spec())
    return events.composed(found)


def _relevances(mechanism: AdLM) -> float:
    if mechanism.relevance_from == "trained_on_data":
        # Another record may be another network: the printed sensitivity speaks of a fixed one.
        return math.inf
    if mechanism.mode == "corrected":
        return left(mechanism, "relevances")
    return adlm.published_relevance_cost(
        mechanism.setting.records,
        epsilon=mechanism.budgets[0],
        relevance_range=mechanism.relevance_range,
        network="public",
    )


def _inputs(mechanism: AdLM) -> float:
    if mechanism.noise_sharing == "shared_per_feature" or not mechanism.noisy:
        return math.inf
    if mechanism.mode == "corrected":
        return left(mechanism, "inputs")
    return adlm.published_input_cost(
        layer=mechanism.setting.layer,
        batch=mechanism.setting.batch,
        epsilon=mechanism.budgets[1],
        reach=mechanism.reach,
        h0_count=mechanism.h0_count,
    )


def _labels(mechanism: AdLM) -> float:
    if mechanism.coefficient_form == "feature_expanded" or not mechanism.noisy:
        # Gradients pass through the hidden layer in the clean part of the coefficients.
        return math.inf
    if mechanism.labels == "response":
        return mechanism.channel.ldp_epsilon
    if mechanism.labels == "laplace":
        return left(mechanism, "labels")
    return adlm.published_label_cost(
        classes=mechanism.setting.classes,
        hidden=mechanism.setting.hidden,
        batch=mechanism.setting.batch,
        epsilon=mechanism.budgets[2],
    )


def _laplace_parts(mechanism: AdLM) -> list[LaplaceRelease]:
    features, found = mechanism.setting.layer.features, costs(mechanism)
    parts = []
    if "relevances" in found:
        # No record can spend the bound on one coordinate: each moves by 1 / |D| at most.
        whole = found["relevances"]
        parts.append(
            LaplaceRelease(features, whole, whole / features, whole * _of_means(mechanism))
        )
    # Shares depend on noisy relevances: one feature may have nearly all of the budget.
    most = found["inputs"] if mechanism.adaptive else found["inputs"] / features
    parts.append(LaplaceRelease(features, found["inputs"], most))
    if mechanism.labels != "response":
        # A label moves two entries by 1 each.
        parts.append(
            LaplaceRelease(mechanism.setting.classes, found["labels"], found["labels"] / 2)
        )
    return parts


def _of_means(mechanism: AdLM) -> float:
    return mechanism.setting.records * 2.0**-50


def _multiplier(cost: float) -> float:
    """Return the multiplier of a Laplace event whose replacement costs this.

    Two contributions differ by twice one.
    """
    return math.nextafter(2 / cost, 0)


def _leaf(cost: float) -> ElementaryEvent:
    return ElementaryEvent(events.LAPLACE_EVENT, (("noise_multiplier", _multiplier(cost)),))
