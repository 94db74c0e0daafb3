"""Accuracy of the same run without privacy: a ceiling to compare with, which nothing protects."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..base.rng import Key
from ..engine.demo.models import evaluate
from ..engine.sampling import make_batches
from ..step.step import DPStep
from .data import Dataset
from .label_privacy import WITHOUT_NOISE
from .loop import TrainingSteps

NOTE = "trained on the same rows without clipping and noise: not private, and kept nowhere"

WARNING = (
    "--ceiling trains on the protected rows without privacy and reports the held-out accuracy: "
    "no epsilon covers that number"
)


def non_private_ceiling(private: TrainingSteps, model: nn.Module, data: Dataset) -> dict[str, Any]:
    """Train a model as a private run does, without clipping and noise, and report its accuracy.

    Args:
        private: the run, whose sizes, rule, sampling and number of steps are taken.
        model: a new model with the run's initial parameters, which is trained.
        data: the rows as they were read.
    """
    key = Key.from_unsafe_seed(0)
    sampling = private.step.sampling
    batches = make_batches(
        sampling["sampling"],
        dataset_size=len(data.x_train),
        batch_size=round(private.step.expected_batch_size),
        steps=private.total,
        key=key,
    )
    step = DPStep(
        WITHOUT_NOISE,
        [p.detach() for p in model.parameters()],
        expected_batch_size=batches.expected_batch_size,
        optimizer=private.step.optimizer,
        unsafe_seed=0,
        backend=private.step.backend,
        gradients="batched",
        **sampling,
    )
    steps = TrainingSteps(
        data=data,
        model=model,
        step=step,
        batches=batches,
        steps_per_epoch=private.steps_per_epoch,
        delta=private.delta,
        max_physical_batch_size=private.max_physical_batch_size,
        epsilon_points=0,
    )
    steps.run()
    loss, accuracy = evaluate(model, data.x_test, data.y_test)
    return {"test_accuracy": accuracy, "test_loss": loss, "note": NOTE}
