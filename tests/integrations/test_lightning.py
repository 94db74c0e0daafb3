"""A private strategy takes the steps of the plain loop with modules that have training_step."""

from __future__ import annotations

import logging
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

lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

STEPS = RECORDS // 8


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A module as Lightning's users write it; ``calls`` counts what its step sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.calls = 0
        self.estimated = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Any:
        self.calls += 1
        return loss(self, batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("held out", loss(self, batch))

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self)
        self.estimated = self.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]


def fit(
    module: Any,
    factor: int = 1,
    *,
    seed: int | None = SEED,
    privacy: dict[str, Any] | None = None,
    held_out: Any = None,
    ckpt_path: Any = None,
    loader: Any = None,
    **options: Any,
) -> Any:
    from dpkern.integrations.lightning import PrivateStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    chosen = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "options": {"unsafe_seed": seed}}
    given = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "accumulate_grad_batches": factor,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = PrivateStrategy(PrivacyArguments(**(chosen | (privacy or {}))))
    trainer = lightning.Trainer(strategy=strategy, **(given | options))
    loader = loader or DataLoader(rows(), batch_size=8 // factor, shuffle=True)
    trainer.fit(module, loader, held_out, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_the_steps_are_those_of_the_plain_loop(factor: int) -> None:
    module = Module()
    fit(module, factor)
    model = mlp()
    physical = None if factor == 1 else 8 // factor
    train(model, rows(), loss, batch_size=8, physical=physical, epochs=2)
    assert same(module.net, model)
    assert not same(model, mlp())
    assert (module.calls > 2 * STEPS) == (factor > 1)


def test_a_step_may_call_the_only_network_and_must_call_the_module_of_several() -> None:
    class Direct(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            return loss(self.net, batch)

    class Halves(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = self.net[:2], self.net[2:]
            del self.net

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    class Apart(Halves):
        def training_step(self, batch: Any, index: int) -> Any:
            return loss(nn.Sequential(self.first, self.second), batch)

    direct, halves, model = Direct(), Halves(), mlp()
    fit(direct, 2)
    fit(halves, 2)
    train(model, rows(), loss, batch_size=8, physical=4, epochs=2)
    assert same(direct.net, model)
    assert same(nn.Sequential(*halves.first, *halves.second), model)
    with pytest.raises(PrivacyError, match="Call the module itself"):
        fit(Apart(), 2)


def test_the_certificate_is_that_of_the_plain_loop() -> None:
    trainer = fit(Module(), 4, seed=None)
    plain = train(mlp(), rows(), loss, batch_size=8, physical=None, epochs=2, seed=None)
    assert certified(trainer.strategy.engine) == certified(plain)


def test_steps_and_schedules_count_releases() -> None:
    module = Module()
    trainer = fit(module, 4)
    assert trainer.global_step == trainer.strategy.engine.step.steps == 2 * STEPS
    assert module.estimated == 2 * STEPS
    assert trainer.optimizers[0].param_groups[0]["lr"] == RATE * 0.5 ** (2 * STEPS)


def test_epsilon_reaches_loggers_and_callbacks(tmp_path: Path) -> None:
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    trainer = fit(Module(), 2, seed=None, logger=logger, log_every_n_steps=1)
    spent = trainer.strategy.engine.accountant.bound_of(0.01)
    assert float(trainer.callback_metrics["epsilon"]) == spent
    assert float(trainer.callback_metrics["delta"]) == 0.01
    written = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert "epsilon" in written[0]
    assert len(written) >= 2 * STEPS
    assert "grad_norm" not in written[0]


def test_held_out_batches_stay_ordinary() -> None:
    held_out = DataLoader(rows(), batch_size=5)
    trainer = fit(Module(), 2, held_out=held_out)
    assert float(trainer.callback_metrics["held out"]) > 0


def test_a_budget_is_met() -> None:
    budget = {"noise_multiplier": None, "target_epsilon": 2.0, "target_delta": 1e-3}
    trainer = fit(Module(), 2, seed=None, privacy=budget)
    assert 1.9 < trainer.strategy.engine.get_epsilon(1e-3) <= 2.0


@pytest.mark.parametrize("stop", [STEPS, STEPS + 1])
def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path, stop: int) -> None:
    first = fit(Module(), 2, max_steps=stop, max_epochs=None)
    path = tmp_path / "run.ckpt"
    first.save_checkpoint(path)
    module = Module()
    second = fit(module, 2, ckpt_path=path, max_steps=2 * STEPS, max_epochs=None)
    whole = Module()
    other = fit(whole, 2, max_steps=2 * STEPS, max_epochs=None)
    assert second.global_step == second.strategy.engine.step.steps == 2 * STEPS
    assert same(module.net, whole.net)
    assert certified(second.strategy.engine) == certified(other.strategy.engine)


def test_a_checkpoint_without_its_privacy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    fit(Module()).save_checkpoint(path)
    content = torch.load(path, weights_only=False)
    del content["dpkern"]
    torch.save(content, path)
    with pytest.raises(PrivacyError, match="ledger of its releases"):
        fit(Module(), ckpt_path=path, max_epochs=3)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders"),
    ],
)
def test_arguments_that_cannot_be_private_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        fit(Module(), **options)


def test_accumulation_that_changes_is_refused() -> None:
    scheduler = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    with pytest.raises(InvalidInput, match="callbacks"):
        fit(Module(), callbacks=[scheduler])


def test_steps_taken_by_hand_are_refused() -> None:
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(InvalidInput, match="automatic_optimization"):
        fit(module)


def test_two_loaders_are_refused() -> None:
    loaders = [DataLoader(rows(), batch_size=4), DataLoader(rows(), batch_size=4)]
    with pytest.raises(InvalidInput, match="train_dataloaders"):
        fit(Module(), loader=loaders)


def test_a_step_that_leaves_a_part_out_is_refused() -> None:
    class Silent(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            return None

    with pytest.raises(InvalidInput, match="training_step"):
        fit(Silent(), 4)


def test_searches_that_train_and_take_back_are_refused() -> None:
    from dpkern.integrations.lightning import PrivateStrategy

    with pytest.raises(InvalidInput, match="LearningRateFinder"):
        fit(Module(), callbacks=[lightning.pytorch.callbacks.LearningRateFinder()])

    class Sized(Module):
        batch_size = 4

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(rows(), batch_size=self.batch_size)

    trainer = lightning.Trainer(
        strategy=PrivateStrategy(PrivacyArguments(noise_multiplier=1.0, max_grad_norm=0.5)),
        callbacks=[lightning.pytorch.callbacks.BatchSizeFinder()],
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with pytest.raises(InvalidInput, match="BatchSizeFinder"):
        trainer.fit(Sized())
