"""Launches and host time of a step on a device that is not here."""

from __future__ import annotations

import pytest
import torch

from benchmarks import device_host
from tests.engine.device_path import needs_emulation

pytestmark = [pytest.mark.slow, needs_emulation]


@pytest.fixture
def one_thread_of_torch() -> None:
    torch.set_num_threads(1)


def test_launches_are_counted_and_kernels_not_timed(one_thread_of_torch: None) -> None:
    row = device_host.measured("lstm", rounds=3)
    assert row["launches"] == sum(row["kernels"].values())
    assert row["kernels"]["update_tile_kernel"] == 1  # for all parameters together
    assert 0 < row["launches"] <= 3 * row["parameters"]
    assert row["private us"] > row["plain us"] > 0
    assert row["launches beside the graph"] == 0
    assert min(row["us as a graph"], row["us as a graph, Poisson"]) > 0
    step = device_host.graphed("lstm", rounds=3)
    assert 0 < step["recorded"] <= 8  # advance, beside those of a step
    assert step["launches"] == step["recorded"] - 1
    assert min(step["us as a graph"], step["us"]) > 0
    machine = {"dpkern": "0", "torch": "0", "processor": "some"}
    table = device_host.markdown(machine, [row], [step])
    assert "not yet run on a GPU" in table
    assert f"| {row['launches']} |" in table
