"""Train privately by changing one import: ``PrivacyEngine``, whose names follow Opacus."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError, UnsupportedModule
from ..base.sealed import Place
from ..step.state import CheckedState
from . import checkpoint, saved_state, validate
from .batch_invariance import BatchInvariance, test_engine
from .dry_run import dry_run
from .fix import fix
from .make_parts import OWN_BATCHES, attach, check_objects
from .making import MakesPrivate
from .provenance import YieldedBatch
from .provenance.trees import tensors_of
from .schedulers import Scheduler

ADOPTED = "rows that passed through engine.adopt() depend on the records that the caller named"
DETACHED = "what changed the module while the engine was detached came from public data"
"""Conditions of certificates that the caller vouches for."""


class PrivacyEngine(MakesPrivate):
    """The engine that makes a module, an optimizer and a loader private, for one training run.

    Args:
        accountant: ``prv`` (default), ``pld`` or ``rdp``; see ``engine.accountant``.
        secure_mode: accepted for compatibility; noise and sampling always come from a secure
            generator.

    Raises:
        InvalidInput: an unknown accountant.
    """

    def attach(self) -> None:
        """Make everything private again after ``detach``; calling it twice changes nothing."""
        attach(self._made())

    def detach(self) -> None:
        """Give module and optimizer back as they were; gradients not yet released are forgotten."""
        capture, _, adapter, loader, _ = self._made()
        adapter.detach()
        capture.detach()
        if self.step.steps:
            self.step.ledger.assume(DETACHED)
        if loader is not None:
            loader.on_batch = loader.boundary = None

    def new_samples(
        self,
        *,
        sampling: str = "poisson",
        sample_rate: float | None = None,
        dataset_size: int | None = None,
    ) -> None:
        """Begin samples from elsewhere than the loader: each forward pass brings new ones.

        Args:
            sampling, sample_rate, dataset_size: how the caller draws the batches from now on, as in
                ``DPStep``. Without a rate every record is taken to be in every step, which holds
                for any way to draw them that has a record in a step once.

        Raises:
            PrivacyError: gradients of earlier samples are pending.
            InvalidInput: numbers out of range.
        """
        self.adapter.batches.new_samples(
            sampling=sampling, sample_rate=sample_rate, dataset_size=dataset_size
        )
        self.step.ledger.assume(OWN_BATCHES)

    def adopt(self, batch: Any, *, records: Sequence[int] | None = None) -> Any:
        """Vouch that row i of tensors made elsewhere depends on record i of the batch alone.

        It is for tensors whose records dpkern cannot follow: NumPy round trips, compiled
        transforms, custom operations, random numbers beside the samples (the time steps of a
        diffusion model), one loss term for each sample. Without a loader the tensors are a batch of
        their own. The certificate names the statement as its condition.

        Args:
            batch: a tensor or a tree of them, with as many rows as the current batch has records.
            records: for each row the position of its record in the batch, where rows are fewer,
                repeated or in another order.

        Returns:
            The same tree; its tensors may enter the module.

        Raises:
            InvalidInput: another number of rows, or a position outside the batch.
            PrivacyError: no current batch.
        """
        adapter = self.adapter
        current = adapter.batches.current_batch() if adapter.batches.boundary.has_loader else None
        if current is None and not adapter.batches.boundary.has_loader:
            rows = [t.shape[0] for t, _ in tensors_of(batch) if t.dim()]
            count = max(rows, default=0) if records is None else max(records, default=-1) + 1
            current = YieldedBatch(count, boundary=adapter.batches.boundary)
        if current is None:
            raise PrivacyError(
                "adopt",
                expected="a batch of the private loader",
                got="none yet",
                remedy="Call it inside the loop over the loader.",
            )
        ids = None if records is None else np.asarray(records, dtype=np.int64)
        self.step.ledger.assume(ADOPTED)
        known = ids is None or bool(((ids >= 0) & (ids < len(current.all))).all())
        check.that(
            known, "records", f"positions below {len(current.all)}", records, "Count from 0."
        )
        return adapter.batches.boundary.adopt(batch, current, ids)

    def drop(self) -> None:
        """Forget the gradients of an unfinished logical batch; nothing of them is released."""
        self.adapter.drop()

    def public(self) -> AbstractContextManager[None]:
        """Treat passes in this block as public: their gradients join the step without clipping.

        Put forward and backward pass into the block. The certificate names as its condition that
        they use no private data.
        """
        return self.capture.public()

    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound of epsilon so far; infinite without noise or with a known seed.

        Args:
            delta: delta of the guarantee, in (0, 1).

        Warns:
            PrivacyWarning: delta is not below 1 / number of records; once for each delta.

        Raises:
            InvalidInput: delta outside (0, 1).
            MissingDependency: dp-accounting is not installed.
        """
        self._warn_of(delta)
        return self.accountant.get_epsilon(delta)

    def report(self, delta: float) -> dict[str, Any]:
        """Return what was released and certified, as JSON values; warns as ``get_epsilon`` does."""
        self._warn_of(delta)
        self.capture.guard.look_at_numbers()
        return self.step.report(delta)

    def _warn_of(self, delta: float) -> None:
        """Check delta, and warn the user if it is too large for the number of records."""
        check.open_unit(delta=delta)
        if self.accountant.step is not None:
            self.accountant.warn_of(delta, self.accountant.step.sampling, stacklevel=4)

    def validate(
        self,
        function: Callable[..., Any] | None = None,
        *inputs: Any,
        module: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_loader: DataLoader[Any] | None = None,
        targets: Any = None,
        loss: Callable[..., torch.Tensor] | None = None,
    ) -> BatchInvariance | None:
        """Refuse what cannot be private; changes nothing.

        With ``inputs``, after ``make_private``: run ``function`` (default: the module) on a batch
        without training and check every use of a parameter. That admits uses outside the module's
        own forward pass (``engine.dry_run``).

        With ``loss`` besides: test whether a record's gradient depends on it alone, and return what
        was found (``engine.batch_invariance``). If it does, exact certificates of the steps that
        follow say so in the place of their condition, as long as these are steps of the kind that
        was tested; batches are then padded to multiples of 16 rows.

        Args:
            targets: what the loss takes besides the module's outputs.
            loss: the training loop's function of outputs and targets.

        Raises:
            UnsupportedModule: lists everything that was found.
            InvalidInput: an optimizer or a loader that cannot be private; inputs, a loader or a
                mechanism that the test is not made for.
        """
        check_objects(module, optimizer, data_loader)
        if function is not None or inputs:
            findings = dry_run(self.capture, function, *inputs)
            validate.refuse(self.capture.module, findings)
        if loss is None:
            return None
        made = self._made()
        return test_engine(made.capture, made.step, made.loader, inputs, targets, loss)

    def is_compatible(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        data_loader: DataLoader[Any] | None = None,
    ) -> bool:
        """Whether ``validate`` finds nothing."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except (InvalidInput, UnsupportedModule):
            return False
        return True

    @staticmethod
    def get_compatible_module(module: nn.Module) -> nn.Module:
        """Return a copy of the module without normalisation that mixes samples (``engine.fix``).

        Raises:
            UnsupportedModule: what is left cannot be private.
        """
        fixed = fix(copy.deepcopy(module))
        validate.check(fixed)
        return fixed

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides module and optimizer, as plain values, no key.

        Raises:
            PrivacyError: between a batch and its step, where nothing may be saved.
        """
        return saved_state.state_of(self._made())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved run after the same ``make_private``.

        A seeded run goes on with the same noise and batches; an unseeded one with its fresh key.

        Raises:
            InvalidInput: the state of another run; nothing has been changed.
            PrivacyError: this engine has samples or steps of its own; nothing has been changed.
        """
        saved_state.load_state(self._made(), state)

    def check_state(self, state: Mapping[str, Any]) -> CheckedState:
        """Return the step's part of a state that ``load_state_dict`` accepts; changes nothing.

        Raises:
            InvalidInput, PrivacyError: it would refuse the state.
        """
        return saved_state.checked_state(self._made(), state)

    def save_checkpoint(
        self,
        *,
        path: Place,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        noise_scheduler: Scheduler | None = None,
        grad_clip_scheduler: Scheduler | None = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the engine's state and those of the parts to one file.

        Args and errors are those of ``engine.checkpoint.save``; ``checkpoint_dict`` adds entries of
        the user's own.
        """
        parts: checkpoint.Parts = {
            "module": module,
            "optimizer": optimizer,
            "noise_scheduler": noise_scheduler,
            "grad_clip_scheduler": grad_clip_scheduler,
        }
        checkpoint.save(self, path, parts, checkpoint_dict)

    def load_checkpoint(
        self,
        *,
        path: Place,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        noise_scheduler: Scheduler | None = None,
        grad_clip_scheduler: Scheduler | None = None,
    ) -> dict[str, Any]:
        """Continue from a file of ``save_checkpoint`` and return its content.

        Errors are those of ``engine.checkpoint.load``; nothing has been changed then.
        """
        parts: checkpoint.Parts = {
            "module": module,
            "optimizer": optimizer,
            "noise_scheduler": noise_scheduler,
            "grad_clip_scheduler": grad_clip_scheduler,
        }
        return checkpoint.load(self, path, parts)
