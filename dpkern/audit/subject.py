"""The interface of an audit: a subject that releases vectors, for pairs of neighbouring inputs."""

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
"""A function from released vectors ``[runs, d]`` to one float64 per run; large means "present"."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two neighbouring inputs.

    Attributes:
        name: name of the canary's bad case, such as ``uniform`` or ``all layers``.
        without: input D, as ``Subject.release`` takes it.
        present: D with the canary, or with the record replaced.
        score: best known score that separates the two; must be picklable if several processes are
            to run. None learns a score from runs that are not counted.
        layer: ``canary``, ``likelihood`` or ``bits``: the kind of ``score``.
    """

    name: str
    without: Any
    present: Any
    score: Score | None = None
    layer: str = "canary"


class Subject(ABC):
    """The base of everything that an audit can run; a frozen dataclass, picklable.

    Released floats are compared bit by bit too: a subject that adds noise in floating point fails
    the precision test, whatever its other properties, unless it rounds what it releases to a grid
    that does not depend on the data.

    Attributes:
        name: name of the mechanism and its setting.
        claimed: claim by its paper, or by the caller, about one call of ``release``.
        certified: what is proved of one call; ``NoClaim()`` if nothing is.
        usual_runs: default number of counted runs: seconds of work, or a minute of slow ones.
    """

    usual_runs: ClassVar[int] = 20_000

    name: str
    claimed: Claim
    certified: Claim

    @abstractmethod
    def release(self, data: Any, runs: int, seed: int) -> torch.Tensor:
        """Return ``[runs, d]``: one released vector for each of so many independent runs.

        Args:
            data: one side of a pair.
            runs: number of runs.
            seed: seed of noise that takes one; certified noise has keys of the operating system.
        """

    @abstractmethod
    def pairs(self, weakest: torch.Tensor | None) -> Sequence[Pair]:
        """Return the neighbour pairs to try, at most a dozen: each makes all bounds a little wider.

        No pairs means that nothing is released; only ``checks`` are asked then.

        Args:
            weakest: unit vector ``[d]`` of the released coordinates along which the noise on
                ``null()`` is least; None where that is not known.
        """

    def null(self) -> Any:
        """Return the input whose releases show the noise: the first pair's ``without``."""
        return self.pairs(None)[0].without

    def noise_sd(self) -> torch.Tensor | float | None:
        """Return the certified sd of Gaussian noise on every coordinate, ``[d]`` or one number.

        None means unknown, not Gaussian, or not on every coordinate; the noise's covariance is then
        shown and not judged.
        """
        return None

    def checks(self, *, quick: bool) -> Sequence[Check]:
        """Return the subject's own checks of bits, sensitivity, plan; ``quick`` skips slow ones."""
        del quick
        return ()
