"""Train privately by changing one import: ``PrivacyEngine``, whose names follow Opacus."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError, UnsupportedModule
from ..privacy import accounting
from ..privacy.mechanisms.base import Mechanism
from ..step.noise_binding import refuse_shards
from ..step.state import CheckedState, apply
from ..step.step import DPStep
from . import checkpoint, distributed, observing, saved_state, validate
from .accountant import Accountant
from .allocator import allocator_choice
from .arguments import MakePrivateOptions, loader_of, mechanism_of, sampling_of
from .batch_invariance import BatchInvariance, test_engine
from .capture import Capture
from .default_arithmetic import choose_arithmetic
from .dry_run import dry_run
from .fix import fix
from .loader import PrivateLoader, check_loader
from .optimizer import OptimizerAdapter, adapter_of, check_optimizer
from .padding import PaddingCheck
from .provenance import YieldedBatch
from .provenance.trees import tensors_of
from .schedulers import Scheduler
from .sharded import ShardedModule, check_plan, is_sharded
from .uncompiled import look_again, within_wrapper

ADOPTED = "rows that passed through engine.adopt() depend on the records that the caller named"
DETACHED = "what changed the module while the engine was detached came from public data"
OWN_BATCHES = "the caller draws batches as stated, and each row of a forward pass is another record"
"""Conditions of certificates that the caller vouches for."""

log = logging.getLogger("dpkern")

Choose = Callable[[MakePrivateOptions, Sequence[str], dict[str, Any]], Mechanism]


class PrivacyEngine:
    """The engine that makes a module, an optimizer and a loader private, for one training run.

    Args:
        accountant: ``prv`` (default), ``pld`` or ``rdp``; see ``engine.accountant``.
        secure_mode: accepted for compatibility; noise and sampling always come from a secure
            generator.

    Raises:
        InvalidInput: an unknown accountant.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        self.accountant = Accountant(accountant)
        self.secure_mode = bool(secure_mode)
        self._views = 1
        self._parts: tuple[Capture, DPStep, OptimizerAdapter, PrivateLoader | None] | None = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any] | None,
        noise_multiplier: float | None = None,
        max_grad_norm: float | Sequence[float] | None = None,
        mechanism: Mechanism | None = None,
        **options: Any,
    ) -> Any:
        """Make training private; return the same module and optimizer, with a new loader.

        With DP-SGD and flat clipping the optimizer's rule sees, at every step, the gradient

            (sum_b min(1, C / ||g_b||) g_b + N(0, (sigma C)^2 I)) / expected batch size

        of the per-sample gradients g_b of a mean loss, C = ``max_grad_norm`` and
        sigma = ``noise_multiplier``; with ``loss_reduction="sum"`` it is not divided.

        Args:
            module: the model; its trainable parameters are clipped and noised. Out of a
                ``DistributedDataParallel`` the module inside comes back: call that one.
            optimizer: any first-order ``torch.optim`` optimizer over all of them.
            data_loader: a loader over a data set with a length. None if the samples come from
                elsewhere: then each forward pass brings new ones.
            noise_multiplier: noise standard deviation / sensitivity, where the sensitivity is the
                norm of all clipping bounds.
            max_grad_norm: clipping bound C > 0; or one for each layer or group.
            mechanism: a dpkern mechanism, instead of the two numbers.
            options: see ``engine.arguments.MakePrivateOptions``.

        Returns:
            ``(module, optimizer, loader)``; with ``grad_sample_mode="ghost"`` also ``criterion``,
            unchanged, in third place.

        Raises:
            DPKernError: something that cannot be private; nothing has been changed.
        """

        def choose(
            chosen: MakePrivateOptions, names: Sequence[str], _: dict[str, Any]
        ) -> Mechanism:
            return mechanism_of(
                chosen,
                names,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                mechanism=mechanism,
            )

        chosen = MakePrivateOptions.of(options)
        return self._make(module, optimizer, data_loader, chosen, choose, by=mechanism)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | Sequence[float] | None = None,
        mechanism: Mechanism | None = None,
        **options: Any,
    ) -> Any:
        """Make training private with the least noise that keeps ``epochs`` within the target.

        Args:
            module, optimizer, data_loader, max_grad_norm, options: as in ``make_private``, with a
                loader.
            target_epsilon, target_delta: budget of the whole run, epsilon > 0 and delta in (0, 1).
            epochs: number of times that the loop goes over the returned loader.
            mechanism: a dpkern mechanism, whose noise multiplier is replaced. None is DP-SGD.

        Returns:
            As ``make_private``.

        Warns:
            PrivacyWarning: target_delta is not below 1 / number of records.

        Raises:
            PrivacyError: no noise multiplier in [2^-4, 2^10] meets the target.
            DPKernError: as in ``make_private``.
        """
        check.positive(target_epsilon=target_epsilon)
        check.open_unit(target_delta=target_delta)
        check.integer(1, epochs=epochs)

        def choose(
            chosen: MakePrivateOptions, names: Sequence[str], run: dict[str, Any]
        ) -> Mechanism:
            start = mechanism_of(
                chosen,
                names,
                noise_multiplier=None if mechanism is not None else 1.0,
                max_grad_norm=max_grad_norm,
                mechanism=mechanism,
            )
            if run["steps"] is None:
                raise InvalidInput(
                    "data_loader",
                    expected="a loader, whose length counts the steps",
                    got=None,
                    remedy="Calibrate with dpkern.accounting.calibrate, then call make_private.",
                )
            source = chosen.noise_source
            if source is not None and source.warning:
                raise PrivacyError(
                    "noise_source",
                    expected="a source that a certificate can speak of",
                    got=source.warning,
                    remedy="Use make_private, which calls such a run non-private.",
                )
            self.accountant.warn_of(target_delta, run, stacklevel=5)
            return accounting.calibrate(
                start,
                variation=0.0 if source is None else source.variation,
                accountant=self.accountant.bound,
                target_epsilon=target_epsilon,
                delta=target_delta,
                steps=epochs * run["steps"],
                sample_rate=run["sample_rate"],
                sampling=run["sampling"],
                dataset_size=run["dataset_size"],
                dimension=run["dimension"],
            )

        given = MakePrivateOptions.of(options)
        made = self._make(module, optimizer, data_loader, given, choose, by=mechanism)
        self.step.calibrated_to = "certified"
        return made

    def _make(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any] | None,
        options: MakePrivateOptions,
        choose: Choose,
        *,
        by: Mechanism | None,
    ) -> Any:
        """Make everything private, ``by`` the user's mechanism or DP-SGD with these options."""
        if self._parts is not None:
            raise InvalidInput(
                "make_private",
                expected="one call for each engine",
                got="a second one",
                remedy="Make another PrivacyEngine; epsilons of runs on the same data add up.",
            )
        allocator_choice()
        observer = observing.current()
        if observer is not None:
            options = observer.options(options)
        called, module = module, _within_wrapper(module)
        wrapper, module = module, distributed.unwrapped(module)
        sharded = ShardedModule(module) if is_sharded(module) else None
        self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        processes = distributed.processes_of(wrapper) if sharded is None else sharded.processes()
        capture = Capture(
            module, loss_reduction=options.loss_reduction, keep_budget=options.keep_budget
        )
        loader = loader_of(data_loader, options, processes)
        sampling = sampling_of(loader, options)
        run = {
            "steps": None if loader is None else len(loader),
            "dimension": sum(p.numel() for p in capture.parameters),
            **sampling,
        }
        expected = options.expected_batch_size if loader is None else loader.expected_batch_size
        options, why_float = choose_arithmetic(options, capture, mechanism=by)
        mechanism = choose(options, capture.names, run)
        if observer is not None:
            mechanism = observer.mechanism(mechanism)
        shared: dict[str, Any] = {"unsafe_seed": options.unsafe_seed, "rounds": options.rounds}
        if processes is not None:
            source = None if options.noise_source is None else options.noise_source.settings
            settings = (mechanism, expected, run, shared, options.loss_reduction, source)
            processes.check_start(module, optimizer, settings)
            if sharded is not None and options.noise_source is not None:
                refuse_shards()  # every process at once: none is left waiting
            shared = {"key": processes.noise_key(**shared), "reduce": processes.reduce}
        if sharded is not None and processes is not None:
            sharded.bind(capture, processes)
            shared["reduce"] = sharded.reduce
            if loader is not None:
                loader.max_over_ranks = processes.max_over_ranks
        private = DPStep(
            mechanism,
            capture.parameters if sharded is None else sharded.stand_ins(),
            expected_batch_size=expected,  # type: ignore[arg-type]
            average=options.loss_reduction == "mean",
            backend=options.backend,
            noise_source=options.noise_source,
            gradients="batched",
            **shared,
            **sampling,
        )
        if sharded is not None:
            check_plan(private)
        if why_float:
            log.info("%s", why_float)
            private.ledger.state_invariance(False, (why_float,))
        adapter = OptimizerAdapter(
            optimizer, capture, private, processes=processes, sharded=sharded
        )
        if wrapper is not module:
            distributed.refuse_wrapper(wrapper, lambda: capture.attached)
        capture.guard.on_late_finding = private.taint
        self._parts = capture, private, adapter, loader
        self._views = options.views
        self.accountant.step = private
        if loader is None:
            private.ledger.assume(OWN_BATCHES)
        else:
            loader.padding = PaddingCheck(
                allowed=options.masked_padding, assume=private.ledger.assume, taint=private.taint
            )
        if observer is not None:
            observer.made(capture, private, adapter, loader)
        self.attach()
        if wrapper is module:  # what the user has compiled is called as it is
            look_again(called)
            module = called
        if options.grad_sample_mode == "ghost":
            return module, optimizer, options.criterion, loader
        return module, optimizer, loader

    @property
    def capture(self) -> Capture:
        """The capture, which holds the gradients of the current samples."""
        return self._made()[0]

    @property
    def step(self) -> DPStep:
        """The private step: plan, key, step counter and ledger."""
        return self._made()[1]

    @property
    def adapter(self) -> OptimizerAdapter:
        """The adapter that makes the optimizer private."""
        return self._made()[2]

    def _made(self) -> tuple[Capture, DPStep, OptimizerAdapter, PrivateLoader | None]:
        if self._parts is None:
            raise InvalidInput(
                "engine",
                expected="an engine after make_private",
                got="a new one",
                remedy="Call make_private first.",
            )
        return self._parts

    def attach(self) -> None:
        """Make everything private again after ``detach``; calling it twice changes nothing."""
        capture, _, adapter, loader = self._made()
        if adapter_of(adapter.optimizer) is not adapter:
            check_optimizer(adapter.optimizer, capture)
        capture.attach()
        adapter.attach()
        adapter.batches.boundary.has_loader = loader is not None
        adapter.batches.boundary.views = self._views
        if loader is not None:
            loader.on_batch = adapter.batches.expect
            loader.boundary = adapter.batches.boundary
            loader.views = self._views
            loader.placeholders = adapter.sharded is None

    def detach(self) -> None:
        """Give module and optimizer back as they were; gradients not yet released are forgotten."""
        capture, _, adapter, loader = self._made()
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
        _, _, adapter, _ = self._made()
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
        if module is not None:
            module = distributed.unwrapped(_within_wrapper(module))
            for note in validate.check(module):
                # A frozen layer that trains again mixes samples; the others are for information.
                frozen = note.what.startswith("is frozen")
                log.log(logging.WARNING if frozen else logging.INFO, "%s", note)
            if optimizer is not None:
                check_optimizer(optimizer, Capture(module))
        if data_loader is not None:
            check_loader(data_loader, distributed=distributed.in_use())
        if function is not None or inputs:
            findings = dry_run(self.capture, function, *inputs)
            validate.refuse(self.capture.module, findings)
        if loss is None:
            return None
        capture, private, _, loader = self._made()
        return test_engine(capture, private, loader, inputs, targets, loss)

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
        capture, private, _, loader = self._made()
        saved_state.check_saveable(capture)
        return saved_state.state_of(private, loader)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved run after the same ``make_private``.

        A seeded run goes on with the same noise and batches; an unseeded one with its fresh key.

        Raises:
            InvalidInput: the state of another run; nothing has been changed.
            PrivacyError: this engine has samples or steps of its own; nothing has been changed.
        """
        checked = self.check_state(state)
        _, private, adapter, loader = self._made()
        apply(private, checked)
        if loader is not None:
            loader.load_state_dict(state["loader"])
        adapter.show()

    def check_state(self, state: Mapping[str, Any]) -> CheckedState:
        """Return the step's part of a state that ``load_state_dict`` accepts; changes nothing.

        Raises:
            InvalidInput, PrivacyError: it would refuse the state.
        """
        capture, private, _, loader = self._made()
        return saved_state.check_state(capture, private, loader, state)

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
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
        path: str | os.PathLike[str],
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


def _within_wrapper(module: nn.Module) -> nn.Module:
    """Return the module that was compiled, unless a wrapper for several processes is around it."""
    inner = within_wrapper(module)
    return inner if distributed.unwrapped(inner) is inner else module
