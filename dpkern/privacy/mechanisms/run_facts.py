"""Facts of a training run from which a mechanism is made: numbers, and two questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .site import Site


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of a run that fields of a mechanism may follow from.

    Attributes:
        sites: makes the geometry of every parameter, by running the model once.
        layers: makes the clip group of every parameter, one for each layer that owns some.
        classes: number of labels.
        steps: of the whole run.
        sample_rate: expected batch size / rows.
        rows: number of training rows.
        batch_size: expected.
        delta: of the run.
        lr: learning rate, for the gradient of the mean loss.

    Both functions raise InvalidInput where the run has no model.
    """

    sites: Callable[[], tuple[Site, ...]]
    layers: Callable[[], tuple[int, ...]]
    classes: int
    steps: int
    sample_rate: float
    rows: int
    batch_size: int
    delta: float
    lr: float
