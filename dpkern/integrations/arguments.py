"""The privacy arguments of a run inside a framework, and the engine that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..base import validate as check
from ..base.errors import InvalidInput
from ..engine import PrivacyEngine
from ..engine.loader import PrivateLoader
from ..privacy.mechanisms import Mechanism


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments:
    """Options that make a framework's run private.

    Exactly one of ``target_epsilon`` (the noise is calibrated to the run), ``noise_multiplier`` and
    ``mechanism`` alone says how much noise there is.

    Attributes:
        max_grad_norm: clipping bound C > 0 of one record's gradient; None with ``mechanism``.
        target_epsilon, target_delta: budget of the whole run; both or neither.
        noise_multiplier: sigma, instead of a budget.
        mechanism: a dpkern mechanism; with a budget its noise multiplier is replaced.
        delta: delta of the epsilon that is logged; None takes ``target_delta``, else the largest
            power of ten below 1 / number of records.
        max_physical_batch_size: maximum number of records in one pass; None takes the framework's
            batch size where the framework accumulates, and else splits nothing.
        diagnostics: log the training loss where the framework does. No epsilon covers it.
        accountant: as in ``PrivacyEngine``.
        options: further keywords of ``make_private``, such as ``{"sampling": "fixed"}``.

    Raises:
        InvalidInput: arguments that do not belong together, or out of range.
    """

    max_grad_norm: float | Sequence[float] | None = None
    target_epsilon: float | None = None
    target_delta: float | None = None
    noise_multiplier: float | None = None
    mechanism: Mechanism | None = None
    delta: float | None = None
    max_physical_batch_size: int | None = None
    diagnostics: bool = False
    accountant: str = "prv"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        noised = self.noise_multiplier is not None
        budget = self.target_epsilon is not None
        check.that(
            budget == (self.target_delta is not None),
            "target_epsilon, target_delta",
            "both or neither",
            "one of them",
            "Pass target_delta, well below 1 / number of records, with target_epsilon.",
        )
        check.that(
            budget + noised == 1 or (self.mechanism is not None and not noised),
            "target_epsilon, noise_multiplier",
            "exactly one of them, or a mechanism",
            "both" if budget and noised else "neither",
            "Pass target_epsilon and target_delta to calibrate the noise, or noise_multiplier.",
        )
        if self.delta is not None:
            check.open_unit(delta=self.delta)
        if self.max_physical_batch_size is not None:
            check.integer(1, max_physical_batch_size=self.max_physical_batch_size)
        for name in ("max_physical_batch_size", *self.__dataclass_fields__):
            check.that(
                name not in self.options,
                f"options[{name!r}]",
                "keywords that are no arguments of their own",
                "one that is",
                f"Pass {name}= to PrivacyArguments.",
            )

    def make(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        *,
        steps: int | None,
        max_physical_batch_size: int | None,
    ) -> tuple[PrivacyEngine, PrivateLoader]:
        """Make the framework's objects private.

        Args:
            module, optimizer: become private in place.
            data_loader: over logical batches.
            steps: number of logical steps of the run; None if the framework knows no end. A budget
                is met at the end of the epoch that the last step belongs to.
            max_physical_batch_size: of the framework, where the arguments name none.

        Raises:
            InvalidInput: a budget for a run without an end.
            DPKernError: as ``make_private``.
        """
        engine = PrivacyEngine(accountant=self.accountant)
        given: dict[str, Any] = {
            "module": module,
            "optimizer": optimizer,
            "data_loader": data_loader,
            "max_grad_norm": self.max_grad_norm,
            "mechanism": self.mechanism,
            "max_physical_batch_size": self.max_physical_batch_size or max_physical_batch_size,
            **self.options,
        }
        if self.target_epsilon is None or self.target_delta is None:
            made = engine.make_private(noise_multiplier=self.noise_multiplier, **given)
        else:
            if steps is None:
                raise InvalidInput(
                    "target_epsilon",
                    expected="a run whose number of steps is known",
                    got="one without an end",
                    remedy="Say how many epochs or steps the run has, or pass noise_multiplier.",
                )
            made = engine.make_private_with_epsilon(
                target_epsilon=self.target_epsilon,
                target_delta=self.target_delta,
                epochs=max(1, math.ceil(steps / len(data_loader))),
                **given,
            )
        return engine, made[-1]

    def epsilon(self, engine: PrivacyEngine) -> tuple[float, float] | None:
        """Return epsilon so far and its delta; None if no delta is known."""
        delta = self.delta if self.delta is not None else engine.known_delta
        return None if delta is None else (engine.accountant.bound_of(delta), delta)
