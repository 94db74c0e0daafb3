"""Options of a run that releases moments once; see ``options`` for the three types."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import validate
from ..objective.moments import SURROGATES
from ..privacy.mechanisms import ObjectivePerturbation
from .options import RowOptions, required


@dataclass(frozen=True, kw_only=True)
class SumsOptions(RowOptions):
    """Everything that the privacy statement of such a run depends on.

    ``epsilon`` and ``delta`` are those of the one release. There are no epochs and no batches.
    """

    NAMES = ObjectivePerturbation.names(trained_by="sums of rows")

    mechanism: str = "objective-release"
    epochs: int = 1
    delta: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        required(self.epsilon, what="the release")
        validate.open_unit(delta=self.delta)


@dataclass(frozen=True, kw_only=True)
class SurrogateOptions:
    """The fit to the release, which costs nothing. The defaults are ours."""

    surrogate: str = "ridge"
    ridge: float = 0.4

    def __post_init__(self) -> None:
        validate.choice(SURROGATES, surrogate=self.surrogate)
        validate.positive(ridge=self.ridge)
