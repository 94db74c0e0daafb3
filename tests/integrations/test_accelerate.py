"""A private Accelerator takes the steps of the plain loop, in as many parts as it accumulates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.integrations.arguments import PrivacyArguments
from tests.integrations.plain_loop import (
    RATE,
    RECORDS,
    SEED,
    certified,
    mlp,
    rows,
    same,
    schedule,
    sgd,
    train,
)

pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

STEPS = RECORDS // 8


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


class Run:
    """A run with 8 expected records in a logical batch."""

    def __init__(self, factor: int, *, seed: int | None = SEED, **privacy: Any) -> None:
        from accelerate.state import AcceleratorState, GradientState

        from dpkern.integrations.accelerate import PrivateAccelerator

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.accelerator = PrivateAccelerator(cpu=True, gradient_accumulation_steps=factor)
        module = mlp()
        optimizer = sgd(module)
        given = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "options": {"unsafe_seed": seed}}
        self.model, self.optimizer, self.loader = self.accelerator.make_private(
            module,
            optimizer,
            DataLoader(rows(), batch_size=8 // factor, shuffle=True),
            privacy=PrivacyArguments(**(given | privacy)),
            steps=2 * STEPS,
        )
        self.scheduler = self.accelerator.prepare(schedule(optimizer))
        self.completed = 0
        self.passes = 0

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(loss(self.model, batch))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.passes += 1
                self.completed += self.accelerator.sync_gradients


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_the_steps_are_those_of_the_plain_loop(factor: int) -> None:
    run = Run(factor)
    run.train(2)
    model = mlp()
    physical = None if factor == 1 else 8 // factor
    train(model, rows(), loss, batch_size=8, physical=physical, epochs=2)
    assert same(run.model, model)
    assert not same(model, mlp())
    assert (run.passes > run.completed) == (factor > 1)


def test_the_certificate_is_that_of_the_plain_loop() -> None:
    run = Run(4, seed=None)
    run.train(2)
    plain = train(mlp(), rows(), loss, batch_size=8, physical=None, epochs=2, seed=None)
    assert certified(run.accelerator.engine) == certified(plain)


def test_schedules_and_synchronised_gradients_count_releases() -> None:
    run = Run(4)
    run.train(2)
    assert run.completed == run.accelerator.engine.step.steps == 2 * STEPS
    assert run.scheduler.get_last_lr() == [RATE * 0.5 ** (2 * STEPS)]


def test_schedules_count_releases_without_accumulate() -> None:
    run = Run(4)
    for batch in run.loader:
        run.optimizer.zero_grad()
        run.accelerator.backward(loss(run.model, batch))
        run.optimizer.step()
        run.scheduler.step()
    assert run.scheduler.get_last_lr() == [RATE * 0.5**STEPS]


def test_a_budget_is_met() -> None:
    run = Run(2, seed=None, noise_multiplier=None, target_epsilon=2.0, target_delta=1e-3)
    run.train(2)
    assert 1.9 < run.accelerator.engine.get_epsilon(1e-3) <= 2.0


def test_a_saved_state_goes_on_with_its_ledger(tmp_path: Path) -> None:
    first = Run(2)
    first.train(1)
    first.accelerator.save_state(str(tmp_path))
    second = Run(2)
    second.accelerator.load_state(str(tmp_path))
    second.train(1)
    whole = Run(2)
    whole.train(2)
    assert same(second.model, whole.model)
    assert certified(second.accelerator.engine) == certified(whole.accelerator.engine)


def test_a_state_is_loaded_into_a_private_run_only(tmp_path: Path) -> None:
    from dpkern.integrations.accelerate import PrivateAccelerator

    Run(1).accelerator.save_state(str(tmp_path))
    with pytest.raises(PrivacyError, match=r"accelerator\.make_private before"):
        PrivateAccelerator().load_state(str(tmp_path))


def test_clipping_of_sums_is_refused() -> None:
    run = Run(1)
    with pytest.raises(InvalidInput, match=r"max_grad_norm in PrivacyArguments"):
        run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)


def test_a_second_run_is_refused() -> None:
    run = Run(1)
    privacy = PrivacyArguments(noise_multiplier=1.0, max_grad_norm=1.0)
    module = mlp()
    with pytest.raises(InvalidInput, match="PrivateAccelerator"):
        run.accelerator.make_private(module, sgd(module), DataLoader(rows()), privacy=privacy)


def test_loaders_that_are_no_training_data_stay_ordinary() -> None:
    run = Run(1)
    held_out = run.accelerator.prepare(DataLoader(rows(), batch_size=5))
    with torch.no_grad():
        assert sum(len(run.model(x)) for x, _ in held_out) == RECORDS


def test_training_without_make_private_is_refused() -> None:
    from accelerate.state import AcceleratorState, GradientState

    from dpkern.integrations.accelerate import PrivateAccelerator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = PrivateAccelerator(cpu=True)
    module = mlp()
    model, _, loader = accelerator.prepare(module, sgd(module), DataLoader(rows(), batch_size=4))
    with pytest.raises(PrivacyError, match="make_private"):
        accelerator.backward(loss(model, next(iter(loader))))
    assert all(p.grad is None for p in module.parameters())


def test_batches_are_not_left_out_by_hand() -> None:
    run = Run(2)
    with pytest.raises(InvalidInput, match="goes on by itself"):
        run.accelerator.skip_first_batches(run.loader, 1)
    held_out = run.accelerator.prepare(DataLoader(rows(), batch_size=5))
    assert len(list(run.accelerator.skip_first_batches(held_out, 2))) == len(held_out) - 2


@pytest.mark.parametrize("steps", [0, -5])
def test_a_number_of_steps_is_positive(steps: int) -> None:
    run = Run(1)
    run.accelerator.engine = None
    with pytest.raises(InvalidInput, match="steps: expected a positive number"):
        run.accelerator.make_private(
            run.model,
            run.optimizer,
            DataLoader(rows(), batch_size=4),
            privacy=PrivacyArguments(noise_multiplier=1.0, max_grad_norm=1.0),
            steps=steps,
        )
