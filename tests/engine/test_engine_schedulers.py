"""Schedules of noise and bounds: values, accounting, resume, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.engine.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
)
from tests.engine.engine_run import Run

SCHEDULES: list[tuple[str, Callable[[Any], Any], str, list[float]]] = [
    ("noise", lambda o: ExponentialNoise(o, gamma=0.5), "noise_multiplier", [4, 2, 1, 0.5]),
    (
        "step noise",
        lambda o: StepNoise(o, step_size=2, gamma=0.5),
        "noise_multiplier",
        [4, 4, 2, 2],
    ),
    (
        "lambda noise",
        lambda o: LambdaNoise(o, noise_lambda=lambda t: 1 / (1 + t)),
        "noise_multiplier",
        [4, 2, 4 / 3, 1],
    ),
    ("bound", lambda o: ExponentialGradClip(o, gamma=0.5), "max_grad_norm", [8, 4, 2, 1]),
    (
        "step bound",
        lambda o: StepGradClip(o, step_size=3, gamma=0.5),
        "max_grad_norm",
        [8, 8, 8, 4],
    ),
    (
        "lambda bound",
        lambda o: LambdaGradClip(o, scheduler_function=lambda t: 1 + t),
        "max_grad_norm",
        [8, 16, 24, 32],
    ),
]


@pytest.mark.parametrize(
    ("make", "name", "values"), [row[1:] for row in SCHEDULES], ids=[row[0] for row in SCHEDULES]
)
def test_schedules(make: Callable[[Any], Any], name: str, values: list[float]) -> None:
    run = Run(noise_multiplier=4.0, max_grad_norm=8.0)
    schedule = make(run.optimizer)
    seen = []
    state: dict[str, Any] = {}
    for epoch in range(4):
        seen.append(getattr(run.optimizer, name))
        run.train(most=1)
        if epoch == 2:
            state = {"engine": run.engine.state_dict(), "schedule": schedule.state_dict()}
        schedule.step()
    assert seen == pytest.approx(values)
    mechanism = run.engine.step.mechanism
    assert getattr(mechanism, name) == getattr(run.optimizer, name)
    multipliers = [entry[0] for entry in run.engine.accountant.history for _ in range(entry[2])]
    if name == "noise_multiplier":
        assert multipliers == pytest.approx(values, rel=1e-3)
    resumed = Run(noise_multiplier=4.0, max_grad_norm=8.0)
    again = make(resumed.optimizer)
    resumed.engine.load_state_dict(state["engine"])
    again.load_state_dict(state["schedule"])
    assert getattr(resumed.optimizer, name) == pytest.approx(values[2])
    again.step()
    assert getattr(resumed.optimizer, name) == pytest.approx(values[3])


def test_schedules_refuse() -> None:
    run = Run(max_physical_batch_size=1)
    with pytest.raises(InvalidInput, match="make_private"):
        ExponentialNoise(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), gamma=0.5)
    with pytest.raises(InvalidInput, match="gamma"):
        ExponentialNoise(run.optimizer, gamma=-0.5)
    with pytest.raises(InvalidInput, match="step_size"):
        StepNoise(run.optimizer, step_size=0, gamma=0.5)
    schedule = ExponentialNoise(run.optimizer, gamma=0.5)
    for bad in ({}, None, {"last_epoch": -3, "base": 1.0}):
        with pytest.raises(InvalidInput):
            schedule.load_state_dict(bad)  # type: ignore[arg-type]
    run.train(most=1)
    assert not run.loader.final
    with pytest.raises(PrivacyError, match="between steps"):
        schedule.step()
    assert (schedule.last_epoch, run.optimizer.noise_multiplier) == (0, 1.0)
    tiny = Run(noise_multiplier=0.1)
    shrinking = ExponentialNoise(tiny.optimizer, gamma=0.5)
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        shrinking.step()
    assert shrinking.last_epoch == 0


def test_per_layer_bounds_shrink_together() -> None:
    run = Run(clipping="per_layer", max_grad_norm=[1.0, 2.0, 3.0, 4.0])
    schedule = ExponentialGradClip(run.optimizer, gamma=0.5)
    run.train(most=1)
    schedule.step()
    assert run.optimizer.max_grad_norm == (0.5, 1.0, 1.5, 2.0)
    run.train(most=1)
