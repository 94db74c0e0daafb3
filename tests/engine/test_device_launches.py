"""How many kernels a private step launches on a device, counted by the driver.

Not yet run on a GPU: launches of torch's own operations are not among them.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from tests.engine.device_path import Driver, needs_emulation
from tests.engine.test_device_ops import MODELS, ROWS, loss_of

pytestmark = needs_emulation

MOST = {"gpt2": 32, "vit": 37, "resnet": 28, "lstm": 18}
"""Launches of our kernels in a step, as they are now and a few more: a rise must be wanted."""


def launched(name: str, steps: int = 3) -> tuple[Counter[str], nn.Module]:
    """Launches of the last of some steps."""
    build, draw = MODELS[name]
    torch.manual_seed(0)
    driver, model = Driver(), build()
    with driver.on():
        made, optimizer, loader = dpkern.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(draw()), batch_size=ROWS),
            sampling="fixed",
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            unsafe_seed=1,
            arithmetic="float",
        )
        for _ in range(steps):
            for (x,) in loader:
                driver.launches.clear()
                optimizer.zero_grad()
                loss_of(made(x), x).backward()
                optimizer.step()
    return driver.launches, model


@pytest.mark.parametrize("name", MODELS)
def test_a_step_launches_few_kernels(name: str) -> None:
    launches, model = launched(name)
    parameters = len(list(model.parameters()))
    print(name, parameters, launches.total(), dict(launches))
    assert launches["update_tile_kernel"] == 1  # for all parameters together
    assert launches["clip_factors_kernel"] == 1
    assert launches["sum_kernel"] <= 2  # of gradients in float32 and in 16 bits, all layers' each
    assert 0 < launches.total() <= MOST[name]
    assert launches.total() <= 2.5 * parameters


def test_launches_do_not_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = launched("lstm")
    build, draw = MODELS["lstm"]
    monkeypatch.setitem(MODELS, "lstm", (build, lambda: draw().repeat(2, 1)))
    monkeypatch.setattr("tests.engine.test_device_launches.ROWS", 2 * ROWS)
    after, _ = launched("lstm")
    assert after == before
