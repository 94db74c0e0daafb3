"""``dpkern.explain`` and reprs: the guarantee in words, with the numbers of the report."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern import InvalidInput, PrivacyEngine
from dpkern.engine.explain import WIDTH, explained
from dpkern.privacy.accounting import shown_bound


def trained(steps: int = 3, loader: bool = True, **options: Any) -> PrivacyEngine:
    """An engine after some steps of a small model on 512 records."""
    data = TensorDataset(torch.randn(512, 4), torch.randint(2, (512,)))
    module, engine = nn.Linear(4, 2), PrivacyEngine()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    options = {"max_grad_norm": 1.0, "noise_multiplier": 1.1} | options
    batches = DataLoader(data, batch_size=16) if loader else None
    made: Any = engine.make_private(
        module=module, optimizer=optimizer, data_loader=batches, **options
    )
    for (x, y), _ in zip(made[2] or [], range(steps), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return engine


def words(engine: PrivacyEngine, **options: Any) -> str:
    return re.sub(r"\s+", " ", explained(engine, **options))


def test_numbers_are_those_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    engine = trained()
    dpkern.explain(engine, delta=1e-4)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= WIDTH
    epsilon = engine.report(1e-4)["epsilon_certified"]
    text = re.sub(r"\s+", " ", printed)
    assert f"epsilon <= {shown_bound(epsilon, 3)} at delta = 0.0001" in text
    assert f"at most {shown_bound(math.exp(epsilon), 3)} times as often" in text
    assert "probability 0.03125" in text
    assert "3 steps" in text


def test_delta_follows_from_the_run() -> None:
    assert "at delta = 0.001." in words(trained())  # 512 records
    own = trained(loader=False, sample_rate=0.1, expected_batch_size=100)
    assert own.known_delta == 1e-4  # 1,000 records: not below 1e-3
    unknown = trained(loader=False, sample_rate=1.0, expected_batch_size=16)
    assert unknown.known_delta is None
    with pytest.raises(InvalidInput, match="delta"):
        explained(unknown)


def test_runs_without_a_guarantee_say_why() -> None:
    assert "Nothing is guaranteed: parameter 0 is released without noise." in words(
        trained(noise_multiplier=0.0)
    )
    seeded = words(trained(unsafe_seed=3))
    assert "Nothing is guaranteed: the noise comes from a known seed." in seeded
    assert re.search(r"Were the seed secret, epsilon would be 0\.\d+", seeded)
    assert "Guarantee" not in seeded


def test_conditions_and_scope_are_said() -> None:
    text = words(trained(loader=False, sample_rate=1.0, expected_batch_size=16), delta=1e-5)
    assert "It holds if - the caller draws batches as stated" in text
    assert "what rounds in floating-point sums is not covered" in words(trained(arithmetic="float"))
    exact = words(trained(arithmetic="exact"))
    assert "released bits, if a record's gradient depends on it alone" in exact


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ("poisson", "one record added to the training data or removed from it"),
        ("fixed", "one record of the training data replaced by another"),
        ("shuffled", "one record of the training data blanked out"),
    ],
)
def test_neighbours_are_those_of_the_sampling(sampling: str, said: str) -> None:
    assert said in words(trained(sampling=sampling), delta=1e-4)


def test_nothing_released_costs_nothing() -> None:
    assert "Nothing has been released yet, so epsilon is 0." in words(trained(steps=0))


def test_reprs_state_mechanism_sampling_and_epsilon() -> None:
    assert repr(PrivacyEngine()) == "<PrivacyEngine before make_private>"
    engine = trained()
    epsilon = shown_bound(engine.get_epsilon(1e-3), 3)
    assert repr(engine) == (
        "<PrivacyEngine: DP-SGD, poisson batches at rate 0.03125, 3 steps, "
        f"epsilon <= {epsilon} at delta = 0.001>"
    )
    loader = engine._made().loader
    assert repr(loader) == "<PrivateLoader: poisson batches of 512 records at rate 0.03125>"
