"""Check what is stated about a run: no output can show a wrong relation or a wrong sampler.

A ``Statement`` is an epsilon with everything that it rests on. It is compared with two numbers of
the same event under the same relation: a lower bound (``optimistic``), below which a claim is
contradicted, and what ``accounting`` certifies, below which it is not proved. Two numbers are
recognised by their value, because they come from one known mistake each: that of Poisson sampling
for other batches, and that of ``RdpAccountant(REPLACE_ONE)`` with a multiplier by the clip bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..base.errors import InvalidInput
from ..base.validate import choice, integer, non_negative, open_unit, positive_at, probability
from ..privacy.accounting import events, shown_bound, shown_lower_bound
from ..privacy.accounting.accountants import RELATIONS, non_private
from ..privacy.accounting.events import EventSpec
from ..privacy.accounting.history import (
    MAX_DIMENSION,
    REAL_SUMS,
    SAMPLING,
    Certificate,
    LedgerEntry,
    certify_uses,
)
from ..privacy.accounting.planning import ClaimedMechanism, claimed_epsilon
from .epsilon_lower_bound import epsilon_lower, shuffled_epsilon_lower
from .findings import Check

NOISE = ("fresh", "seeded", "shared", "table")
DIVISORS = ("constant", "realised")
SCALES = ("constant", "data")

_CLOSE = 0.01
"""Two epsilons of one computation agree to this part: grids and orders differ."""
_AGREE = 1e-6
"""A multiplier may exceed the exact one by this part: it was printed and read."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement about a run: an epsilon with everything that it rests on.

    Attributes:
        event: event of ONE step on the records of its batch, without sampling; its multiplier is
            the noise scale / the bound of ONE record, under ``replace_one`` too.
        steps: number of steps of the run.
        epsilon, delta: the claim.
        relation: one of ``accounting.RELATIONS``.
        sampling: one of ``accounting.SAMPLING``: how batches are drawn.
        sample_rate: expected batch size / records; 1: every record in every step.
        dataset_size: number of records, for batches of a fixed size.
        accounted_as: the sampling that epsilon was computed for. None means ``sampling``.
        bounds: bound of one record per clip group; empty for one group, or if not stated.
        scales: noise scale per clip group, as many.
        noise: ``fresh``; ``seeded``: anyone with the seed can repeat it; ``shared``: one draw for
            several records, groups or steps; ``table``: read again from a finite table.
        divided_by: ``constant``, or ``realised``: the number of records in the batch.
        scale_from: origin of the noise scale: ``constant`` or the ``data``.
        accountant: name of the accountant that computed epsilon.
        unsampled: further releases of all records in every step, besides ``event``.
    """

    event: EventSpec
    steps: int
    epsilon: float
    delta: float
    relation: str = "add_remove"
    sampling: str = "poisson"
    sample_rate: float = 1.0
    dataset_size: int | None = None
    accounted_as: str | None = None
    bounds: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    noise: str = "fresh"
    divided_by: str = "constant"
    scale_from: str = "constant"
    accountant: str = "not named"
    unsampled: EventSpec = field(default_factory=events.no_op)

    def __post_init__(self) -> None:
        events.leaves(self.event)
        events.leaves(self.unsampled)
        integer(minimum=1, steps=self.steps)
        if self.epsilon != math.inf:
            non_negative(epsilon=self.epsilon)
        open_unit(delta=self.delta)
        choice(RELATIONS, relation=self.relation)
        choice(SAMPLING, sampling=self.sampling)
        probability(sample_rate=self.sample_rate)
        if self.accounted_as is not None:
            choice(SAMPLING, accounted_as=self.accounted_as)
        choice(NOISE, noise=self.noise)
        choice(DIVISORS, divided_by=self.divided_by)
        choice(SCALES, scale_from=self.scale_from)
        if len(self.bounds) != len(self.scales):
            raise InvalidInput(
                "scales",
                expected=f"{len(self.bounds)} noise scales, one per bound",
                got=str(len(self.scales)),
                remedy="State the bound and the noise scale of every clip group.",
            )
        for name, values in (("bounds", self.bounds), ("scales", self.scales)):
            for i, value in enumerate(values):
                positive_at(f"{name}[{i}]", value)
        if self.sampling in ("fixed", "with_replacement"):
            self.use().subset()

    def use(self, *, sampling: str | None = None, event: EventSpec | None = None) -> LedgerEntry:
        """Return the run as ``accounting`` takes it, optionally under another sampling or event."""
        return LedgerEntry(
            event=self.event if event is None else event,
            neighbouring=self.relation,
            certified_for=REAL_SUMS,
            sampling=self.sampling if sampling is None else sampling,
            sample_rate=self.sample_rate,
            dataset_size=self.dataset_size,
            dimension=MAX_DIMENSION,
            count=self.steps,
            unsampled=self.unsampled,
        )

    def certificate(self) -> Certificate:
        """Return what ``accounting`` certifies for the statement.

        Raises:
            MissingDependency: dp-accounting is not installed.
        """
        return certify_uses([self.use()], self.delta)

    def lower(self) -> float:
        """Return an epsilon that the stated event reaches for some neighbours.

        Raises:
            MissingDependency: dp-accounting is not installed.
        """
        if self.sampling == "shuffled":
            return self._shuffled_lower()
        if self.sampling == "with_replacement":
            return 0.0
        use = self.use()
        return epsilon_lower(use.total(), use.relation, self.delta)

    def _shuffled_lower(self) -> float:
        """Return the lower bound for shuffled batches and Gaussian noise; 0 for other noise.

        A record of gradient zero is as good as none: what holds for zero-out holds for replace-one.
        """
        leaves = events.leaves(self.event)
        if any(leaf.kind != events.GAUSSIAN_EVENT or leaf.sampled for leaf in leaves):
            return math.inf if non_private(leaves) else 0.0
        precision = math.fsum(leaf.count / leaf.multiplier**2 for leaf in leaves)
        per_epoch = max(1, math.floor(1 / self.sample_rate * (1 + 1e-12)))
        if not precision:
            return 0.0
        return shuffled_epsilon_lower(
            1 / math.sqrt(precision),
            self.delta,
            steps_per_epoch=per_epoch,
            epochs=self.steps // per_epoch,
        )


def of_mechanism(
    mechanism: ClaimedMechanism,
    *,
    steps: int,
    sample_rate: float,
    delta: float,
    sampling: str = "poisson",
    dataset_size: int | None = None,
) -> Statement:
    """Return what a mechanism's paper states about a run; in ``published`` mode about what it does.

    Raises:
        InvalidInput: an argument out of range.
        PrivacyError: Poisson samples for a mechanism of steps of one size.
        MissingDependency: dp-accounting is not installed.
    """
    claimed = claimed_epsilon(
        mechanism,
        steps=steps,
        sample_rate=sample_rate,
        delta=delta,
        sampling=sampling,
        dataset_size=dataset_size,
    )
    return Statement(
        event=mechanism.event_spec(mechanism.dimension),
        unsampled=mechanism.unsampled,
        steps=steps,
        epsilon=claimed,
        delta=delta,
        relation="replace_one" if sampling == "fixed" else mechanism.neighbouring,
        sampling=sampling,
        sample_rate=sample_rate,
        dataset_size=dataset_size,
        accountant="the source" if mechanism.mode == "published" else "dpkern",
    )


def checks(statement: Statement) -> tuple[Check, ...]:
    """Run every check that applies to a statement.

    Raises:
        MissingDependency: dp-accounting is not installed.
    """
    certificate = statement.certificate()
    return (
        _event(statement, certificate),
        _epsilon(statement, certificate),
        _amplification(statement, certificate),
        _replaced(statement, certificate),
        _groups(statement),
        _noise(statement),
        _divisor(statement),
        _scale(statement),
    )


def _check(name: str, passed: bool | None, text: str, **numbers: float | int | str) -> Check:
    return Check(layer="plan", name=name, passed=passed, text=text, numbers=numbers)


def _event(statement: Statement, certificate: Certificate) -> Check:
    """Whether anything bounds the stated event under the stated relation."""
    name = "event"
    if statement.epsilon == math.inf:
        return _check(name, True, "no epsilon is claimed")
    if statement.sampling == "fixed" and statement.relation != "replace_one":
        return _check(
            name,
            False,
            "batches of a fixed size need neighbours with equally many records, so replace_one, "
            f"and {statement.relation} is stated",
        )
    if certificate.epsilon == math.inf:
        why = "; ".join(certificate.notes) or "no accountant bounds it"
        return _check(name, False, f"the event is not private: {why}")
    return _check(name, True, f"{certificate.accountant} bounds it under {certificate.relation}")


def _epsilon(statement: Statement, certificate: Certificate) -> Check:
    """Compare the claim with the lower bound and with the certificate."""
    name = "epsilon"
    lower, upper, claim = statement.lower(), certificate.epsilon, statement.epsilon
    numbers = {"claimed": claim, "lower": lower, "certified": upper}
    said = f"epsilon {shown_bound(claim)} is claimed (accountant: {statement.accountant})"
    if claim < lower == math.inf:
        return _check(name, False, f"{said} of an event that is not private", **numbers)
    if claim < lower:
        reached = shown_lower_bound(lower)
        text = f"{said}, and neighbours exist for which the event has at least {reached}"
        return _check(name, False, text, **numbers)
    if claim < upper * (1 - _CLOSE):
        reached = shown_lower_bound(lower)
        text = f"{said}; {shown_bound(upper)} is certified and at least {reached} reached: between "
        return _check(name, None, text + "them nothing is proved here", **numbers)
    return _check(name, True, f"{said}, and {shown_bound(upper)} is certified", **numbers)


def _amplification(statement: Statement, certificate: Certificate) -> Check:
    """Whether epsilon was computed for the sampling that takes place."""
    name = "amplification"
    drawn, accounted = statement.sampling, statement.accounted_as
    claimed, upper = shown_bound(statement.epsilon), shown_bound(certificate.epsilon)
    if accounted not in (None, drawn):
        enough = statement.epsilon >= certificate.epsilon * (1 - _CLOSE)
        text = f"batches are {drawn} and accounted as {accounted}"
        if enough:
            return _check(
                name, True, f"{text}; the number is large enough for {drawn} all the same"
            )
        return _check(name, False, f"{text}: {upper} is certified for {drawn}")
    if drawn == "poisson" or statement.epsilon >= certificate.epsilon * (1 - _CLOSE):
        return _check(name, True, f"batches are {drawn} and accounted as {drawn}")
    number = certify_uses([statement.use(sampling="poisson")], statement.delta).epsilon
    if statement.epsilon <= number * (1 + _CLOSE):
        text = (
            f"batches are {drawn}, and epsilon {claimed} is not above that of Poisson sampling, "
            f"{shown_bound(number)}: {upper} is certified for {drawn}"
        )
        return _check(name, False, text, poisson=number, certified=certificate.epsilon)
    return _check(name, True, f"epsilon is not that of Poisson sampling, {shown_bound(number)}")


def _replaced(statement: Statement, certificate: Certificate) -> Check:
    """Whether a relation that moves two contributions was given the noise for one."""
    name = "replaced record"
    if certificate.relation != "replace_one":
        return _check(name, True, f"one contribution comes or goes under {certificate.relation}")
    if statement.epsilon >= certificate.epsilon * (1 - _CLOSE):
        return _check(name, True, "two contributions, each of the bound, are accounted for")
    trap = _without_doubling(statement)
    if trap is not None and statement.epsilon <= trap * (1 + _CLOSE):
        text = (
            f"epsilon {shown_bound(statement.epsilon)} is not above what noise of twice the scale "
            f"has, {shown_bound(trap)}: replacing a record moves the sum by twice the bound, and "
            f"{shown_bound(certificate.epsilon)} is certified (RdpAccountant(REPLACE_ONE) of "
            "dp-accounting 0.6.0 takes a multiplier by the sensitivity, not by the clip bound)"
        )
        return _check(name, False, text, trap=trap, certified=certificate.epsilon)
    return _check(name, True, "epsilon is above what noise of twice the scale would have")


def _without_doubling(statement: Statement) -> float | None:
    """Return what an accountant prints if given twice the noise scale; None if not Gaussian."""
    leaves = events.leaves(statement.event)
    if any(leaf.kind != events.GAUSSIAN_EVENT or leaf.sampled for leaf in leaves):
        return None
    precision = math.fsum(leaf.count / leaf.multiplier**2 for leaf in leaves)
    if not precision:
        return None
    event = events.gaussian(2 / math.sqrt(precision))
    certificate = certify_uses([statement.use(event=event)], statement.delta)
    # RDP is where the mistake is easily made, and its number is the larger one.
    named = certificate.epsilon_by("RDP")
    return named if math.isfinite(named) else certificate.epsilon


def _groups(statement: Statement) -> Check:
    """Whether the multiplier is that of all clip groups together."""
    name = "clip groups"
    kinds = {leaf.kind for leaf in events.leaves(statement.event)}
    if not statement.bounds:
        return _check(name, None, "bounds and noise scales of the clip groups are not stated")
    if len(kinds) != 1 or not kinds <= {events.GAUSSIAN_EVENT, events.LAPLACE_EVENT}:
        return _check(name, None, "only Gaussian or Laplace releases have a multiplier")
    ratios = [c / s for c, s in zip(statement.bounds, statement.scales, strict=True)]
    if kinds == {events.GAUSSIAN_EVENT}:
        shift = math.sqrt(math.fsum(ratio**2 for ratio in ratios))
        leaves = events.leaves(statement.event)
        said = math.sqrt(math.fsum(leaf.count / leaf.multiplier**2 for leaf in leaves))
    else:
        shift = math.fsum(ratios)
        said = math.fsum(leaf.count / leaf.multiplier for leaf in events.leaves(statement.event))
    numbers = {"groups": len(ratios), "shift": shift, "stated": said}
    text = (
        f"one record moves the sums by {shift:.4g} noise scales over {len(ratios)} clip groups, "
        f"and the event is for {said:.4g}"
    )
    return _check(name, said >= shift * (1 - _AGREE), text, **numbers)


def _noise(statement: Statement) -> Check:
    name = "noise"
    texts = {
        "fresh": "fresh noise for every release",
        "seeded": "anyone with the seed can subtract the noise",
        "shared": "one draw of noise serves several values: their difference has none",
        "table": "noise comes again from a finite table: anyone with the table finds the place",
    }
    passed = statement.noise == "fresh" or statement.epsilon == math.inf
    return _check(name, passed, texts[statement.noise])


def _divisor(statement: Statement) -> Check:
    name = "normaliser"
    if statement.divided_by == "constant":
        return _check(name, True, "sums are divided by a public constant")
    if statement.sampling == "fixed" or statement.epsilon == math.inf:
        return _check(name, True, "the number of records in a batch is public")
    text = "sums are divided by the realised batch size, which one record changes and no event has"
    return _check(name, False, text)


def _scale(statement: Statement) -> Check:
    name = "noise scale"
    if statement.scale_from == "constant":
        return _check(name, True, "the noise scale was fixed without the records")
    passed = statement.epsilon == math.inf
    return _check(name, passed, "the noise scale depends on the records, and so tells of them")
