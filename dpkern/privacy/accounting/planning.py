"""Compute epsilon of a planned run, and the noise for a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar

from ...base.errors import PrivacyError
from ...base.validate import choice, integer, open_unit, positive
from .events import EventSpec, no_op
from .history import (
    MAX_NOISE_MULTIPLIER,
    MIN_NOISE_MULTIPLIER,
    Accountable,
    Certificate,
    LedgerEntry,
    certify_uses,
    checked_variation,
    scope_for_batched_gradients,
)

_CALIBRATION_STEP = 2e-4


TARGETS = ("certified", "claimed")


class ClaimedMechanism(Accountable, Protocol):
    """A mechanism that also knows what its paper claims."""

    @property
    def mode(self) -> str: ...

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec: ...

    def claim(
        self, *, steps: int, sample_rate: float, delta: float, dataset_size: int | None
    ) -> float | None: ...


class Calibratable(ClaimedMechanism, Protocol):
    """A mechanism whose noise can be set by its multiplier."""

    def with_noise_multiplier(self, noise_multiplier: float) -> Self: ...


M = TypeVar("M", bound=Calibratable)


def epsilon(
    mechanism: Accountable,
    *,
    sample_rate: float,
    steps: int,
    delta: float,
    sampling: str = "poisson",
    dataset_size: int | None = None,
    dimension: int | None = None,
) -> float:
    """Return the certified epsilon of ``steps`` releases; ``math.inf`` if there is none.

    Args:
        mechanism: a mechanism or a plan.
        sample_rate: expected batch size / dataset size, in (0, 1].
        steps: number of releases; 0 gives epsilon 0.
        delta: in (0, 1).
        sampling: one of ``SAMPLING``.
        dataset_size: needed by ``fixed`` and ``with_replacement``.
        dimension: number of parameters; unknown means at most ``MAX_DIMENSION``.

    Raises:
        InvalidInput: an argument out of range.
        MissingDependency: dp-accounting is not installed.
    """
    return certify(
        mechanism,
        sample_rate=sample_rate,
        steps=steps,
        delta=delta,
        sampling=sampling,
        dataset_size=dataset_size,
        dimension=dimension,
    ).epsilon


def certify(
    mechanism: Accountable,
    *,
    sample_rate: float,
    steps: int,
    delta: float,
    sampling: str = "poisson",
    dataset_size: int | None = None,
    dimension: int | None = None,
    variation: float = 0.0,
    batched: bool = False,
) -> Certificate:
    """Return ``epsilon`` with everything that it rests on; same arguments and errors.

    ``variation`` is the total variation distance of a coordinate's noise from the mechanism's, as
    of a noise table; ``batched`` as of a ``Ledger``: a model will make the gradients.
    """
    use = LedgerEntry.of(
        mechanism,
        sampling=sampling,
        sample_rate=sample_rate,
        dataset_size=dataset_size,
        count=steps,
        dimension=dimension,
    )
    if variation:
        use = replace(use, variation=checked_variation(variation))
    if batched:
        use = replace(use, certified_for=scope_for_batched_gradients(use.certified_for))
    return certify_uses([use], delta)


def claimed_epsilon(
    mechanism: ClaimedMechanism,
    *,
    sample_rate: float,
    steps: int,
    delta: float,
    sampling: str = "poisson",
    dataset_size: int | None = None,
    dimension: int | None = None,
) -> float:
    """Return the epsilon that the mechanism's paper would claim; an upper bound on nothing.

    In ``corrected`` mode that is the certified one. In ``published`` mode it is what ``claim`` of
    the mechanism answers; where that is None, the event that the paper names, amplified as by
    Poisson sampling whatever the batches are, as is customary, and nothing besides.

    Raises:
        InvalidInput: an argument out of range.
        MissingDependency: dp-accounting is not installed.
    """
    use = LedgerEntry.of(
        mechanism,
        sampling=sampling,
        sample_rate=sample_rate,
        dataset_size=dataset_size,
        count=steps,
        dimension=dimension,
    )
    if mechanism.mode == "published":
        open_unit(delta=delta)
        claimed = mechanism.claim(
            steps=use.count, sample_rate=use.sample_rate, delta=delta, dataset_size=use.dataset_size
        )
        if claimed is not None:
            return claimed if use.count else 0.0
        claim = mechanism.claimed_event_spec(use.dimension)
        use = replace(use, event=claim, unsampled=no_op(), sampling="poisson")
    return certify_uses([use], delta).epsilon


def calibrate(
    mechanism: M,
    *,
    target_epsilon: float,
    sample_rate: float,
    steps: int,
    delta: float,
    sampling: str = "poisson",
    dataset_size: int | None = None,
    dimension: int | None = None,
    accountant: str | None = None,
    to: str = "certified",
    variation: float = 0.0,
) -> M:
    """Return the mechanism with the least noise whose epsilon does not exceed the target.

    The multiplier is within 1e-3 (relative) of the smallest one that meets the target, and the
    epsilon of the returned mechanism has been computed and is at most ``target_epsilon``. With
    ``accountant`` (``RDP`` or ``PLD``) that accountant's bound has to meet it, not the smallest; a
    claim has none. With ``to="claimed"`` it is ``claimed_epsilon`` that meets the target, as in the
    sources' experiments: in ``published`` mode that bounds nothing. ``variation`` as for
    ``certify``; claims know of none.

    Raises:
        InvalidInput: an argument out of range.
        PrivacyError: no multiplier in [2^-4, 2^10] meets the target.
        MissingDependency: dp-accounting is not installed.
    """
    target = positive(target_epsilon=target_epsilon)
    integer(minimum=1, steps=steps)
    choice(TARGETS, to=to)
    run: dict[str, Any] = {
        "sample_rate": sample_rate,
        "steps": steps,
        "delta": delta,
        "sampling": sampling,
        "dataset_size": dataset_size,
        "dimension": dimension,
    }

    def spent(noise_multiplier: float) -> float:
        changed = mechanism.with_noise_multiplier(noise_multiplier)
        if to == "claimed":
            return claimed_epsilon(changed, **run)
        return certify(changed, variation=variation, **run).epsilon_by(accountant)

    best = _least_noise(spent, target)
    if best is None:
        raise PrivacyError(
            "target_epsilon",
            expected="a target that a noise multiplier in [2^-4, 2^10] can meet",
            got=target,
            remedy="Raise epsilon or delta, or take fewer steps or a smaller sample_rate; a "
            "mechanism that is not private can be calibrated to its claim only (to='claimed').",
        )
    return mechanism.with_noise_multiplier(best)


def _least_noise(spent: Callable[[float], float], target: float) -> float | None:
    """Bracket by factors of 2 from 1, then interpolate in logarithms until within 2e-4."""
    low = high = 1.0
    at_low = at_high = spent(1.0)
    while at_high > target:
        if high >= MAX_NOISE_MULTIPLIER:
            return None
        low, at_low = high, at_high
        high *= 2
        at_high = spent(high)
    while at_low <= target:
        if low <= MIN_NOISE_MULTIPLIER:
            return low
        high, at_high = low, at_low
        low /= 2
        at_low = spent(low)
    bisect = False
    while high > low * (1 + 2 * _CALIBRATION_STEP):
        middle = math.sqrt(low * high)
        probes: tuple[float, ...] = (middle,)
        if not bisect and at_high > 0 and at_low < math.inf:
            slope = math.log(high / low) / math.log(at_low / at_high)
            middle = low * (at_low / target) ** slope
            # Just beside the interpolated point, so that both ends of the bracket move.
            probes = (middle * (1 + _CALIBRATION_STEP), middle * (1 - _CALIBRATION_STEP))
        width = math.log(high / low)
        for probe in probes:
            if not low < probe < high:
                continue
            value = spent(probe)
            if value <= target:
                high, at_high = probe, value
            else:
                low, at_low = probe, value
        bisect = math.log(high / low) > width / 4 and not bisect
    return high
