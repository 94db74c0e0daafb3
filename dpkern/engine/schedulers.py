"""Schedules of the noise multiplier and of the clipping bound, with Opacus' names.

Each call of ``step`` (once per epoch, after the optimizer's) sets

    value(t) = base * factor(t),    t = 0, 1, 2, ...

on the private optimizer. The ledger records every step with the noise it had, so epsilon covers
the schedule. A change within a logical batch is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from ..base import validate as check
from ..base.errors import InvalidInput, brief
from .optimizer import adapter_of

Value = float | tuple[float, ...]


class Scheduler(ABC):
    """The base of the schedules.

    Args:
        optimizer: a private optimizer.
        last_epoch: -1 takes the value in use as base. k takes it as the value of epoch k, and goes
            on with epoch k + 1.

    Raises:
        InvalidInput: an optimizer that is not private, or a number out of range.
    """

    quantity: ClassVar[str]

    def __init__(self, optimizer: torch.optim.Optimizer, *, last_epoch: int = -1) -> None:
        adapter = adapter_of(optimizer)
        if adapter is None:
            raise InvalidInput(
                "optimizer",
                expected="the optimizer that make_private returned",
                got=type(optimizer).__name__,
                remedy="Call make_private first.",
            )
        self.optimizer = optimizer
        self.last_epoch = check.integer(-1, last_epoch=last_epoch)
        self.base = self._base(_value(getattr(optimizer, self.quantity)))
        self.step()

    @abstractmethod
    def factor(self, epoch: int) -> float:
        """Return the factor by which the base is multiplied in this epoch."""

    def _base(self, now: Value) -> Value:
        if self.last_epoch < 0:
            return now
        return _times(now, 1 / check.positive(factor=self.factor(self.last_epoch)))

    def step(self) -> None:
        """Go to the next epoch.

        Raises:
            InvalidInput: a value outside the mechanism's range; nothing has changed.
            PrivacyError: a change within a logical batch; nothing has changed.
        """
        self._set(self.last_epoch + 1, self.base)

    def _set(self, epoch: int, base: Value) -> None:
        adapter = adapter_of(self.optimizer)
        if adapter is not None:
            adapter.change(self.quantity, _times(base, self.factor(epoch)))
        self.last_epoch, self.base = epoch, base

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and base, as plain values."""
        base = list(self.base) if isinstance(self.base, tuple) else self.base
        return {"last_epoch": self.last_epoch, "base": base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved epoch.

        Raises:
            InvalidInput: not such a state; nothing has changed.
        """
        self._set(*self.check_state(state))

    def check_state(self, state: Mapping[str, Any]) -> tuple[int, Value]:
        """Return epoch and base of a saved state; changes nothing.

        Raises:
            DPKernError: ``load_state_dict`` would refuse the state.
        """
        check.plain_values("state", state)
        if not isinstance(state, Mapping) or state.keys() != {"last_epoch", "base"}:
            raise InvalidInput(
                "state",
                expected="last_epoch and base",
                got=brief(state),
                remedy="Pass what state_dict() of the schedule returned.",
            )
        epoch = check.integer(0, **{"state.last_epoch": state["last_epoch"]})
        base = _value(state["base"])
        if _count(base) != _count(self.base):
            raise InvalidInput(
                "state.base",
                expected="a number, or one for each bound, as this schedule has",
                got=brief(base),
                remedy="Pass what state_dict() of the schedule returned.",
            )
        for number in base if isinstance(base, tuple) else (base,):
            check.non_negative(**{"state.base": number})  # type: ignore[arg-type]
        adapter = adapter_of(self.optimizer)
        if adapter is not None:
            adapter.check_change(self.quantity, _times(base, self.factor(epoch)))
        return epoch, base


def _value(given: Any) -> Value:
    return tuple(given) if isinstance(given, (list, tuple)) else given


def _count(value: Value) -> int | None:
    return len(value) if isinstance(value, tuple) else None


def _times(value: Value, factor: float) -> Value:
    if isinstance(value, tuple):
        return tuple(each * factor for each in value)
    return value * factor


class _Exponential(Scheduler):
    """A schedule with ``factor(t) = gamma^t``."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, gamma: float, last_epoch: int = -1
    ) -> None:
        self.gamma = check.positive(gamma=gamma)
        super().__init__(optimizer, last_epoch=last_epoch)

    def factor(self, epoch: int) -> float:
        return self.gamma**epoch


class _Step(Scheduler):
    """A schedule with ``factor(t) = gamma^floor(t / step_size)``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        step_size: int,
        gamma: float,
        last_epoch: int = -1,
    ) -> None:
        self.step_size = check.integer(1, step_size=step_size)
        self.gamma = check.positive(gamma=gamma)
        super().__init__(optimizer, last_epoch=last_epoch)

    def factor(self, epoch: int) -> float:
        return self.gamma ** (epoch // self.step_size)


class _Lambda(Scheduler):
    """A schedule with ``factor(t) = function(t)``.

    The base is the value in use, whatever ``last_epoch`` is.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        function: Callable[[int], float],
        last_epoch: int,
    ) -> None:
        self.function = function
        super().__init__(optimizer, last_epoch=last_epoch)

    def _base(self, now: Value) -> Value:
        return now

    def factor(self, epoch: int) -> float:
        return self.function(epoch)


class ExponentialNoise(_Exponential):
    """The schedule ``noise_multiplier = base gamma^t``."""

    quantity = "noise_multiplier"


class StepNoise(_Step):
    """The schedule ``noise_multiplier = base gamma^floor(t / step_size)``."""

    quantity = "noise_multiplier"


class LambdaNoise(_Lambda):
    """The schedule ``noise_multiplier = base noise_lambda(t)``."""

    quantity = "noise_multiplier"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        noise_lambda: Callable[[int], float],
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, noise_lambda, last_epoch)


class ExponentialGradClip(_Exponential):
    """The schedule ``max_grad_norm = base gamma^t``, for every bound alike."""

    quantity = "max_grad_norm"


class StepGradClip(_Step):
    """The schedule ``max_grad_norm = base gamma^floor(t / step_size)``, for every bound alike."""

    quantity = "max_grad_norm"


class LambdaGradClip(_Lambda):
    """The schedule ``max_grad_norm = base scheduler_function(t)``, for every bound alike."""

    quantity = "max_grad_norm"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler_function: Callable[[int], float],
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, scheduler_function, last_epoch)
