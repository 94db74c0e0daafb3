"""Schedule the training of AdLM's networks, and hold its outcome.

Source: AdLM, algorithm 1, lines 20-30; learning rate and numbers of epochs are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..base.validate import choice, integer, positive
from .adlm_loss import LOSSES

OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True, kw_only=True)
class AdlmSchedule:
    """The schedule of training.

    Args:
        lr: step size, on the mean loss of a batch.
        optimizer: ``sgd``, plain steps as printed (line 29), or ``adam`` as the authors' code has.
        epochs: passes over the records, each in a new order; records that fill no batch wait.
        loss: ``polynomial``, or ``cross_entropy`` for pre-training and comparison.
        ranges: ranges of min-max normalisation when accuracy is measured: ``running`` does not mix
            records, ``batch`` takes the range of each batch, as the paper does.
        evaluate_every: epochs between measurements of accuracy; the last is always measured.

    Raises:
        InvalidInput: a field out of its range.
    """

    lr: float = 0.01
    optimizer: str = "sgd"
    epochs: int = 20
    loss: str = "polynomial"
    ranges: str = "running"
    evaluate_every: int = 1

    def __post_init__(self) -> None:
        positive(lr=self.lr)
        choice(OPTIMIZERS, optimizer=self.optimizer)
        integer(1, epochs=self.epochs)
        choice(LOSSES, loss=self.loss)
        choice(("running", "batch"), ranges=self.ranges)
        integer(1, evaluate_every=self.evaluate_every)


@dataclass
class AdlmOutcome:
    """The outcome of R runs.

    Attributes:
        epochs: epochs after which accuracy was measured, E of them.
        accuracy: ``[R, E]``, per cent of the held-out records.
        loss: ``[R, E]``, float64: mean training loss of these epochs, on noisy values.
        diverged: ``[R]``; such a run keeps the weights that it stopped with.
        seconds_per_epoch: seconds of an epoch of all runs together, without measuring.
    """

    epochs: list[int] = field(default_factory=list)
    accuracy: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    loss: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    diverged: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    seconds_per_epoch: float = 0.0
