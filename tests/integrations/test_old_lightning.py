"""Programs that import ``pytorch_lightning`` get a strategy that its Trainer takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")

PROGRAM = """
import {package} as pl
import torch
from dpkern.integrations import PrivacyArguments
from dpkern.integrations.lightning import PrivateStrategy

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 2)
    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randint(2, (32,)))
strategy = PrivateStrategy(PrivacyArguments(noise_multiplier=1.0, max_grad_norm=1.0))
trainer = pl.Trainer(strategy=strategy, max_epochs=1, accelerator="cpu", logger=False,
                     enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=16))
print("steps", trainer.global_step)
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_the_strategy_is_of_the_package_that_the_program_imports(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(package=package)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "steps 2" in done.stdout, done.stderr
