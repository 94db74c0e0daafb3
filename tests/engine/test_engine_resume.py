"""Saving and resuming private runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dpkern.base.errors import InvalidInput, PrivacyError
from tests.engine.engine_run import DELTA, ROWS, Run, data


@cache
def uninterrupted(kind: str) -> Run:
    """Two epochs at once; nobody trains it further."""
    whole = Run(kind=kind, max_physical_batch_size=5)
    whole.train(epochs=2)
    return whole


@pytest.mark.parametrize("stop", [4, 6, 8])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop"])
def test_seeded_runs_resume_identically(stop: int, kind: str, tmp_path: Path) -> None:
    whole = uninterrupted(kind)
    first = Run(kind=kind, max_physical_batch_size=5)
    while first.engine.step.steps < stop:
        for x, y in first.loader:
            first.optimizer.zero_grad()
            nn.functional.cross_entropy(first.module(x), y).backward()
            first.optimizer.step()
            if first.engine.step.steps == stop and first.loader.final:
                break
    path = tmp_path / "run.pt"
    first.engine.save_checkpoint(path=path, module=first.module, optimizer=first.optimizer)
    resumed = Run(kind=kind, max_physical_batch_size=5)
    resumed.engine.load_checkpoint(path=path, module=resumed.module, optimizer=resumed.optimizer)
    assert resumed.engine.step.steps == stop
    while resumed.engine.step.steps < 12:
        resumed.train()
    assert torch.equal(resumed.values(), whole.values())
    assert resumed.engine.accountant.history == whole.engine.accountant.history


def test_unseeded_resume_keeps_the_history() -> None:
    first, second = Run(unsafe_seed=None), Run(unsafe_seed=None)
    first.train(most=3)
    state = first.engine.state_dict()
    assert "key" not in repr(state).replace("dict_keys", "")
    second.engine.load_state_dict(state)
    assert second.engine.get_epsilon(DELTA) == first.engine.get_epsilon(DELTA)
    assert second.engine.step.key._secret != first.engine.step.key._secret
    assert second.train(most=100) == 3


def test_nothing_is_saved_between_a_batch_and_its_step() -> None:
    run = Run(max_physical_batch_size=2)
    x, y = next(iter(run.loader))
    nn.functional.cross_entropy(run.module(x), y).backward()
    with pytest.raises(PrivacyError, match=r"optimizer\.step"):
        run.engine.state_dict()
    run.optimizer.step()
    with pytest.raises(PrivacyError):  # parts of the logical batch are still to come
        run.engine.state_dict()


def test_states_of_other_runs_are_refused() -> None:
    first = Run()
    first.train(most=2)
    state = first.engine.state_dict()
    others = (
        Run(noise_multiplier=2.0),
        Run(unsafe_seed=4),
        Run(sampling="fixed"),
        Run(data_loader=DataLoader(data(), batch_size=ROWS)),
    )
    for other in others:
        before = other.engine.state_dict()
        with pytest.raises(InvalidInput):
            other.engine.load_state_dict(state)
        assert other.engine.state_dict() == before
    for bad in ({}, None, state | {"version": 9}, state | {"loader": None}):
        with pytest.raises(InvalidInput):
            Run().engine.load_state_dict(bad)
    with pytest.raises(PrivacyError):
        first.engine.load_state_dict(state)


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    run = Run()
    run.train(most=1)
    with pytest.raises(InvalidInput, match="path"):
        run.engine.load_checkpoint(path=tmp_path / "none.pt", module=run.module)
    path = tmp_path / "run.pt"
    run.engine.save_checkpoint(path=path, module=run.module, checkpoint_dict={"epoch": 3})
    other = Run()
    with pytest.raises(InvalidInput, match="optimizer_state_dict"):
        other.engine.load_checkpoint(path=path, module=other.module, optimizer=other.optimizer)
    content = other.engine.load_checkpoint(path=path, module=other.module)
    assert content["epoch"] == 3
    assert other.engine.step.steps == 1
