"""Training without noise, and the schedule of every method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from ..base.validate import choice, integer, non_negative, positive
from ..privacy.mechanisms import OutputSGD
from ..privacy.mechanisms.functional import Functional

LOSSES = ("bce", "printed", "taylor")


@dataclass(frozen=True, kw_only=True)
class NonPrivate:
    """Training without noise and without bounds.

    Args:
        loss: ``bce``, or the polynomial as ``printed`` (12) or by ``taylor``.
        constant: c, added to every entry of the decoder.

    Raises:
        InvalidInput: a field out of its range.
    """

    name: ClassVar[str] = "non_private"

    loss: str = "bce"
    constant: float = 0.0

    def __post_init__(self) -> None:
        choice(LOSSES, loss=self.loss)
        non_negative(constant=self.constant)

    @property
    def fingerprint(self) -> str:
        """The configuration in words."""
        return repr(self)


@dataclass(frozen=True, kw_only=True)
class VisitSchedule:
    """The learning rate and duration of plain SGD, one record of every user at a time.

    Args:
        lr: eta.
        epochs: visits of each record.

    Raises:
        InvalidInput: a field out of its range.
    """

    lr: float = 0.05
    epochs: int = 20

    def __post_init__(self) -> None:
        positive(lr=self.lr)
        integer(1, epochs=self.epochs)


Method: TypeAlias = Functional | OutputSGD | NonPrivate
