"""What a mechanism certifies: epsilon at a delta, with the relation, the accountant and its event.

``epsilon`` and ``certify`` answer for a planned run, ``calibrate`` finds the noise for a target,
and a ``Ledger`` keeps the history of a run as it happens. The only thing read from a mechanism is
its event (see ``dpkern.mechanisms.base``); dp-accounting does the arithmetic and is imported when
the first epsilon is asked for.

How batches are drawn decides what may be claimed:

============  ============  ====================================================================
sampling      relation      one step is
============  ============  ====================================================================
``poisson``   add_remove    a release from a Poisson sample of rate ``sample_rate``
``fixed``     replace_one   a release from a uniform subset; the dataset size is public
``shuffled``  zero_out      one release per *epoch* for each record, never amplified
``with_replacement``  --    not certified: epsilon is infinite
============  ============  ====================================================================

A mechanism with a stronger relation of its own (``replace_one``) keeps it. A certificate covers
the pseudo-random generator only as far as ChaCha is one, and only what is released: parameters and
noised values, not losses, accuracies or realised batch sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeVar

from . import _events
from ._accountants import RELATIONS
from ._events import EventSpec
from ._history import (
    LEDGER_VERSION,
    MAX_DIMENSION,
    MAX_NOISE_MULTIPLIER,
    MIN_NOISE_MULTIPLIER,
    NOTHING,
    SAMPLING,
    Accountable,
    Certificate,
    Use,
    certify_uses,
    read_uses,
)
from ._validate import integer, open_unit, positive
from .errors import PrivacyError

__all__ = [
    "MAX_DIMENSION",
    "RELATIONS",
    "SAMPLING",
    "Accountable",
    "Calibratable",
    "Certificate",
    "Claimant",
    "Ledger",
    "calibrate",
    "certify",
    "claimed_epsilon",
    "epsilon",
]

_CALIBRATION_STEP = 2e-4


class Calibratable(Accountable, Protocol):
    """A mechanism whose noise can be set by its multiplier."""

    def with_noise_multiplier(self, noise_multiplier: float) -> Self: ...


class Claimant(Accountable, Protocol):
    """A mechanism that also knows what its source claims."""

    @property
    def mode(self) -> str: ...

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec: ...


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
    """Certified epsilon of ``steps`` releases; ``math.inf`` where nothing can be certified.

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
) -> Certificate:
    """``epsilon`` with everything that it rests on; same arguments and errors."""
    use = Use.of(
        mechanism,
        sampling=sampling,
        sample_rate=sample_rate,
        dataset_size=dataset_size,
        count=steps,
        dimension=dimension,
    )
    return certify_uses([use], delta)


def claimed_epsilon(
    mechanism: Claimant,
    *,
    sample_rate: float,
    steps: int,
    delta: float,
    sampling: str = "poisson",
    dataset_size: int | None = None,
    dimension: int | None = None,
) -> float:
    """The epsilon that the mechanism's source would claim; an upper bound on nothing.

    In ``corrected`` mode that is the certified one. In ``published`` mode it is the event that the
    source names, amplified as by Poisson sampling whatever the batches are, as is customary.

    Raises:
        InvalidInput: an argument out of range.
        MissingDependency: dp-accounting is not installed.
    """
    use = Use.of(
        mechanism,
        sampling=sampling,
        sample_rate=sample_rate,
        dataset_size=dataset_size,
        count=steps,
        dimension=dimension,
    )
    if mechanism.mode == "published":
        claim = mechanism.claimed_event_spec(use.dimension)
        use = replace(use, event=claim, sampling="poisson")
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
) -> M:
    """The mechanism with the least noise whose epsilon does not exceed the target.

    The multiplier is within 1e-3 (relative) of the smallest one that meets the target, and the
    epsilon of the returned mechanism has been computed and is at most ``target_epsilon``.

    Raises:
        InvalidInput: an argument out of range.
        PrivacyError: no multiplier in [2^-4, 2^10] meets the target.
        MissingDependency: dp-accounting is not installed.
    """
    target = positive(target_epsilon=target_epsilon)
    integer(minimum=1, steps=steps)

    def spent(noise_multiplier: float) -> float:
        return epsilon(
            mechanism.with_noise_multiplier(noise_multiplier),
            sample_rate=sample_rate,
            steps=steps,
            delta=delta,
            sampling=sampling,
            dataset_size=dataset_size,
            dimension=dimension,
        )

    best = _least_noise(spent, target)
    if best is None:
        raise PrivacyError(
            "target_epsilon",
            expected="a target that a noise multiplier in [2^-4, 2^10] can meet",
            got=target,
            remedy="Raise epsilon or delta, or take fewer steps or a smaller sample_rate.",
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


class Ledger:
    """The history of a run: what was released, in which order, under which sampling.

    ``record`` every release, then ask ``epsilon`` or ``certify``. ``state_dict`` holds plain JSON
    values, and a ledger that loads it continues the history.

    Args:
        seeded: the noise of this run can be reproduced from a seed, so whoever knows the seed sees
            the records: ``epsilon`` is infinite and ``epsilon_if_seed_secret`` tells the rest.
    """

    def __init__(self, *, seeded: bool = False) -> None:
        self._seeded = seeded
        self._uses: list[Use] = []
        self._joined = True
        """Whether the next shuffled batch is known to continue the last one recorded here."""

    @property
    def seeded(self) -> bool:
        """Whether any part of the history used a seed."""
        return self._seeded

    @property
    def steps(self) -> int:
        """Releases recorded so far."""
        return sum(use.count for use in self._uses)

    def record(
        self,
        mechanism: Accountable,
        *,
        sample_rate: float,
        sampling: str = "poisson",
        dataset_size: int | None = None,
        count: int = 1,
        dimension: int | None = None,
    ) -> None:
        """Add ``count`` releases. Needs no dp-accounting.

        Raises:
            InvalidInput: an argument out of range.
        """
        use = Use.of(
            mechanism,
            sampling=sampling,
            sample_rate=sample_rate,
            dataset_size=dataset_size,
            count=count,
            dimension=dimension,
        )
        if use.count:
            self._append(use)

    def _append(self, use: Use) -> None:
        last = self._uses[-1] if self._uses else None
        continues = self._joined or use.sampling != "shuffled"
        if last is not None and continues and _same(last, use):
            self._uses[-1] = replace(last, count=last.count + use.count)
            return
        # A record meets a shuffled mechanism once per epoch, and an epoch may have begun under
        # other noise or before a resume: then assume the worst position in it.
        known = self._joined and not any(u.sampling == "shuffled" for u in self._uses)
        self._uses.append(replace(use, phase=0 if known else None))
        self._joined = True

    def certify(self, delta: float) -> Certificate:
        """The certificate of everything recorded so far."""
        secret = self.certify_if_seed_secret(delta)
        if not self._seeded:
            return secret
        note = "the noise comes from a known seed: no privacy against anyone who has it"
        return Certificate(
            epsilon=math.inf,
            delta=delta,
            relation=secret.relation,
            accountant="none",
            event=json.dumps(_events.non_private()),
            bounds=MappingProxyType({}),
            certified_for=NOTHING,
            notes=(note, *secret.notes),
        )

    def certify_if_seed_secret(self, delta: float) -> Certificate:
        """The certificate that would hold if nobody knew the seed."""
        return certify_uses(self._uses, delta)

    def epsilon(self, delta: float) -> float:
        """Certified epsilon so far; infinite for a seeded run."""
        open_unit(delta=delta)
        return math.inf if self._seeded else self.epsilon_if_seed_secret(delta)

    def epsilon_if_seed_secret(self, delta: float) -> float:
        """Epsilon so far under the assumption that nobody knows the seed."""
        return self.certify_if_seed_secret(delta).epsilon

    def state_dict(self) -> dict[str, Any]:
        """The history as plain JSON values."""
        return {
            "version": LEDGER_VERSION,
            "seeded": self._seeded,
            "entries": [asdict(use) for use in self._uses],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the history by a saved one; what follows is added to it.

        A seeded history stays seeded, and a seeded ledger that loads an unseeded one too.

        Raises:
            InvalidInput: not a ledger's state; the ledger is then unchanged.
        """
        uses, seeded = read_uses(state)
        self._uses, self._seeded, self._joined = uses, self._seeded or seeded, False


def _same(one: Use, other: Use) -> bool:
    return replace(one, count=0, phase=0) == replace(other, count=0, phase=0)
