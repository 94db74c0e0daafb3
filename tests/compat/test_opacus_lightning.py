"""A module of Opacus' kind, which makes itself private, trains with Lightning's Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpkern import InvalidInput, PrivacyError
from dpkern.compat.opacus import PrivacyEngine
from dpkern.compat.opacus.data_loader import DPDataLoader

lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

RECORDS, BATCH = 40, 8


class Data(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
    """Two classes that a line tells apart."""

    def setup(self, stage: str | None = None) -> None:
        del stage
        x = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))
        self.records = TensorDataset(x, (x[:, 0] > 0).long())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.records, batch_size=BATCH)

    test_dataloader = train_dataloader


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """``make_private`` is called with the Trainer's loader, and what it returns is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.privacy_engine = PrivacyEngine()
        self.sizes: list[int] = []
        self.given: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        self.given = self.trainer.datamodule.train_dataloader()
        _, optimizer, _ = self.privacy_engine.make_private(
            module=self,
            optimizer=optimizer,
            data_loader=self.given,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=isinstance(self.given, DPDataLoader),
        )
        return optimizer

    def training_step(self, batch: Any, index: int) -> Tensor:
        del index
        x, y = batch
        self.sizes.append(len(x))
        return nn.functional.cross_entropy(self(x), y)

    def test_step(self, batch: Any, index: int) -> Tensor:
        del index
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def trainer(folder: Path, **options: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning.Trainer(
        **{"max_epochs": 2, "accelerator": "cpu", "logger": False, "default_root_dir": folder}
        | {"enable_progress_bar": False, "enable_model_summary": False}
        | options
    )


def data() -> Any:
    from dpkern.compat.opacus.lightning import DPLightningDataModule

    return DPLightningDataModule(Data())


def test_the_loader_of_the_trainer_is_the_private_one(tmp_path: Path) -> None:
    module, private = Module(), data()
    whole = trainer(tmp_path)
    whole.fit(module, private)
    engine, steps = module.privacy_engine, 2 * RECORDS // BATCH
    assert engine.step.steps == whole.global_step == steps
    assert module.given is private.train_dataloader()
    assert len(set(module.sizes)) > 1  # Poisson batches
    assert 0 < engine.get_epsilon(1e-3) < float("inf")
    assert engine.step.sampling["sampling"] == "poisson"
    assert whole.test(module, private, verbose=False)
    assert engine.step.steps == steps


@pytest.mark.parametrize(
    "options",
    [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}, {"overfit_batches": 1}],
    ids=lambda options: next(iter(options)),
)
def test_arguments_that_change_gradients_or_batches_are_refused(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput, match=next(iter(options))):
        trainer(tmp_path, **options).fit(Module(), data())


def test_a_run_is_not_resumed_without_its_ledger(tmp_path: Path) -> None:
    first = trainer(tmp_path, max_epochs=1)
    first.fit(Module(), data())
    first.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(PrivacyError, match="PrivateStrategy"):
        trainer(tmp_path).fit(Module(), data(), ckpt_path=tmp_path / "run.ckpt")


def test_other_data_modules_and_generators_are_refused() -> None:
    from dpkern.compat.opacus.lightning import DPLightningDataModule

    with pytest.raises(InvalidInput, match="one package"):
        DPLightningDataModule(object())
    with pytest.raises(InvalidInput, match="secure generator"):
        DPLightningDataModule(Data(), torch.Generator())
