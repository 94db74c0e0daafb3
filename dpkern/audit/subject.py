"""What can be audited: something that releases vectors, for pairs of neighbouring inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .claims import Claim

if TYPE_CHECKING:
    from .findings import Check

Score = Callable[[torch.Tensor], torch.Tensor]
"""From released vectors ``[runs, d]`` to one float64 number for each run; large: "present"."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two neighbouring inputs.

    Attributes:
        name: what makes the canary a bad case, such as ``uniform`` or ``all layers``.
        without: what ``Subject.release`` understands as its input: D.
        present: D with the canary, or with the record replaced.
        score: what separates the two best, where that is known; must be picklable if several
            processes are to run. None: learnt from runs that are not counted.
        layer: ``canary``, ``likelihood`` or ``bits``: the kind of ``score``.
    """

    name: str
    without: Any
    present: Any
    score: Score | None = None
    layer: str = "canary"


class Subject(ABC):
    """Base of everything that an audit can run; a frozen dataclass, picklable.

    Released floats are compared bit by bit too: a subject that adds noise in floating point fails
    the precision test, whatever its other properties, unless it rounds what it releases to a grid
    that does not depend on the data.

    Attributes:
        name: of the mechanism and its setting.
        claimed: what its source, or the caller, says of one call of ``release``.
        certified: what is proved of it; ``Nothing()`` where nothing is.
        usual_runs: counted where nobody says how many: seconds of work, or a minute of slow ones.
    """

    usual_runs: ClassVar[int] = 20_000

    name: str
    claimed: Claim
    certified: Claim

    @abstractmethod
    def release(self, data: Any, runs: int, seed: int) -> torch.Tensor:
        """``[runs, d]``: one released vector for each of so many independent runs.

        Args:
            data: one side of a pair.
            runs: how many.
            seed: for noise that takes one; certified noise has keys of the operating system.
        """

    @abstractmethod
    def pairs(self, weakest: torch.Tensor | None) -> Sequence[Pair]:
        """The neighbours to try, at most a dozen: each makes all the bounds a little wider.

        None: nothing is released, and only ``checks`` are asked.

        Args:
            weakest: unit vector ``[d]`` of the released coordinates along which the noise on
                ``null()`` is least; None where that is not known.
        """

    def null(self) -> Any:
        """The input whose releases show the noise: by default the first pair's ``without``."""
        return self.pairs(None)[0].without

    def noise_sd(self) -> torch.Tensor | float | None:
        """Certified sd of Gaussian noise on every released coordinate, ``[d]`` or one number.

        None: unknown, not Gaussian, or not on every coordinate; the noise's covariance is then
        shown and not judged.
        """
        return None

    def checks(self, *, quick: bool) -> Sequence[Check]:
        """Checks of its own: bits, sensitivity, plan. ``quick`` leaves out what takes seconds."""
        del quick
        return ()
