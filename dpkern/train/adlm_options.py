"""Options of a run of AdLM or ILM; see ``options`` for the three types."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import validate
from ..objective.adlm_networks import ARCHITECTURES
from ..privacy.mechanisms import ObjectivePerturbation
from .options import RowOptions, required

PREFIX = "adlm-"
MODELS = tuple(PREFIX + name for name in ARCHITECTURES)

ARCHITECTURE_OF = {
    (8, 8): "digits",
    (28, 28): "mnist",
    (1, 28, 28): "mnist",
    (3, 32, 32): "cifar10",
}
"""Architectures by the shape of a row; others are numbers without places: "dense"."""

MAX_SEED = 2**40
"""The largest seed; initial weights and orders of batches share it."""


@dataclass(frozen=True, kw_only=True)
class LabelledOptions(RowOptions):
    """Everything that the privacy statement of such a run depends on.

    ``epsilon`` is that of relevances, inputs and labels together. ``batch_size`` enters the printed
    noise. ``public_data`` are records of the same kind that nothing protects: relevances that do
    not come from the training rows come from them.
    """

    NAMES = ObjectivePerturbation.names(trained_by="labelled rows")

    mechanism: str = "adlm"
    epochs: int = 60
    public_data: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        required(self.epsilon, what="one record's release")


@dataclass(frozen=True, kw_only=True)
class BoundedOptions:
    """Network and steps; ``model`` None goes by the shape of a row. The defaults are ours."""

    model: str | None = None
    lr: float = 0.1
    init_seed: int = 0

    def __post_init__(self) -> None:
        validate.choice((None, *MODELS), model=self.model)
        validate.positive(lr=self.lr)
        validate.integer(0, MAX_SEED, init_seed=self.init_seed)

    def architecture(self, row_shape: tuple[int, ...]) -> str:
        """Return the name in ``ARCHITECTURES``."""
        if self.model is not None:
            return self.model.removeprefix(PREFIX)
        return ARCHITECTURE_OF.get(row_shape, "dense")
