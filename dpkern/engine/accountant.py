"""The accountant of an engine: what its step has released, under the names that Opacus uses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import InvalidInput, PrivacyWarning
from ..base.validate import choice, open_unit
from ..privacy.accounting import delta_warning

if TYPE_CHECKING:
    from ..step.step import DPStep

ACCOUNTANTS = ("prv", "pld", "rdp")


class Accountant:
    """Reads the ledger of a private step.

    Args:
        name: ``prv`` or ``pld``: the smallest epsilon that any accountant proves; ``rdp``: the
            smallest that Renyi accounting proves. ``gdp``, a limit theorem, bounds nothing.

    Raises:
        InvalidInput: another name.
    """

    def __init__(self, name: str = "prv") -> None:
        if name == "gdp":
            raise InvalidInput(
                "accountant",
                expected="an accountant whose epsilon is an upper bound",
                got="gdp, which approximates by the central limit theorem",
                remedy="Use 'prv' (default) or 'rdp'.",
            )
        self.name = choice(ACCOUNTANTS, accountant=name)
        self.step: DPStep | None = None
        self._warned: set[float] = set()

    def __len__(self) -> int:
        """Steps so far."""
        return 0 if self.step is None else self.step.steps

    @property
    def bound(self) -> str | None:
        """Whose bound counts, as certificates call it; None: the smallest."""
        return "RDP" if self.name == "rdp" else None

    def mechanism(self) -> str:
        """The accountant's name."""
        return str(self.name)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """``(noise multiplier, sample rate, number of steps)`` in order."""
        entries = [] if self.step is None else self.step.ledger.state_dict()["entries"]
        return [
            (e["event"].get("noise_multiplier", 0.0), e["sample_rate"], e["count"]) for e in entries
        ]

    def get_epsilon(self, delta: float) -> float:
        """Epsilon of everything so far; infinite without noise or with a known seed.

        Warns:
            PrivacyWarning: delta is not below 1 / number of records; once for each delta.

        Raises:
            InvalidInput: delta outside (0, 1).
            MissingDependency: dp-accounting is not installed.
        """
        open_unit(delta=delta)
        if self.step is None or not self.step.steps:
            return 0.0
        self.warn_of(delta, self.step.sampling, stacklevel=3)
        return self.step.certify(delta).epsilon_by(self.bound)

    def warn_of(self, delta: float, sampling: Mapping[str, Any], *, stacklevel: int) -> None:
        """Warn, once for each delta, that it is too large for the number of records.

        Args:
            delta: of the guarantee.
            sampling: of the run: ``dataset_size`` (None if unknown) and ``sample_rate``.
            stacklevel: of ``warnings.warn``: 2 is the caller.
        """
        text = delta_warning(
            delta,
            dataset_size=sampling["dataset_size"],
            sample_rate=sampling["sample_rate"],
        )
        if text is not None and delta not in self._warned:
            self._warned.add(delta)
            warnings.warn(text, PrivacyWarning, stacklevel=stacklevel)
