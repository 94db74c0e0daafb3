"""Train privately with Lightning: a strategy for modules with ``training_step``.

    trainer = lightning.Trainer(strategy=PrivateStrategy(PrivacyArguments(...)), max_epochs=3)
    trainer.fit(module, loader)

One batch of the Trainer is one logical batch: ``accumulate_grad_batches`` times the loader's batch
size in expected records, in physical batches of the loader's size. ``global_step``, schedulers and
``estimated_stepping_batches`` count releases. ``epsilon`` is logged as the module logs its metrics,
so every logger and callback of the Trainer finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError
from ..base.lightning import lightning_package
from ..engine import PrivacyEngine
from .arguments import PrivacyArguments
from .logical_batches import LogicalBatch, LogicalBatches, enlarged, physical_size, train_parts

PACKAGE = lightning_package()
"""The package whose Trainer takes the strategy."""

_callbacks: Any = import_module(f"{PACKAGE}.callbacks")
_strategies: Any = import_module(f"{PACKAGE}.strategies")

FITTING = import_module(f"{PACKAGE}.trainer.states").TrainerFn.FITTING

STATE = "dpkern"
"""Key of the engine's state in a checkpoint."""


class PrivateStrategy(_strategies.SingleDeviceStrategy):  # type: ignore[misc]
    """The strategy that makes a module, its optimizer and its training loader private.

    ``engine`` is the ``PrivacyEngine`` of the run, once training has begun.

    Args:
        privacy: the privacy arguments.
        device: the one device of the run.
        options: those of ``SingleDeviceStrategy``.

    Raises:
        InvalidInput, PrivacyError: in ``fit``, what a private run cannot honour.
    """

    def __init__(
        self, privacy: PrivacyArguments, device: torch.device | str = "cpu", **options: Any
    ) -> None:
        super().__init__(device=device, **options)
        self.privacy = privacy
        self.engine: PrivacyEngine | None = None
        self._batches: LogicalBatches | None = None
        self._physical: int | None = None
        self._resumed: dict[str, Any] | None = None

    def setup(self, trainer: Any) -> None:
        """Refuse what cannot be private, and let epsilon be logged.

        Raises:
            InvalidInput: names the argument.
        """
        if trainer.state.fn == FITTING:
            _check_trainer(trainer)
            check.that(
                self.lightning_module.automatic_optimization,
                "module.automatic_optimization",
                "True",
                False,
                "Let Lightning take the steps, or use PrivacyEngine and the private loader without "
                "this strategy.",
            )
            trainer.callbacks.append(_LoggedEpsilon(self))
        super().setup(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return logical batches in the place of the training loader; leave other loaders alone.

        Raises:
            InvalidInput: a second training loader, or one whose records cannot be drawn anew.
        """
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if self._batches is not None:
            raise InvalidInput(
                "train_dataloaders",
                expected="one loader for the whole run",
                got="a second one",
                remedy="Pass one DataLoader, without reload_dataloaders_every_n_epochs, and make a "
                "new PrivateStrategy for another fit.",
            )
        factor = trainer.accumulate_grad_batches
        self._batches = LogicalBatches(enlarged(dataloader, factor))
        self._physical = physical_size(dataloader, factor)
        trainer.accumulate_grad_batches = 1
        return self._batches

    def on_train_start(self) -> None:
        """Make the run private, with all objects at hand, and go on from a checkpoint."""
        super().on_train_start()
        trainer, batches = self.lightning_module.trainer, self._batches
        assert batches is not None  # the loop has set its data up
        steps = trainer.estimated_stepping_batches
        self.engine, batches.private = self.privacy.make(
            network_of(self.lightning_module),
            self.optimizers[0],
            batches.original,
            steps=None if steps in (-1, float("inf")) else steps,
            max_physical_batch_size=self._physical,
        )
        if self._resumed is not None:
            self.engine.load_state_dict(self._resumed)
            self._resumed = None

    def batch_to_device(self, batch: Any, *arguments: Any, **named: Any) -> Any:
        """Move every physical batch as the module's hooks say."""
        move = super().batch_to_device
        if isinstance(batch, LogicalBatch):
            return LogicalBatch(move(part, *arguments, **named) for part in batch)
        return move(batch, *arguments, **named)

    def training_step(self, batch: Any, *arguments: Any, **named: Any) -> Any:
        """Call the module's ``training_step`` for every physical batch; return the last output.

        Lightning runs the backward pass of the last one and takes the step.
        """
        step = super().training_step
        if not isinstance(batch, LogicalBatch):
            return step(batch, *arguments, **named)
        left, optimizer = len(batch), self.optimizers[0]

        def train(part: Any) -> Any:
            nonlocal left
            left -= 1
            output = step(part, *arguments, **named)
            if left:
                self.backward(_loss_of(output), optimizer)
            return output

        return train_parts(batch, optimizer, train)

    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **named: Any) -> None:
        """Save what the ledger has recorded beside the parameters."""
        if self.engine is not None:
            checkpoint[STATE] = self.engine.state_dict()
        super().save_checkpoint(checkpoint, *arguments, **named)

    def load_checkpoint(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Load a checkpoint and keep its ledger for the start of training.

        Raises:
            PrivacyError: a run to be continued whose privacy is not recorded.
        """
        checkpoint: dict[str, Any] = super().load_checkpoint(*arguments, **named)
        if self.lightning_module.trainer.state.fn == FITTING:
            if STATE not in checkpoint:
                raise PrivacyError(
                    "ckpt_path",
                    expected="a checkpoint of a private run",
                    got="one without the ledger of its releases",
                    remedy="Start a new run: the privacy that these steps have cost is not known.",
                )
            self._resumed = checkpoint[STATE]
        return checkpoint


class _LoggedEpsilon(_callbacks.Callback):  # type: ignore[misc]
    """Logs epsilon and its delta with the metrics of the module."""

    def __init__(self, strategy: PrivateStrategy) -> None:
        self.strategy = strategy

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Log at the steps at which the Trainer logs."""
        if trainer._logger_connector.should_update_logs:
            self._log(module.log)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Log at the end of an epoch."""
        self._log(module.log)

    def _log(self, log: Callable[..., None]) -> None:
        engine = self.strategy.engine
        found = None if engine is None else self.strategy.privacy.epsilon(engine)
        if found is not None:
            # A number would be rounded to float32, perhaps to a smaller epsilon than is certified.
            log("epsilon", torch.tensor(found[0], dtype=torch.float64))
            log("delta", torch.tensor(found[1], dtype=torch.float64))


def network_of(module: nn.Module) -> nn.Module:
    """Return the part of a LightningModule whose passes are private.

    Where one submodule holds all trained parameters it is that one, so that ``training_step`` may
    call it as ``self.net(x)``; otherwise the module itself, which ``training_step`` calls as
    ``self(x)``.
    """

    def trains(parameters: Iterable[nn.Parameter]) -> bool:
        return any(parameter.requires_grad for parameter in parameters)

    parts = [part for part in module.children() if trains(part.parameters())]
    whole = trains(module.parameters(recurse=False)) or len(parts) != 1
    return module if whole or isinstance(parts[0], nn.ModuleList | nn.ModuleDict) else parts[0]


def _loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, torch.Tensor):
        raise InvalidInput(
            "training_step",
            expected="a loss for every physical batch",
            got=type(loss).__name__,
            remedy="Return the loss; a batch cannot be left out once its records are drawn.",
        )
    return loss


def _check_trainer(trainer: Any) -> None:
    """Refuse arguments of the Trainer that a private run cannot honour.

    Raises:
        InvalidInput: names the argument.
    """
    refused = {
        "gradient_clip_val": (
            not trainer.gradient_clip_val,
            "max_grad_norm in PrivacyArguments clips every record's gradient",
        ),
        "overfit_batches": (not trainer.overfit_batches, "private batches are drawn anew"),
        "reload_dataloaders_every_n_epochs": (
            not trainer.reload_dataloaders_every_n_epochs,
            "one private loader counts all releases of a run",
        ),
        "precision": (
            not str(trainer.precision).startswith("16"),
            "float16 needs a scale of the loss; bf16-mixed needs none",
        ),
        "callbacks": (
            not any(
                isinstance(c, _callbacks.GradientAccumulationScheduler) for c in trainer.callbacks
            ),
            "the expected batch size stays the same in a run: pass accumulate_grad_batches",
        ),
    }
    for callback in trainer.callbacks:
        if isinstance(callback, _callbacks.BatchSizeFinder | _callbacks.LearningRateFinder):
            raise InvalidInput(
                "Trainer(callbacks=...), Tuner",
                expected="what a private run can honour",
                got=type(callback).__name__,
                remedy="Leave it out, or try values with another strategy on public records: its "
                "trials are releases too, and it takes them back from the model only.",
            )
    for name, (accepted, reason) in refused.items():
        if not accepted:
            raise InvalidInput(
                f"Trainer({name}=...)",
                expected="what a private run can honour",
                got=str(getattr(trainer, name)),
                remedy=f"Leave it out: {reason}.",
            )
