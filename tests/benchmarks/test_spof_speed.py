"""The benchmark of SPOF's training time: what it compares, and its arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import spof_speed
from benchmarks.spof_cases import (
    BY_NAME,
    CASES,
    BookKeeping,
    Case,
    PerSample,
    Perturbed,
    setting,
    verify,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_variant_descends_along_its_loss(case: Case) -> None:
    verify(case)


@pytest.mark.parametrize("name", ["SPOF, torch, record by record", "DP-SGD, torch, book-keeping"])
def test_another_loss_is_noticed(name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        verify(replace(BY_NAME[name], loss="taylor"))


@pytest.mark.parametrize("kind", [PerSample, BookKeeping])
@pytest.mark.parametrize("batch", [1, 5])
def test_what_a_record_adds_is_clipped(kind: Any, batch: int) -> None:
    given = replace(setting(batch), epsilon=math.inf, clip=0.01, lr=1.0)
    variant = kind(given, batch)
    before = variant.values()
    variant.step()
    moved = (variant.values() - before).view(2, -1).norm(dim=1)
    assert 0 < moved.min() <= moved.max() <= 0.01 * batch * (1 + 1e-5)


@pytest.mark.parametrize("kind", [Perturbed, PerSample, BookKeeping])
def test_there_is_noise_at_a_finite_epsilon(kind: Any) -> None:
    torch.manual_seed(0)
    steps = []
    for epsilon in (1.0, 10.0, math.inf):
        variant = kind(replace(setting(1), epsilon=epsilon, lr=1.0), 1)
        before = variant.values()
        variant.step()
        steps.append(float((variant.values() - before).norm()))
    assert steps[0] > 3 * steps[1] > 3 * steps[2]


def test_a_reduction_is_the_part_of_the_time_that_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = {case.name: [42.8, 4.28] if "SPOF" in case.name else [100.0, 10.0] for case in CASES}
    monkeypatch.setattr(spof_speed, "rounds_of", lambda rounds: taken)
    found = spof_speed.measured(2)
    assert len(found["times"]) == len(CASES)
    assert [row["reduction %"] for row in found["reductions"]] == pytest.approx(
        [57.2] * len(spof_speed.PAIRS)
    )
    machine = {"dpkern": "1", "torch": "2", "processor": "P"}
    assert "| 57.2 % |" in spof_speed.markdown(machine, found)
