"""Report the privacy cost of an engine's steps, under the names that Opacus uses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ..base.errors import InvalidInput, PrivacyError, PrivacyWarning
from ..base.validate import choice, open_unit
from ..privacy.accounting import delta_warning

if TYPE_CHECKING:
    from ..step.step import DPStep

ACCOUNTANTS = ("prv", "pld", "rdp")


class Accountant:
    """The accountant of a private step, whose ledger it reads.

    Args:
        name: ``prv`` and ``pld`` report the smallest epsilon that any accountant proves, ``rdp``
            the smallest that Renyi accounting proves.

    Raises:
        InvalidInput: an unknown name, or ``gdp``: a limit theorem bounds nothing.
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
        """Return the number of steps so far."""
        return 0 if self.step is None else self.step.steps

    @property
    def bound(self) -> str | None:
        """The accountant whose bound counts, as named in certificates; None for the smallest."""
        return "RDP" if self.name == "rdp" else None

    def mechanism(self) -> str:
        """Return the accountant's name."""
        return str(self.name)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """The steps so far as ``(noise multiplier, sample rate, number of steps)``, in order."""
        entries = [] if self.step is None else self.step.ledger.state_dict()["entries"]
        return [
            (e["event"].get("noise_multiplier", 0.0), e["sample_rate"], e["count"]) for e in entries
        ]

    def state_dict(self) -> NoReturn:
        """Refuse: a history without its ledger would be resumed as another run.

        Raises:
            PrivacyError: always.
        """
        raise _without_ledger("state_dict")

    def load_state_dict(self, _: Mapping[str, Any]) -> NoReturn:
        """Refuse, as ``state_dict`` does.

        Raises:
            PrivacyError: always.
        """
        raise _without_ledger("load_state_dict")

    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound of epsilon for all steps so far.

        It is 0 before the first step, and infinite without noise or with a known seed.

        Args:
            delta: delta of the guarantee, in (0, 1).

        Warns:
            PrivacyWarning: delta is not below 1 / number of records; once for each delta.

        Raises:
            InvalidInput: delta outside (0, 1).
            MissingDependency: dp-accounting is not installed.
        """
        open_unit(delta=delta)
        if self.step is not None and self.step.steps:
            self.warn_of(delta, self.step.sampling, stacklevel=3)
        return self.bound_of(delta)

    def bound_of(self, delta: float) -> float:
        """Return what ``get_epsilon`` returns, without its warning."""
        if self.step is None or not self.step.steps:
            return 0.0
        return self.step.certify(delta).epsilon_by(self.bound)

    def warn_of(self, delta: float, sampling: Mapping[str, Any], *, stacklevel: int) -> None:
        """Warn, once for each delta, that it is too large for the number of records.

        Args:
            delta: delta of the guarantee.
            sampling: ``dataset_size`` (None if unknown) and ``sample_rate`` of the run.
            stacklevel: as in ``warnings.warn``; 2 is the caller.
        """
        text = delta_warning(
            delta,
            dataset_size=sampling["dataset_size"],
            sample_rate=sampling["sample_rate"],
        )
        if text is not None and delta not in self._warned:
            self._warned.add(delta)
            warnings.warn(text, PrivacyWarning, stacklevel=stacklevel)


def _without_ledger(call: str) -> PrivacyError:
    return PrivacyError(
        f"accountant.{call}",
        expected="the state of the whole engine, whose ledger the accountant reads",
        got="the accountant's alone",
        remedy="Save engine.state_dict() and pass it to engine.load_state_dict(), or use "
        "engine.save_checkpoint and engine.load_checkpoint.",
    )
