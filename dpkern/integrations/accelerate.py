"""Train privately with Hugging Face Accelerate: an ``Accelerator`` that makes training private.

    accelerator = PrivateAccelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.make_private(model, optimizer, loader, privacy=...)
    scheduler = accelerator.prepare(scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

A logical batch has ``gradient_accumulation_steps`` times the loader's batch size in expected
records. ``accelerator.sync_gradients`` is true for its last physical batch, and schedules step
there only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError
from ..engine import PrivacyEngine
from ..engine.loader import PrivateLoader
from .arguments import PrivacyArguments
from .logical_batches import enlarged, physical_size

check.require("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import send_to_device  # noqa: E402


class PrivateAccelerator(Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` for one private training run, in one process.

    ``engine`` is the ``PrivacyEngine`` of the run; ``save_state`` and ``load_state`` keep what its
    ledger has recorded.

    Args:
        options: those of ``Accelerator``.

    Raises:
        InvalidInput: several processes, or ``mixed_precision="fp16"``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.engine: PrivacyEngine | None = None
        self.private_loader: PrivateLoader | None = None
        check.that(
            self.num_processes == 1,
            "PrivateAccelerator",
            "one process",
            f"{self.num_processes} processes",
            "Use PrivacyEngine with DistributedDataParallel.",
        )
        check.that(
            self.scaler is None,
            "mixed_precision",
            "'no' or 'bf16'",
            self.mixed_precision,
            "Pass mixed_precision='bf16': float16 needs a scale of the loss.",
        )

    def make_private(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        *,
        privacy: PrivacyArguments,
        steps: int | None = None,
    ) -> tuple[nn.Module, AcceleratedOptimizer, PlacedBatches]:
        """Make the objects of a run private and prepare them.

        Args:
            module, optimizer, data_loader: as they are before ``prepare``.
            privacy: the privacy arguments.
            steps: number of releases of the whole run, for a target epsilon: epochs times the
                loader's length over ``gradient_accumulation_steps``, rounded up.

        Returns:
            The prepared module, the prepared optimizer, and the physical batches of the private
            loader, on the accelerator's device.

        Raises:
            DPKernError: as ``make_private``, or a second call.
        """
        check.that(
            steps is None or steps > 0,
            "steps",
            "a positive number of releases, or None",
            steps,
            "Pass epochs * len(data_loader) / gradient_accumulation_steps.",
        )
        check.that(
            self.engine is None,
            "make_private",
            "one call for each accelerator",
            "a second one",
            "Make another PrivateAccelerator; epsilons of runs on the same data add up.",
        )
        factor = int(self.gradient_state.num_steps)
        module = self.prepare_model(module)
        self.engine, loader = privacy.make(
            module,
            optimizer,
            enlarged(data_loader, factor),
            steps=steps,
            max_physical_batch_size=physical_size(data_loader, factor),
        )
        self.private_loader = loader
        # The loss of a physical batch is divided by nothing: its records are clipped one by one.
        self.gradient_accumulation_steps = 1
        self.register_for_checkpointing(self.engine)
        prepared = self.prepare_optimizer(_PrivateOptimizer(optimizer, loader))
        return module, prepared, PlacedBatches(loader, self.device)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run the backward pass of a physical batch.

        Raises:
            PrivacyError: ``make_private`` was not called: the gradients would be ordinary ones.
        """
        if self.engine is None:
            raise PrivacyError(
                "accelerator.backward",
                expected="a call of accelerator.make_private before",
                got="none",
                remedy="Replace prepare(model, optimizer, loader) by make_private(model, "
                "optimizer, loader, privacy=...), or take a plain Accelerator.",
            )
        super().backward(loss, **options)

    def load_state(self, *arguments: Any, **options: Any) -> None:
        """Load what ``save_state`` wrote, the engine's ledger included.

        Raises:
            PrivacyError: ``make_private`` was not called: nothing would take the ledger over.
        """
        if self.engine is None:
            raise PrivacyError(
                "accelerator.load_state",
                expected="a call of accelerator.make_private before",
                got="none",
                remedy="Call make_private(model, optimizer, loader, privacy=...) as in the run "
                "that was saved, then load_state.",
            )
        super().load_state(*arguments, **options)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Leave out batches of a loader that is not private.

        Raises:
            InvalidInput: the private loader.
        """
        if isinstance(dataloader, PlacedBatches):
            raise InvalidInput(
                "dataloader",
                expected="a loader of held-out records",
                got="the private one",
                remedy="Leave the call out: after load_state the private loader goes on by itself.",
            )
        return super().skip_first_batches(dataloader, num_batches)

    def _do_sync(self) -> None:
        """Let ``accumulate`` end with the last physical batch of a logical one."""
        if self.private_loader is None:
            super()._do_sync()
        else:
            self.gradient_state._set_sync_gradients(self.private_loader.final)

    def clip_grad_norm_(self, *_: Any, **__: Any) -> None:
        """Refuse.

        Raises:
            InvalidInput: always, once the run is private.
        """
        self._refuse_clipping("clip_grad_norm_")

    def clip_grad_value_(self, *_: Any, **__: Any) -> None:
        """Refuse.

        Raises:
            InvalidInput: always.
        """
        self._refuse_clipping("clip_grad_value_")

    @staticmethod
    def _refuse_clipping(name: str) -> None:
        raise InvalidInput(
            f"accelerator.{name}",
            expected="no clipping of sums of gradients",
            got="a call",
            remedy="Leave it out: max_grad_norm in PrivacyArguments clips every record's gradient, "
            "and the norm of their sum is private.",
        )


class PlacedBatches:
    """The physical batches of a private loader, on a device.

    Args:
        loader: the private loader.
        device: where tensors are moved.
    """

    def __init__(self, loader: PrivateLoader, device: torch.device) -> None:
        self.loader = loader
        self.device = device

    @property
    def dataset(self) -> Any:
        """The records."""
        return self.loader.dataset

    def __len__(self) -> int:
        """Return the number of logical batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield send_to_device(batch, self.device)


class _PrivateOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Steps at every physical batch, and tells schedules of releases only."""

    _is_accelerate_prepared = True

    def __init__(self, optimizer: torch.optim.Optimizer, loader: PrivateLoader) -> None:
        super().__init__(optimizer)
        self._loader = loader

    def step(self, closure: Any = None) -> Any:
        """Clip and add up a physical batch; after the last one of a logical batch, update."""
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients of the physical batch."""
        self.optimizer.zero_grad()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step only added up a part of a logical batch."""
        return not self._loader.final
