"""The accountant of an engine: what its step has released, under the names that Opacus uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._validate import choice, open_unit
from ..errors import InvalidInput

if TYPE_CHECKING:
    from ..step import DPStep

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

        Raises:
            InvalidInput: delta outside (0, 1).
            MissingDependency: dp-accounting is not installed.
        """
        open_unit(delta=delta)
        if self.step is None or not self.step.steps:
            return 0.0
        return self.step.certify(delta).epsilon_by(self.bound)
