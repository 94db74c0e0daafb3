"""Compute epsilon of a planned run, and the noise for a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    def mode(self) -> str:
        """``published`` or ``corrected``."""

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the event of one release as the paper names it."""

    def claim(
        self, *, steps: int, sample_rate: float, delta: float, dataset_size: int | None
    ) -> float | None:
        """Return the epsilon that the paper states; None where it follows from the event."""


class Calibratable(ClaimedMechanism, Protocol):
    """A mechanism whose noise can be set by its multiplier."""

    def with_noise_multiplier(self, noise_multiplier: float) -> Self:
        """Return the same configuration with other noise."""


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
    preparations: Sequence[LedgerEntry] = (),
) -> Certificate:
    """Return ``epsilon`` with everything that it rests on; same arguments and errors.

    ``variation`` is the total variation distance of a coordinate's noise from the mechanism's, as
    of a noise table; ``batched`` as of a ``Ledger``: a model will make the gradients.
    ``preparations`` are further releases from the same records, which the certificate covers.
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
    return certify_uses([*preparations, use], delta)


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
    preparations: Sequence[LedgerEntry] = (),
) -> M:
    """Return the mechanism with the least noise whose epsilon does not exceed the target.

    The multiplier is within 1e-3 (relative) of the smallest one that meets the target, and the
    epsilon of the returned mechanism has been computed and is at most ``target_epsilon``. With
    ``accountant`` (``RDP`` or ``PLD``) that accountant's bound has to meet it, not the smallest; a
    claim has none. With ``to="claimed"`` it is ``claimed_epsilon`` that meets the target, as in the
    sources' experiments: in ``published`` mode that bounds nothing. ``variation`` and
    ``preparations`` as for ``certify``; claims know of neither.

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
        known: dict[str, Any] = {"variation": variation, "preparations": preparations}
        return certify(changed, **known, **run).epsilon_by(accountant)

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
    """Bracket by factors of 2 from 1, then interpolate in logarithms until within 4e-4.

    A probe stands just beyond the interpolated point, as seen from the nearer end of the bracket:
    so the farther end moves, and the two soon enclose the point. What interpolation does not
    halve in two probes is bisected.
    """
    asked: list[tuple[float, float]] = []

    def meets(noise: float) -> bool:
        value = spent(noise)
        if 0 < value < math.inf:
            asked.append((math.log(noise), math.log(value / target)))
        return value <= target

    low = high = 1.0
    if meets(1.0):
        while low > MIN_NOISE_MULTIPLIER:
            high, low = low, low / 2
            if not meets(low):
                break
        else:
            return low
    else:
        while high < MAX_NOISE_MULTIPLIER:
            low, high = high, high * 2
            if meets(high):
                break
        else:
            return None
    slow = 0
    while high > low * (1 + 2 * _CALIBRATION_STEP):
        width = math.log(high / low)
        probe = math.sqrt(low * high)
        guess = None if slow == 2 else _crossing(asked)
        if guess is not None and math.log(low) < guess < math.log(high):
            beyond = _CALIBRATION_STEP if guess < math.log(probe) else -_CALIBRATION_STEP
            probe = min(max(math.exp(guess + beyond), math.nextafter(low, high)), high)
        if meets(probe):
            high = probe
        else:
            low = probe
        halved = 2 * math.log(high / low) <= width
        slow = 0 if halved or slow == 2 else slow + 1
    return high


def _crossing(points: list[tuple[float, float]]) -> float | None:
    """Return where the curve through the up to three points nearest to the axis crosses it.

    It is x as a polynomial of y; None where values do not tell the points apart.
    """
    nearest = sorted(points, key=lambda point: abs(point[1]))[:3]
    values = [y for _, y in nearest]
    if len(nearest) < 2 or len(set(values)) < len(values):
        return None
    return math.fsum(
        x * math.prod(other / (other - y) for other in values if other != y) for x, y in nearest
    )
