"""Privacy events as plain JSON values, and the form in which accountants can take them.

A mechanism describes one release as an *event specification*: a dictionary whose ``"event"`` is the
name of a ``dp_accounting`` event class and whose other keys are its fields. Specifications need no
package, can be stored in a checkpoint, and become ``dp_accounting`` objects only when an epsilon is
asked for.

Scale convention: a noise multiplier is (certified scale of the noise) / (bound on the norm of ONE
record's contribution), also under ``replace_one``, where two contributions may differ by twice
that bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeAlias

from ...base.errors import InvalidInput, MissingDependency

EventSpec: TypeAlias = dict[str, Any]

GAUSSIAN_EVENT = "GaussianDpEvent"
LAPLACE_EVENT = "LaplaceDpEvent"
RANDOMIZED_RESPONSE_EVENT = "RandomizedResponseDpEvent"
NON_PRIVATE_EVENT = "NonPrivateDpEvent"
_NO_OP = "NoOpDpEvent"
_COMPOSED = "ComposedDpEvent"
_REPEATED = "SelfComposedDpEvent"
_POISSON = "PoissonSampledDpEvent"
_WITHOUT_REPLACEMENT = "SampledWithoutReplacementDpEvent"
_WITH_REPLACEMENT = "SampledWithReplacementDpEvent"


def dp_accounting() -> Any:
    """Return the ``dp_accounting`` package, imported on first use.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        return import_module("dp_accounting")
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "dp_accounting",
            expected="an installed package",
            got=str(error),
            remedy="Install it with: pip install dp-accounting",
        ) from error


def gaussian(noise_multiplier: float) -> EventSpec:
    """Return a release with Gaussian noise; 0 is not private, infinity releases nothing."""
    if noise_multiplier == 0:
        return non_private()
    if math.isinf(noise_multiplier):
        return no_op()
    return {"event": GAUSSIAN_EVENT, "noise_multiplier": noise_multiplier}


def laplace(noise_multiplier: float) -> EventSpec:
    """Return a release with Laplace noise of scale ``noise_multiplier`` times the L1 bound.

    Accountants compare one coordinate shifted by the whole bound, which is the worst case in every
    dimension: along a path of shifts, per unit of L1 length, an event's probability p changes at a
    rate of at most ``min(p, 1 - p) / b`` (one coordinate by its density, several by the concavity
    of the minimum over the others), and a half-line under one shifted coordinate attains it.
    """
    if noise_multiplier == 0:
        return non_private()
    if math.isinf(noise_multiplier):
        return no_op()
    return {"event": LAPLACE_EVENT, "noise_multiplier": noise_multiplier}


def non_private() -> EventSpec:
    """Return a release that nothing protects."""
    return {"event": NON_PRIVATE_EVENT}


def no_op() -> EventSpec:
    """Return the event of no release."""
    return {"event": _NO_OP}


def composed(events: Sequence[EventSpec]) -> EventSpec:
    """Return several releases from the same records."""
    return {"event": _COMPOSED, "events": list(events)}


def repeated(event: EventSpec, count: int) -> EventSpec:
    """Return ``count`` releases of the same kind, each free to depend on the earlier outputs."""
    return no_op() if count == 0 else {"event": _REPEATED, "event_of": event, "count": count}


def poisson_sampled(sample_rate: float, event: EventSpec) -> EventSpec:
    """Return the event on records that take part independently with probability ``sample_rate``."""
    if sample_rate == 1:
        return event
    return {"event": _POISSON, "sampling_probability": sample_rate, "event_of": event}


def sampled_without_replacement(dataset_size: int, batch_size: int, event: EventSpec) -> EventSpec:
    """Return the event on a uniform subset of exactly ``batch_size`` records."""
    return {
        "event": _WITHOUT_REPLACEMENT,
        "source_dataset_size": dataset_size,
        "sample_size": batch_size,
        "event_of": event,
    }


def sampled_with_replacement(dataset_size: int, batch_size: int, event: EventSpec) -> EventSpec:
    """Return the event on ``batch_size`` independent draws; no accountant certifies this."""
    return {
        "event": _WITH_REPLACEMENT,
        "source_dataset_size": dataset_size,
        "sample_size": batch_size,
        "event_of": event,
    }


def build(spec: Mapping[str, Any]) -> Any:
    """Return the ``dp_accounting`` event of a specification.

    Raises:
        InvalidInput: an unknown event name or wrong fields.
        MissingDependency: dp-accounting is not installed.
    """
    if not isinstance(spec, Mapping) or not isinstance(spec.get("event"), str):
        raise _bad_spec(spec)
    fields: dict[str, Any] = {}
    for key, value in spec.items():
        if key == "event":
            continue
        if key == "event_of":
            fields["event"] = build(value)
        elif key == "events":
            fields["events"] = [build(item) for item in value]
        else:
            fields[key] = value
    name = spec["event"]
    kind = getattr(dp_accounting(), name, None) if name.endswith("DpEvent") else None
    if kind is None:
        raise _bad_spec(spec)
    try:
        return kind(**fields)
    except TypeError as error:
        raise _bad_spec(spec) from error


def _bad_spec(spec: object) -> InvalidInput:
    return InvalidInput(
        "event",
        expected="an event of dp_accounting as a dictionary of its name and fields",
        got=spec,
        remedy="Let the mechanism's event_spec() make it.",
    )


@dataclass(frozen=True)
class ElementaryEvent:
    """An elementary event that is released ``count`` times, sampled in one way.

    Attributes:
        kind: the event's name.
        parameters: its fields, sorted by name.
        count: number of releases.
        rate: Poisson inclusion probability (1: every record takes part).
        subset: ``(dataset_size, batch_size)`` of a uniform subset, or None.
        parts: for ``kind`` "composite": what one sampled release consists of, without sampling.
    """

    kind: str
    parameters: tuple[tuple[str, float], ...] = ()
    count: int = 1
    rate: float = 1.0
    subset: tuple[int, int] | None = None
    parts: tuple[ElementaryEvent, ...] = ()

    @property
    def multiplier(self) -> float:
        """The noise multiplier of a Gaussian or Laplace leaf."""
        return dict(self.parameters)["noise_multiplier"]

    @property
    def sampled(self) -> bool:
        """Whether not every record takes part in every release."""
        return self.rate != 1 or self.subset is not None

    @property
    def fraction(self) -> float:
        """The probability that a record takes part in one release."""
        return self.rate if self.subset is None else self.subset[1] / self.subset[0]

    def unsampled(self) -> tuple[ElementaryEvent, ...]:
        """Return the same releases if every record took part: never more private than sampling."""
        if self.parts:
            return tuple(replace(part, count=part.count * self.count) for part in self.parts)
        return (replace(self, rate=1.0, subset=None),)

    def spec(self) -> EventSpec:
        """Return one release of the leaf as a specification."""
        if self.parts:
            inner = composed([repeated(part.spec(), part.count) for part in self.parts])
        else:
            inner = {"event": self.kind, **dict(self.parameters)}
        if self.subset is not None:
            return sampled_without_replacement(*self.subset, inner)
        return poisson_sampled(self.rate, inner)


def scaled(leaf: ElementaryEvent, factor: float) -> ElementaryEvent:
    """Return the leaf with its noise multiplier times ``factor``."""
    return replace(leaf, parameters=(("noise_multiplier", leaf.multiplier * factor),))


def leaves(spec: Mapping[str, Any], count: int = 1) -> tuple[ElementaryEvent, ...]:
    """Return a specification as elementary events, equal ones together.

    Gaussian releases made from the same records in one step are one Gaussian release with
    ``1 / s^2 = sum 1 / s_i^2``, so they can be amplified by sampling as one.

    Raises:
        InvalidInput: not an event specification.
    """
    try:
        found = _flatten(spec, count)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _bad_spec(spec) from error
    totals: dict[ElementaryEvent, int] = {}
    for leaf in found:
        key = replace(leaf, count=1)
        totals[key] = totals.get(key, 0) + leaf.count
    return tuple(replace(leaf, count=total) for leaf, total in totals.items())


def _flatten(spec: Mapping[str, Any], count: int) -> list[ElementaryEvent]:
    name = spec["event"]
    if name == _NO_OP or count == 0:
        return []
    if name == _REPEATED:
        if not isinstance(spec["count"], int):
            raise ValueError("a count is a whole number")
        return _flatten(spec["event_of"], count * spec["count"])
    if name == _COMPOSED:
        return [leaf for event in spec["events"] for leaf in _flatten(event, count)]
    if name == _POISSON:
        rate = float(spec["sampling_probability"])
        return [] if rate == 0 else _sample(leaves(spec["event_of"]), count, rate=rate, subset=None)
    if name == _WITHOUT_REPLACEMENT:
        subset = (int(spec["source_dataset_size"]), int(spec["sample_size"]))
        proper = subset if subset[1] < subset[0] else None
        return _sample(leaves(spec["event_of"]), count, rate=1.0, subset=proper)
    if name == _WITH_REPLACEMENT:
        return [ElementaryEvent(NON_PRIVATE_EVENT, count=count)]
    parameters = tuple(sorted((k, v) for k, v in spec.items() if k != "event"))
    if not isinstance(name, str) or not all(isinstance(v, (int, float)) for _, v in parameters):
        raise ValueError("an elementary event has a name and numbers")
    for _, value in parameters:
        float(value)  # an int may be too large for the accountants' arithmetic
    if name in (GAUSSIAN_EVENT, LAPLACE_EVENT) and not dict(parameters)["noise_multiplier"] > 0:
        return [ElementaryEvent(NON_PRIVATE_EVENT, count=count)]
    return [ElementaryEvent(name, parameters, count)]


def _sample(
    inner: tuple[ElementaryEvent, ...], count: int, *, rate: float, subset: tuple[int, int] | None
) -> list[ElementaryEvent]:
    if any(leaf.kind == NON_PRIVATE_EVENT for leaf in inner):
        return [ElementaryEvent(NON_PRIVATE_EVENT, count=count)]
    if not inner:
        return []
    if rate == 1 and subset is None:
        return [replace(leaf, count=leaf.count * count) for leaf in inner]
    if any(leaf.sampled for leaf in inner):
        # Sampling from a sample has no accountant; unsampled() of the parts still bounds it.
        flat = tuple(part for leaf in inner for part in leaf.unsampled())
        return [ElementaryEvent("composite", count=count, rate=rate, subset=subset, parts=flat)]
    if all(leaf.kind == GAUSSIAN_EVENT for leaf in inner):
        if len(inner) == 1 and inner[0].count == 1:
            return [replace(inner[0], count=count, rate=rate, subset=subset)]
        precision = math.fsum(leaf.count / leaf.multiplier**2 for leaf in inner)
        # One part in 2^50 down: the root and the sum are rounded.
        parameters = (("noise_multiplier", (1 - 2.0**-50) / math.sqrt(precision)),)
        return [ElementaryEvent(GAUSSIAN_EVENT, parameters, count, rate, subset)]
    if len(inner) == 1 and inner[0].count == 1:
        return [replace(inner[0], count=count, rate=rate, subset=subset)]
    return [ElementaryEvent("composite", count=count, rate=rate, subset=subset, parts=inner)]
