"""The history of a run as it happens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from types import MappingProxyType
from typing import Any

from ...base.errors import InvalidInput
from ...base.validate import open_unit
from . import events
from .history import (
    LEDGER_VERSION,
    NOTHING,
    PREPARED_VERSION,
    Accountable,
    Certificate,
    LedgerEntry,
    certify_uses,
    read_uses,
    scope_for_batched_gradients,
)


class Ledger:
    """The history of a run: what was released, in which order, under which sampling.

    ``record`` every release, then ask ``epsilon`` or ``certify``. ``state_dict`` holds plain JSON
    values, and a ledger that loads it continues the history.

    Args:
        seeded: the noise of this run can be reproduced from a seed, so the seed reveals the
            records: ``epsilon`` is infinite and ``epsilon_if_seed_secret`` tells the rest.
        batched: gradients come out of passes over whole batches: no entry, of a loaded history
            either, then certifies released bits without that condition (``BATCHED_BITS``).
    """

    def __init__(self, *, seeded: bool = False, batched: bool = False) -> None:
        self._seeded = seeded
        self.batched = batched
        self._uses: list[LedgerEntry] = []
        self._preparations: list[LedgerEntry] = []
        self._taints: list[str] = []
        self._conditions: list[str] = []
        self._invariance: tuple[bool, tuple[str, ...]] = False, ()
        """Whether batch invariance was tested and found, and what the test has to say."""
        self._joined = True
        """Whether the next shuffled batch is known to continue the last one recorded here."""
        self._release: tuple[Any, ...] | None = None
        """Arguments of the last call that made or continued an entry."""
        self._frozen = False
        """Whether the mechanism or plan among them can never change."""
        self._last: LedgerEntry | None = None
        """The entry that this call made or continued."""

    @property
    def seeded(self) -> bool:
        """Whether any part of the history used a seed."""
        return self._seeded

    @property
    def taints(self) -> tuple[str, ...]:
        """Reasons why the releases so far are certified for nothing; usually none."""
        return tuple(self._taints)

    def taint(self, reason: str) -> None:
        """State that releases recorded here may not have been what they were recorded as.

        Nothing is certified from then on, in loaded copies of the history neither: a release
        cannot be taken back. ``reason`` stands in every certificate's notes.
        """
        if reason not in self._taints:
            self._taints.append(reason)

    @property
    def conditions(self) -> tuple[str, ...]:
        """Conditions that the caller vouches for, beyond what was checked.

        Certificates hold if they are true.
        """
        return tuple(self._conditions)

    def assume(self, condition: str) -> None:
        """Add a condition that every certificate of this history depends on from now on."""
        if condition not in self._conditions:
            self._conditions.append(condition)

    def state_invariance(self, tested: bool, remarks: Sequence[str] = ()) -> None:
        """State whether batched gradients are tested to be batch-invariant, from now on.

        Entries recorded while ``tested`` holds are certified for ``TESTED_BITS``; ``remarks`` stand
        in their certificates' notes either way.
        """
        self._invariance = tested, tuple(remarks)

    @property
    def preparations(self) -> tuple[LedgerEntry, ...]:
        """Releases from the same records that no step makes, such as ranges of columns."""
        return tuple(self._preparations)

    def record_preparation(self, entry: LedgerEntry) -> None:
        """Add a release that prepared the steps: every certificate covers it, no step counts it."""
        self._preparations.append(entry)

    @property
    def steps(self) -> int:
        """Releases of steps recorded so far."""
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
        release = (
            mechanism,
            sampling,
            sample_rate,
            dataset_size,
            dimension,
            self.batched,
            self._invariance,
        )
        if count == 1 and self._repeats(release):
            self._uses[-1] = self._last = self._uses[-1].once_more()
            return
        use = LedgerEntry.of(
            mechanism,
            sampling=sampling,
            sample_rate=sample_rate,
            dataset_size=dataset_size,
            count=count,
            dimension=dimension,
        )
        if use.count:
            self._append(self._stated(use, *self._invariance))
            self._release, self._last = release, self._uses[-1]
            self._frozen = _is_frozen(mechanism)

    def _repeats(self, release: tuple[Any, ...]) -> bool:
        """Whether this is the very release that the last entry was made of.

        Mechanisms and plans are frozen: the same object has the same event.
        """
        before = self._release
        return (
            before is not None
            and release[0] is before[0]
            and release[1:] == before[1:]
            and self._joined
            and bool(self._uses)
            and self._uses[-1] is self._last
            and self._frozen
        )

    def _stated(
        self, use: LedgerEntry, tested: bool = False, remarks: tuple[str, ...] = ()
    ) -> LedgerEntry:
        """Return the entry with what may be said of gradients such as these."""
        if not self.batched:
            return use
        scope = scope_for_batched_gradients(use.certified_for, tested=tested)
        return replace(use, certified_for=scope, remarks=(*use.remarks, *remarks))

    def _append(self, use: LedgerEntry) -> None:
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
        """Return the certificate of everything recorded so far."""
        secret = self.certify_if_seed_secret(delta)
        if not self._seeded:
            return secret
        note = "the noise comes from a known seed: no privacy against anyone who has it"
        return _nothing(secret, [note])

    def certify_if_seed_secret(self, delta: float) -> Certificate:
        """Return the certificate that would hold if the seed were secret."""
        certificate = certify_uses([*self._preparations, *self._uses], delta)
        conditions = [f"holds if {condition}" for condition in self._conditions]
        certificate = replace(certificate, notes=(*certificate.notes, *conditions))
        return _nothing(certificate, self._taints) if self._taints else certificate

    def epsilon(self, delta: float) -> float:
        """Return the certified epsilon so far; infinite for a seeded run."""
        open_unit(delta=delta)
        return math.inf if self._seeded else self.epsilon_if_seed_secret(delta)

    def epsilon_if_seed_secret(self, delta: float) -> float:
        """Return epsilon so far if the seed is secret."""
        return self.certify_if_seed_secret(delta).epsilon

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain JSON values."""
        state: dict[str, Any] = {
            "version": PREPARED_VERSION if self._preparations else LEDGER_VERSION,
            "seeded": self._seeded,
            "entries": [_entry(use) for use in self._uses],
        }
        if self._preparations:
            state["preparations"] = [_entry(use) for use in self._preparations]
        for name, reasons in (("taints", self._taints), ("conditions", self._conditions)):
            if reasons:
                state[name] = list(reasons)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the history by a saved one; what follows is added to it.

        A seeded history stays seeded, and a seeded ledger that loads an unseeded one too; so does
        what taints it, and preparations are kept.

        Raises:
            InvalidInput: not a ledger's state; the ledger is then unchanged.
        """
        uses, seeded = read_uses(state)
        absent: Any = None if state["version"] == PREPARED_VERSION else []
        prepared, _ = read_uses({**state, "entries": state.get("preparations", absent)})
        taints, conditions = _read_texts(state, "taints"), _read_texts(state, "conditions")
        self._taints += [reason for reason in taints if reason not in self._taints]
        self._conditions += [each for each in conditions if each not in self._conditions]
        self._preparations += prepared
        self._uses = [self._stated(use) for use in uses]
        self._seeded, self._joined = self._seeded or seeded, False


def _is_frozen(mechanism: object) -> bool:
    found = getattr(type(mechanism), "__dataclass_params__", None)
    return found is not None and found.frozen


def _nothing(certificate: Certificate, notes: Sequence[str]) -> Certificate:
    """Return the certificate of the same history that certifies nothing, and why."""
    return Certificate(
        epsilon=math.inf,
        delta=certificate.delta,
        relation=certificate.relation,
        accountant="none",
        event=json.dumps(events.non_private()),
        bounds=MappingProxyType({}),
        certified_for=NOTHING,
        notes=(*notes, *certificate.notes),
    )


def _read_texts(state: Mapping[str, Any], name: str) -> list[str]:
    texts = state.get(name, [])
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return texts
    raise InvalidInput(
        f"state.{name}",
        expected="a list of sentences",
        got=repr(texts)[:80],
        remedy="Pass what Ledger.state_dict() returned.",
    )


def _entry(use: LedgerEntry) -> dict[str, Any]:
    """Return the entry as JSON values; a variation of 0 is left out, as in older files."""
    entry = asdict(use)
    if not use.variation:
        del entry["variation"]
    return entry


_WHAT = tuple(each.name for each in fields(LedgerEntry) if each.name not in ("count", "phase"))


def _same(one: LedgerEntry, other: LedgerEntry) -> bool:
    """Whether two entries differ in when and how often at most; asked at every step."""
    return all(getattr(one, name) == getattr(other, name) for name in _WHAT)
