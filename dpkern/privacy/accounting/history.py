"""Certify what was or will be released."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Protocol, Self

from ...base.errors import InvalidInput, PrivacyError, brief
from ...base.validate import choice, integer, open_unit, plain_values, probability
from . import events
from .accountants import RELATIONS, non_private, upper_bounds
from .delta import delta_warning
from .events import ElementaryEvent, EventSpec
from .shown import shown_bound
from .tails import why_infinite

SAMPLING = ("poisson", "fixed", "shuffled", "with_replacement")
MAX_DIMENSION = 1 << 40
"""Assumed coordinates of a release of unknown size: the reserves barely notice."""

MIN_NOISE_MULTIPLIER = 2.0**-4
MAX_NOISE_MULTIPLIER = 2.0**10
"""The noise lattice is certified for noise multipliers in this range."""

RELEASED_BITS = "released bits"
BATCHED_BITS = "released bits, if a record's gradient depends on it alone"
"""The statement on exact sums whose gradients come out of passes over batches
(``scope_for_batched_gradients``)."""

TESTED_BITS = "released bits, batch invariance tested"
"""The same where a test, and no proof, says that a record's gradient depends on it alone."""

REAL_SUMS = "real-number sums"
NOTHING = "nothing"

_MAX_COUNT = 1 << 62
"""The largest count of one entry of a loaded history."""

LEDGER_VERSION = 2
"""Version 1 had no releases without sampling and no remarks."""

PREPARED_VERSION = 3
"""Version of a history with preparations, which earlier readers would leave out."""

_VERSIONS = (1, LEDGER_VERSION, PREPARED_VERSION)


class Accountable(Protocol):
    """A mechanism or a plan: anything that knows the event of one release.

    ``event_spec`` is what a sampled record takes part in; ``unsampled`` what every step releases of
    all records besides; ``remarks`` what a certificate's reader must know.
    """

    @property
    def neighbouring(self) -> str:
        """The relation that the event's multiplier refers to."""

    @property
    def certified_for(self) -> str:
        """The scope of the certificate: ``released bits``, ``real-number sums`` or ``nothing``."""

    @property
    def dimension(self) -> int | None:
        """The number of released coordinates; None where it is unknown."""

    @property
    def unsampled(self) -> EventSpec:
        """The event of what a step releases of all records, whatever the sample."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences that a certificate's reader must know."""

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the event of one release of the sampled records."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A proved upper bound on epsilon and what it rests on.

    Attributes:
        epsilon: the smallest proved bound; ``math.inf`` where nothing can be certified.
        delta: the whole delta, reserves for numerical error and cut noise tails included.
        relation: the neighbouring relation.
        accountant: the accountant that gave the bound ``epsilon``.
        event: the accounted event as JSON.
        bounds: every bound that was proved, by accountant; the others are looser.
        certified_for: ``released bits``, where a model makes the gradients with a condition
            (``BATCHED_BITS``) or a test in its place (``TESTED_BITS``); ``real-number sums`` or
            ``nothing``.
        notes: what a reader must know in order not to over-read the number.
    """

    epsilon: float
    delta: float
    relation: str
    accountant: str
    event: str
    bounds: Mapping[str, float]
    certified_for: str
    notes: tuple[str, ...] = ()

    def epsilon_by(self, accountant: str | None) -> float:
        """Return the smallest bound of one accountant, ``RDP`` or ``PLD``.

        None selects ``epsilon``.
        """
        if accountant is None or self.epsilon in (0, math.inf):
            return self.epsilon
        proved = [bound for name, bound in self.bounds.items() if name.startswith(accountant)]
        return min(proved, default=math.inf)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; infinity is the string ``"inf"``."""
        return {
            "epsilon": _json_number(self.epsilon),
            "delta": self.delta,
            "relation": self.relation,
            "accountant": self.accountant,
            "event": json.loads(self.event),
            "bounds": {name: _json_number(bound) for name, bound in self.bounds.items()},
            "certified_for": self.certified_for,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class LedgerEntry:
    """A number of steps, ``count``, of one mechanism under one way of sampling.

    Each step is ``event`` on the sampled records and ``unsampled`` on all of them; ``variation`` is
    the total variation distance of one coordinate's noise from the law that ``event`` speaks of.
    """

    event: EventSpec
    neighbouring: str
    certified_for: str
    sampling: str
    sample_rate: float
    dataset_size: int | None
    dimension: int
    count: int
    phase: int | None = 0
    unsampled: EventSpec = field(default_factory=events.no_op)
    remarks: tuple[str, ...] = ()
    variation: float = 0.0

    @classmethod
    def of(
        cls,
        mechanism: Accountable,
        *,
        sampling: str,
        sample_rate: float,
        dataset_size: int | None,
        count: int,
        dimension: int | None,
    ) -> Self:
        """Read a mechanism or plan and check every argument.

        Raises:
            InvalidInput: an argument out of range.
            PrivacyError: Poisson samples for a plan that is certified for steps of one size.
        """
        samples = getattr(mechanism, "samples", None)
        if sampling == "poisson" and samples is not None:
            raise PrivacyError(
                "sampling",
                expected="'fixed' or 'shuffled'",
                got=sampling,
                remedy="Pass sampling='fixed' or 'shuffled': the certificate is for steps of "
                f"exactly {samples} samples.",
            )
        size = dimension if dimension is not None else mechanism.dimension
        use = cls(
            event=mechanism.event_spec(size),
            neighbouring=choice(RELATIONS, neighbouring=mechanism.neighbouring),
            certified_for=mechanism.certified_for,
            sampling=choice(SAMPLING, sampling=sampling),
            sample_rate=probability(sample_rate=sample_rate),
            dataset_size=(
                None if dataset_size is None else integer(minimum=1, dataset_size=dataset_size)
            ),
            dimension=(
                MAX_DIMENSION
                if size is None
                else integer(minimum=1, maximum=MAX_DIMENSION, dimension=size)
            ),
            count=integer(steps=count),
            unsampled=mechanism.unsampled,
            remarks=tuple(mechanism.remarks),
            variation=checked_variation(getattr(mechanism, "variation", 0.0)),
        )
        if sampling in ("fixed", "with_replacement"):
            use.subset()
        return use

    def once_more(self) -> LedgerEntry:
        """Return the entry with one release more."""
        made = object.__new__(LedgerEntry)
        made.__dict__.update(self.__dict__, count=self.count + 1)
        return made

    def subset(self) -> tuple[int, int]:
        """Return ``(dataset_size, batch_size)``, for samplings that fix the second.

        Raises:
            InvalidInput: the dataset size is unknown, or the rate is not a whole number of records.
        """
        if self.dataset_size is None:
            raise InvalidInput(
                "dataset_size",
                expected=f"an int, because sampling={self.sampling!r} draws a fixed number",
                got=None,
                remedy="Pass the number of records, which this relation makes public.",
            )
        exact = self.sample_rate * self.dataset_size
        batch = round(exact)
        if batch < 1 or abs(exact - batch) > 1e-6 * batch:
            raise InvalidInput(
                "sample_rate",
                expected="batch_size / dataset_size for a whole batch_size >= 1",
                got=f"{self.sample_rate} of {self.dataset_size} records = {exact}",
                remedy="Pass the sampler's sample_rate.",
            )
        return self.dataset_size, batch

    @property
    def relation(self) -> str:
        """The neighbouring relation, given how batches are drawn."""
        if self.neighbouring == "replace_one":
            return "replace_one"
        return {"fixed": "replace_one", "shuffled": "zero_out"}.get(
            self.sampling, self.neighbouring
        )

    def total(self) -> EventSpec:
        """Return the event of all steps together."""
        sampled = self._sampled()
        if self.unsampled == events.no_op():
            return sampled
        return events.composed([sampled, events.repeated(self.unsampled, self.count)])

    def _sampled(self) -> EventSpec:
        """Return the event of what all steps release of the sampled records."""
        if self.sampling == "poisson":
            step = events.poisson_sampled(self.sample_rate, self.event)
        elif self.sampling == "shuffled":
            # A batch per floor(1 / q) steps holds the record, at most once in an epoch.
            per_epoch = max(1, math.floor(1 / self.sample_rate * (1 + 1e-12)))
            phase = per_epoch - 1 if self.phase is None else self.phase % per_epoch
            epochs = -(-(phase + self.count) // per_epoch) if self.count else 0
            return events.repeated(self.event, epochs)
        elif self.sampling == "fixed":
            step = events.sampled_without_replacement(*self.subset(), self.event)
        else:
            step = events.sampled_with_replacement(*self.subset(), self.event)
        return events.repeated(step, self.count)


def scope_for_batched_gradients(certified_for: str, *, tested: bool = False) -> str:
    """Return the part of a statement that holds where gradients come out of passes over batches.

    Exact sums are proved for contributions that stay what they are when a record comes or goes.
    Rounded by a model, a record's gradient may differ in its last bits with the size of its batch;
    ``tested`` says that it was seen not to.
    """
    if certified_for != RELEASED_BITS:
        return certified_for
    return TESTED_BITS if tested else BATCHED_BITS


def checked_variation(variation: object) -> float:
    """Check that a total variation distance is in [0, 1], and return it."""
    if type(variation) not in (int, float) or not 0 <= variation <= 1:  # type: ignore[operator]
        raise InvalidInput(
            "variation",
            expected="a number in [0, 1]",
            got=variation,
            remedy="Pass the distance of one coordinate's noise from its certified law.",
        )
    return float(variation)  # type: ignore[arg-type]


def read_uses(state: Mapping[str, Any]) -> tuple[list[LedgerEntry], bool]:
    """Return the entries of a ledger's state and whether it was seeded, all checked.

    Raises:
        InvalidInput: not such a state.
    """
    plain_values("state", state)
    bad = InvalidInput(
        "state",
        expected=f"a ledger state_dict of version {', '.join(map(str, _VERSIONS[:-1]))} or "
        f"{_VERSIONS[-1]}",
        got=brief(state),
        remedy="Pass what Ledger.state_dict() returned.",
    )
    if not isinstance(state, Mapping) or state.get("version") not in _VERSIONS:
        raise bad
    entries, seeded = state.get("entries"), state.get("seeded")
    if not isinstance(entries, Sequence) or not isinstance(seeded, bool):
        raise bad
    later = {"unsampled", "remarks"} if state["version"] == 1 else set()
    names = {each.name for each in fields(LedgerEntry)} - later
    uses: list[LedgerEntry] = []
    for entry in entries:
        if not isinstance(entry, Mapping) or set(entry) | {"variation"} != names | {"variation"}:
            raise bad
        use = LedgerEntry(**entry)
        if not isinstance(use.remarks, (list, tuple)) or not all(
            isinstance(remark, str) for remark in use.remarks
        ):
            raise bad
        use = replace(use, remarks=tuple(use.remarks))
        checked_variation(use.variation)
        events.leaves(use.unsampled)
        choice(RELATIONS, neighbouring=use.neighbouring)
        choice(SAMPLING, sampling=use.sampling)
        probability(sample_rate=use.sample_rate)
        if use.dataset_size is not None:
            integer(minimum=1, dataset_size=use.dataset_size)
        if use.phase is not None:
            integer(phase=use.phase)
        kinds = (RELEASED_BITS, TESTED_BITS, BATCHED_BITS, REAL_SUMS, NOTHING)
        choice(kinds, certified_for=use.certified_for)
        integer(minimum=1, maximum=_MAX_COUNT, count=use.count)
        integer(minimum=1, maximum=MAX_DIMENSION, dimension=use.dimension)
        if use.sampling in ("fixed", "with_replacement"):
            use.subset()
        events.leaves(use.event)
        uses.append(use)
    return uses, seeded


def _common_relation(relations: set[str]) -> str:
    """Return the strongest relation that all entries can be accounted under.

    Zeroing a record out costs what removing it does; replacing one costs at least as much.
    """
    for relation in ("replace_one", "zero_out"):
        if relation in relations:
            return relation
    return "add_remove"


def certify_uses(uses: Sequence[LedgerEntry], delta: float) -> Certificate:
    """Return the certificate of several entries together, in one adaptive composition.

    Raises:
        InvalidInput: delta outside (0, 1).
        MissingDependency: dp-accounting is not installed.
    """
    open_unit(delta=delta)
    relation = _common_relation({use.relation for use in uses})
    spec = events.composed([use.total() for use in uses])
    leaves = events.leaves(spec)
    dimension = max((use.dimension for use in uses), default=1)
    notes = [*dict.fromkeys(remark for use in uses for remark in use.remarks)]
    notes += _notes(uses, delta)
    bounds: dict[str, float] = {}
    if not leaves:
        epsilon, accountant = 0.0, "none"
    elif non_private(leaves):
        epsilon, accountant = math.inf, "none"
        notes.append("a release without noise, or sampled in a way that no accountant certifies")
    else:
        variation = math.fsum(use.count * use.dimension * use.variation for use in uses)
        bounds = upper_bounds(leaves, relation, delta, dimension, variation)
        accountant, epsilon = min(
            bounds.items(), key=lambda item: item[1], default=("none", math.inf)
        )
        if epsilon == math.inf:
            accountant = "none"
            notes.append("no accountant bounds this event under this relation at this delta")
            notes += why_infinite(leaves, relation, dimension, delta)
            if variation > 0:
                notes.append(
                    f"the noise is within total variation {shown_bound(variation)} of its "
                    "certified law: no epsilon holds at a delta below that"
                )
    return Certificate(
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        accountant=accountant,
        event=json.dumps(_readable(leaves), sort_keys=True),
        bounds=MappingProxyType(dict(sorted(bounds.items()))),
        certified_for=NOTHING if epsilon == math.inf else _weakest(uses),
        notes=tuple(notes),
    )


def _readable(leaves: Sequence[ElementaryEvent]) -> EventSpec:
    specs = [events.repeated(leaf.spec(), leaf.count) for leaf in leaves]
    if len(specs) == 1:
        return specs[0]
    return events.composed(specs) if specs else events.no_op()


def _weakest(uses: Sequence[LedgerEntry]) -> str:
    """Return the weakest statement among the entries."""
    kinds = sorted({use.certified_for for use in uses})
    for weak in (REAL_SUMS, BATCHED_BITS, TESTED_BITS):
        if weak in kinds:
            return weak
    return " and ".join(kinds) or NOTHING


def _notes(uses: Sequence[LedgerEntry], delta: float) -> Sequence[str]:
    notes = []
    if any(use.sampling == "shuffled" for use in uses):
        notes.append("shuffled batches are not amplified: each epoch is one unsampled release")
    if any(use.sampling == "fixed" for use in uses):
        notes.append("the number of records is public")
    if any(use.certified_for == BATCHED_BITS for use in uses):
        notes.append(
            "floating-point rounding can make a record's gradient depend on the other records in "
            "its batch; the certificate assumes that it does not (docs/engine.md)"
        )
    if any(use.certified_for == TESTED_BITS for use in uses):
        notes.append(
            "that a record's gradient depends on it alone was tested on this machine and is not "
            "proved (docs/exact.md)"
        )
    sizes = [use.dataset_size for use in uses if use.dataset_size is not None]
    warning = delta_warning(delta, dataset_size=min(sizes, default=None))
    if warning is not None:
        notes.append(warning)
    return notes


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
