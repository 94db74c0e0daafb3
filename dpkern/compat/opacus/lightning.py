"""The data module of Opacus' Lightning example: batches for a module that makes itself private.

``configure_optimizers`` calls ``make_private`` with the training loader of the Trainer and throws
the loader that comes back away. That is no harm here: the data module gives out one loader of
Poisson batches, and ``make_private`` makes this very loader the run's. Import it by this module's
name; it needs Lightning. New programs are better off with ``dpkern.integrations.lightning``, whose
strategy accumulates, counts and resumes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ...base import validate as check
from ...base.errors import InvalidInput, PrivacyError
from ...base.lightning import lightning_package
from ...engine.loader import PrivateLoader

_pl: Any = import_module(lightning_package())

STRATEGY = "dpkern.integrations.lightning.PrivateStrategy"


class DPLightningDataModule(_pl.LightningDataModule):  # type: ignore[misc]
    """A data module whose training loader draws Poisson batches.

    Args:
        datamodule: the ordinary data module.
        generator: must be None: batches are drawn by a secure generator.

    Raises:
        InvalidInput: no data module, or a generator.
    """

    def __init__(self, datamodule: Any, generator: torch.Generator | None = None) -> None:
        super().__init__()
        check.that(
            isinstance(datamodule, _pl.LightningDataModule),
            "datamodule",
            f"a LightningDataModule of {_pl.__name__}",
            type(datamodule).__name__,
            "Import the data module, the Trainer and this class from one package.",
        )
        check.that(
            generator is None,
            "generator",
            "None",
            "a generator",
            "Leave it out: batches are drawn by a secure generator.",
        )
        self.datamodule = datamodule
        self._private: PrivateLoader | None = None

    def prepare_data(self) -> None:
        """Prepare the data of the ordinary module."""
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set the ordinary module up."""
        self.datamodule.setup(stage)

    def train_dataloader(self) -> PrivateLoader:
        """Return the loader of the run, the same at every call.

        Raises:
            InvalidInput: an argument of the Trainer that changes gradients or batches.
            PrivacyError: a checkpoint, which knows nothing of epsilon.
        """
        _check(self.trainer)
        if self._private is None:
            self._private = PrivateLoader.from_data_loader(self.datamodule.train_dataloader())
        return self._private

    def val_dataloader(self) -> Any:
        """Return the ordinary loader."""
        return self.datamodule.val_dataloader()

    def test_dataloader(self) -> Any:
        """Return the ordinary loader."""
        return self.datamodule.test_dataloader()

    def predict_dataloader(self) -> Any:
        """Return the ordinary loader."""
        return self.datamodule.predict_dataloader()

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Move a batch as the ordinary module does."""
        return self.datamodule.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch as the ordinary module does."""
        return self.datamodule.on_before_batch_transfer(batch, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch as the ordinary module does."""
        return self.datamodule.on_after_batch_transfer(batch, dataloader_idx)


def _check(trainer: Any) -> None:
    """Refuse what a Trainer would do to a private run without a word."""
    if trainer is None:
        return
    if trainer.ckpt_path is not None:
        raise PrivacyError(
            "ckpt_path",
            expected="a new run",
            got="a checkpoint, in which Lightning has kept no ledger",
            remedy=f"Use {STRATEGY}, which saves and resumes epsilon with the parameters.",
        )
    for name, plain in (
        ("gradient_clip_val", (None, 0)),
        ("accumulate_grad_batches", (1,)),
        ("overfit_batches", (0,)),
    ):
        got = getattr(trainer, name)
        if got not in plain:
            raise InvalidInput(
                f"Trainer({name}=...)",
                expected="its default",
                got=got,
                remedy=f"Leave it out, or see {STRATEGY}: make_private has clipped every record, "
                "and one batch is one step.",
            )


__all__ = ["DPLightningDataModule"]
