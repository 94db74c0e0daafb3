"""The two calls that make training private, and the parts that they have made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError
from ..privacy import accounting
from ..privacy.accounting import shown_bound
from ..privacy.mechanisms.base import Mechanism
from ..step.step import DPStep
from . import distributed
from .accountant import Accountant
from .allocator import allocator_choice
from .arguments import MakePrivateOptions, mechanism_of
from .capture import Capture
from .keywords import MakePrivateKeywords, with_options_shown
from .loader import PrivateLoader
from .make_parts import Choose, Parts, attach, check_objects, make_parts, within_wrappers
from .optimizer import OptimizerAdapter
from .uncompiled import look_again

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=torch.optim.Optimizer)
C = TypeVar("C")
Bound = float | Sequence[float] | None


class MakesPrivate:
    """The part of ``PrivacyEngine`` that makes its parts and holds them."""

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        self.accountant = Accountant(accountant)
        self.secure_mode = bool(secure_mode)
        self.target_delta: float | None = None
        """Delta that the run was calibrated to; None if it was not."""
        self._parts: Parts | None = None

    def __repr__(self) -> str:
        """State the mechanism, how batches are drawn, and epsilon so far where a delta is known."""
        if self._parts is None:
            return "<PrivacyEngine before make_private>"
        step, delta = self._parts.step, self.known_delta
        rate = step.sampling["sample_rate"]
        drawn = f"{step.sampling['sampling']} batches" + (f" at rate {rate:.4g}" if rate else "")
        covered = step.plan.coverage
        domain = "" if covered is None else f", {covered.text}"
        text = f"<PrivacyEngine: {step.mechanism.title}{domain}, {drawn}, {step.steps} steps"
        if delta is not None:
            epsilon = shown_bound(self.accountant.bound_of(delta), 3)
            text += f", epsilon <= {epsilon} at delta = {shown_bound(delta)}"
        return text + ">"

    @property
    def known_delta(self) -> float | None:
        """The delta that the run was calibrated to, or the largest power of ten below 1 / records.

        None if neither a target nor the number of records is known.
        """
        if self.target_delta is not None:
            return self.target_delta
        step = self.step
        records, rate = step.sampling["dataset_size"], step.sampling["sample_rate"]
        if records is None and rate is not None and rate < 1:
            records = step.expected_batch_size / rate
        return None if records is None else float(10.0 ** -(math.floor(math.log10(records)) + 1))

    @overload
    def make_private(
        self,
        *,
        module: M,
        optimizer: Opt,
        data_loader: DataLoader[Any],
        noise_multiplier: float | None = None,
        max_grad_norm: Bound = None,
        mechanism: Mechanism | None = None,
        grad_sample_mode: Literal["hooks", "functorch", "ew"] | None = "hooks",
        criterion: object = None,
        **options: Unpack[MakePrivateKeywords],
    ) -> tuple[M, Opt, PrivateLoader]: ...

    @overload
    def make_private(
        self,
        *,
        module: M,
        optimizer: Opt,
        data_loader: None,
        noise_multiplier: float | None = None,
        max_grad_norm: Bound = None,
        mechanism: Mechanism | None = None,
        grad_sample_mode: Literal["hooks", "functorch", "ew"] | None = "hooks",
        criterion: object = None,
        **options: Unpack[MakePrivateKeywords],
    ) -> tuple[M, Opt, None]: ...

    @overload
    def make_private(
        self,
        *,
        module: M,
        optimizer: Opt,
        data_loader: DataLoader[Any] | None,
        noise_multiplier: float | None = None,
        max_grad_norm: Bound = None,
        mechanism: Mechanism | None = None,
        grad_sample_mode: Literal["ghost"],
        criterion: C,
        **options: Unpack[MakePrivateKeywords],
    ) -> tuple[M, Opt, C, PrivateLoader | None]: ...

    @with_options_shown
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any] | None,
        noise_multiplier: float | None = None,
        max_grad_norm: Bound = None,
        mechanism: Mechanism | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
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
        return self._make(module, optimizer, data_loader, chosen, choose, given=mechanism)

    @overload
    def make_private_with_epsilon(
        self,
        *,
        module: M,
        optimizer: Opt,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: Bound = None,
        mechanism: Mechanism | None = None,
        grad_sample_mode: Literal["hooks", "functorch", "ew"] | None = "hooks",
        criterion: object = None,
        **options: Unpack[MakePrivateKeywords],
    ) -> tuple[M, Opt, PrivateLoader]: ...

    @overload
    def make_private_with_epsilon(
        self,
        *,
        module: M,
        optimizer: Opt,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: Bound = None,
        mechanism: Mechanism | None = None,
        grad_sample_mode: Literal["ghost"],
        criterion: C,
        **options: Unpack[MakePrivateKeywords],
    ) -> tuple[M, Opt, C, PrivateLoader]: ...

    @with_options_shown
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: Bound = None,
        mechanism: Mechanism | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
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
            self.accountant.warn_of(target_delta, run, stacklevel=6)
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

        known = MakePrivateOptions.of(options)
        made = self._make(module, optimizer, data_loader, known, choose, given=mechanism)
        self.step.calibrated_to, self.target_delta = "certified", float(target_delta)
        return made

    def _make(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any] | None,
        options: MakePrivateOptions,
        choose: Choose,
        *,
        given: Mechanism | None,
    ) -> tuple[Any, ...]:
        if self._parts is not None:
            raise InvalidInput(
                "make_private",
                expected="one call for each engine",
                got="a second one",
                remedy="Make another PrivacyEngine; epsilons of runs on the same data add up.",
            )
        allocator_choice()
        called, wrapper = module, within_wrappers(module)
        module = distributed.unwrapped(wrapper)
        check_objects(module, optimizer, data_loader)
        self._parts = make_parts(wrapper, optimizer, data_loader, options, choose, given=given)
        self.accountant.step = self._parts.step
        attach(self._parts)
        if wrapper is module:  # what the user has compiled is called as it is
            look_again(called)
            module = called
        if options.grad_sample_mode == "ghost":
            return module, optimizer, options.criterion, self._parts.loader
        return module, optimizer, self._parts.loader

    @property
    def capture(self) -> Capture:
        """The capture, which holds the gradients of the current samples."""
        return self._made().capture

    @property
    def step(self) -> DPStep:
        """The private step: plan, key, step counter and ledger."""
        return self._made().step

    @property
    def adapter(self) -> OptimizerAdapter:
        """The adapter that makes the optimizer private."""
        return self._made().adapter

    def _made(self) -> Parts:
        if self._parts is None:
            raise InvalidInput(
                "engine",
                expected="an engine after make_private",
                got="a new one",
                remedy="Call make_private first.",
            )
        return self._parts
