"""The training loop: draw a batch, forward and backward in physical batches, one private step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..engine.capture import Capture
from ..engine.clipping import close_into, prepare
from ..engine.demo.models import evaluate
from ..engine.sampling import PrivateBatchSampler
from ..step.noise_tables import named
from ..step.step import DPStep
from .data import Dataset
from .gradient_report import Epoch
from .steps import Steps

EPSILON_POINTS = 15
"""Maximum of epochs after which epsilon is computed; with 0 points, never."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function from logits and labels to the loss, summed over the samples."""


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of every model here."""
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


OnStep = Callable[[DPStep], None]
"""A mechanism's hook before a step is finished, or on the parameters after it."""


@dataclass
class Diagnostics:
    """Observations of training that epsilon does not cover: never in a checkpoint."""

    training_loss: list[float] = field(default_factory=list)
    """The mean over the samples of each epoch, at the parameters they met."""
    batch_sizes: list[int] = field(default_factory=list)


class TrainingSteps(Steps[Epoch]):
    """Model, private step, sampler and position of one run."""

    def __init__(
        self,
        *,
        data: Dataset,
        model: nn.Module,
        step: DPStep,
        batches: PrivateBatchSampler,
        steps_per_epoch: int,
        delta: float,
        max_physical_batch_size: int,
        epsilon_points: int = EPSILON_POINTS,
        loss: Loss = summed_cross_entropy,
        before: OnStep | None = None,
        after: OnStep | None = None,
    ) -> None:
        super().__init__()
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
        self.diagnostics = Diagnostics()
        self._capture = Capture(model, loss_reduction="sum")
        prepare(self._capture, lambda: step.plan)
        self._loss_of_epoch, self._samples_of_epoch = 0.0, 0

    def example(self, noise_source: str | None) -> Callable[[], None]:
        """Return a function that takes one step of generated samples, on a copy of the model.

        It has the run's mechanism, rule, sizes and kind of noise source, and none of its data, keys
        or draws.
        """
        draw = torch.Generator().manual_seed(0)
        count = round(self.step.expected_batch_size)
        device = self.data.x_train.device
        x = torch.rand((count, *self.data.row_shape), generator=draw).to(device)
        y = torch.randint(self.data.classes, (count,), generator=draw).to(device)
        model = copy.deepcopy(self.model)
        step = DPStep(
            self.step.mechanism,
            [p.detach() for p in model.parameters()],
            expected_batch_size=self.step.expected_batch_size,
            optimizer=self.step.optimizer,
            unsafe_seed=0,
            backend=self.step.backend,
            noise_source=named.source_of(noise_source),
            gradients="batched",
            **self.step.sampling,
        )
        training = TrainingSteps(
            data=replace(self.data, x_train=x, y_train=y),
            model=model,
            step=step,
            batches=self.batches,
            steps_per_epoch=self.steps_per_epoch,
            delta=self.delta,
            max_physical_batch_size=self.max_physical_batch_size,
            loss=self.loss,
            before=self._before,
            after=self._after,
        )
        training._capture.attach()
        return lambda: training.learn(torch.arange(count))

    @property
    def done(self) -> int:
        """The number of steps taken."""
        return self.step.steps

    @property
    def total(self) -> int:
        """The number of steps of the whole run."""
        return self.batches.steps

    @property
    def finished(self) -> bool:
        """Whether the sampler has yielded its last batch."""
        return len(self.batches) == 0

    def run(
        self,
        *,
        on_step: Callable[[int], None] | None = None,
        on_epoch: Callable[[Epoch], None] | None = None,
    ) -> None:
        """Take the steps that are left, seeing the gradients of single samples; see ``Steps``."""
        try:
            self._capture.attach()
            super().run(on_step=on_step, on_epoch=on_epoch)
        finally:
            self._capture.detach()

    def take(self) -> Epoch | None:
        """Draw a batch and take one logical step."""
        # The sampler counts a batch when it hands it out, the step when it is finished.
        self.learn(next(iter(self.batches)))
        return self._record() if self.step.steps % self.steps_per_epoch == 0 else None

    def learn(self, batch: torch.Tensor) -> None:
        """Learn from these rows; an empty Poisson draw adds nothing but noise."""
        self.diagnostics.batch_sizes.append(len(batch))
        for rows in torch.split(batch, self.max_physical_batch_size) if len(batch) else ():
            self._capture.begin_batch(len(rows))
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
        epochs = self.total // self.steps_per_epoch
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
        """Return what a resumed run loads besides its history; plain values and tensors."""
        return {
            "model": self.model.state_dict(),
            "step": self.step.state_dict(),
            "batches": self.batches.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            InvalidInput: the state of another configuration.
        """
        self.step.load_state_dict(state["step"])
        self.batches.load_state_dict(state["batches"])
        self.model.load_state_dict(state["model"])
