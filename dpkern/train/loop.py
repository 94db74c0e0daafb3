"""The training loop: draw a batch, forward and backward in physical chunks, one private step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..engine.capture import Capture
from ..engine.clipping import close_into, prepare
from ..engine.sampling import Batches
from ..step import DPStep
from .data import Dataset
from .models import evaluate
from .report import Epoch

EPSILON_POINTS = 15
"""Epsilon is computed after at most this many epochs of a run; with 0 points, never."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of logits and labels, summed over the samples."""


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of every model here."""
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


OnStep = Callable[[DPStep], None]
"""What a mechanism does before a step is finished, or to the parameters after it."""


@dataclass
class Diagnostics:
    """Seen while training and not covered by epsilon: never in a checkpoint."""

    training_loss: list[float] = field(default_factory=list)
    """Mean over the samples of each epoch, at the parameters they met."""
    batch_sizes: list[int] = field(default_factory=list)


class Training:
    """Model, private step, sampler and position of one run.

    Between steps everything here is consistent and may be saved; ``between_steps`` says whether
    it is.
    """

    def __init__(
        self,
        *,
        data: Dataset,
        model: nn.Module,
        step: DPStep,
        batches: Batches,
        steps_per_epoch: int,
        delta: float,
        max_physical_batch_size: int,
        epsilon_points: int = EPSILON_POINTS,
        loss: Loss = summed_cross_entropy,
        before: OnStep | None = None,
        after: OnStep | None = None,
    ) -> None:
        self.data = data
        self.model = model
        self.step = step
        self.batches = batches
        self.steps_per_epoch = steps_per_epoch
        self.delta = delta
        self.max_physical_batch_size = max_physical_batch_size
        self.epsilon_points = epsilon_points
        self.loss = loss
        self._before, self._after = before, after
        self.history: list[Epoch] = []
        self.diagnostics = Diagnostics()
        self.seconds = 0.0
        self.between_steps = True
        self._capture = Capture(model, loss_reduction="sum")
        prepare(self._capture, lambda: step.plan)
        self._loss_of_epoch, self._samples_of_epoch = 0.0, 0

    @property
    def finished(self) -> bool:
        return len(self.batches) == 0

    def run(
        self,
        *,
        on_step: Callable[[int], None] | None = None,
        on_epoch: Callable[[Epoch], None] | None = None,
    ) -> None:
        """Take the steps that are left.

        ``on_step(steps so far)`` and ``on_epoch(record)`` are called between steps. SIGINT and
        SIGTERM let the current step finish first.

        Raises:
            KeyboardInterrupt: interrupted. With ``between_steps`` the run can be saved as it
                stands; a second SIGINT does not wait for that.
        """
        started = time.perf_counter()
        try:
            self._capture.attach()
            with deferred_signals() as interrupted:
                self._run(on_step, on_epoch, interrupted)
        finally:
            self._capture.detach()
            self.seconds += time.perf_counter() - started

    def _run(
        self,
        on_step: Callable[[int], None] | None,
        on_epoch: Callable[[Epoch], None] | None,
        interrupted: threading.Event,
    ) -> None:
        for batch in self._draws():
            self._take(batch)
            complete = self.step.steps % self.steps_per_epoch == 0
            if complete:
                self.history.append(self._record())
            self.between_steps = True
            if on_step is not None:
                on_step(self.step.steps)
            if complete and on_epoch is not None:
                on_epoch(self.history[-1])
            if interrupted.is_set() and not self.finished:
                raise KeyboardInterrupt

    def _draws(self) -> Iterator[torch.Tensor]:
        batches = iter(self.batches)
        while not self.finished:
            # The sampler counts a batch when it hands it out, the step when it is finished.
            self.between_steps = False
            yield next(batches)

    def _take(self, batch: torch.Tensor) -> None:
        """One logical step; an empty Poisson draw adds nothing but noise."""
        self.diagnostics.batch_sizes.append(len(batch))
        for rows in torch.split(batch, self.max_physical_batch_size) if len(batch) else ():
            self._capture.hand_out(len(rows))
            logits = self.model(self.data.x_train[rows])
            loss = self.loss(logits, self.data.y_train[rows])
            torch.autograd.backward(loss)
            close_into(self.step, self._capture)
            self._loss_of_epoch += float(loss.detach())
            self._samples_of_epoch += len(rows)
        if self._before is not None:
            self._before(self.step)
        self.step.finish()
        if self._after is not None:
            self._after(self.step)

    def _record(self) -> Epoch:
        mean = self._loss_of_epoch / max(self._samples_of_epoch, 1)
        self.diagnostics.training_loss.append(mean)
        self._loss_of_epoch, self._samples_of_epoch = 0.0, 0
        loss, accuracy = evaluate(self.model, self.data.x_test, self.data.y_test)
        epoch = self.step.steps // self.steps_per_epoch
        epochs = self.batches.steps // self.steps_per_epoch
        # The accountant may take longer than a small epoch.
        points = self.epsilon_points
        account = points > 0 and (epoch == epochs or epoch % -(-epochs // points) == 0)
        seeded = self.step.key.seeded
        return Epoch(
            epoch=epoch,
            step=self.step.steps,
            heldout_loss=loss,
            heldout_accuracy=accuracy,
            epsilon=self.step.epsilon(self.delta) if account else None,
            epsilon_if_seed_secret=(
                self.step.epsilon_if_seed_secret(self.delta) if account and seeded else None
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run loads; plain values and tensors."""
        return {
            "model": self.model.state_dict(),
            "step": self.step.state_dict(),
            "batches": self.batches.state_dict(),
            "history": [vars(epoch) for epoch in self.history],
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            InvalidInput: the state of another configuration.
        """
        self.step.load_state_dict(state["step"])
        self.batches.load_state_dict(state["batches"])
        self.model.load_state_dict(state["model"])
        self.history = [Epoch(**record) for record in state["history"]]
        self.seconds = float(state["seconds"])


@contextmanager
def deferred_signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets instead of ending the process.

    The second one acts as usual. Outside the main thread, where Python delivers no signals,
    the event stays unset.
    """
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # None: installed by other than Python code, which could not be restored.
    previous = {number: handler for number, handler in handlers.items() if handler is not None}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(_number: int, _frame: FrameType | None) -> None:
        received.set()
        restore()

    for number in previous:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
