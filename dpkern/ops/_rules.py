"""Optimizer rules and their state, with the meaning of ``torch.optim``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base import validate
from ..base.codes import RuleKind
from ..base.errors import InvalidInput

Buffers = dict[str, list[torch.Tensor]]
Powers = tuple[float, float]
"""``beta1^t`` and ``beta2^t`` of the update at hand."""


@dataclass
class State:
    """The state of an optimizer rule.

    Attributes:
        steps: updates applied so far.
        buffers: one list of tensors per buffer name (``momentum_buffer``, ``exp_avg``, ...).
    """

    steps: int = 0
    buffers: Buffers = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return steps and buffers, as tensors and plain values."""
        return {"steps": self.steps, "buffers": {k: list(v) for k, v in self.buffers.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a saved state into this one's tensors.

        Raises:
            InvalidInput: other buffers than this rule's.
        """
        self.check(state)
        for name, buffers in self.buffers.items():
            for mine, theirs in zip(buffers, state["buffers"][name], strict=True):
                mine.copy_(theirs)
        self.steps = state["steps"]

    def check(self, state: object) -> None:
        """Check that ``load_state_dict`` would accept this; change nothing.

        Raises:
            InvalidInput: it would not.
        """
        given: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        saved = given.get("buffers")
        saved = saved if isinstance(saved, Mapping) else {}
        same = saved.keys() == self.buffers.keys()
        if not given or not same or not all(_alike(saved[k], self.buffers[k]) for k in saved):
            raise InvalidInput(
                "state",
                expected=f"buffers {sorted(self.buffers)} of the parameters' shapes and dtypes",
                got=f"buffers {sorted(map(str, saved))}" if given else type(state).__name__,
                remedy="Resume with the model and optimizer that wrote the state.",
            )
        validate.integer(0, **{"state.steps": given.get("steps")})


def _alike(saved: object, buffers: Sequence[torch.Tensor]) -> bool:
    """Whether these are tensors of the buffers' shapes and dtypes."""
    return (
        isinstance(saved, (list, tuple))
        and len(saved) == len(buffers)
        and all(validate.same_kind(s, b) for s, b in zip(saved, buffers, strict=True))
    )


@dataclass(frozen=True, kw_only=True)
class SGD:
    """The rule of ``torch.optim.SGD``: ``b = momentum b + (1 - dampening) g``, ``p -= lr b``."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        validate.non_negative(lr=self.lr)
        validate.non_negative(momentum=self.momentum)
        validate.non_negative(weight_decay=self.weight_decay)
        validate.half_open_unit(dampening=self.dampening)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise InvalidInput(
                "nesterov",
                expected="momentum > 0 and dampening = 0",
                got=f"momentum {self.momentum}, dampening {self.dampening}",
                remedy="Set a momentum, or leave nesterov off.",
            )

    def buffer_names(self) -> tuple[str, ...]:
        """Return names of the buffers, one tensor per parameter each."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def flops(self) -> int:
        """Operations on one entry; decay and momentum are applied whatever their value."""
        return (9 if self.nesterov else 7) if self.momentum else 4

    def init(self, params: Sequence[torch.Tensor]) -> State:
        """Return a fresh state."""
        return _fresh_state(self.buffer_names(), params)

    shrink = 1.0
    """Factor of the parameter in front of the update."""

    def powers(self, t: int) -> Powers:
        """Return no powers: nothing here depends on a power of t."""
        return 1.0, 1.0

    def packed(self, t: int, powers: Powers | None = None) -> tuple[float, ...]:
        """Return the kernels' form, at update number t (from 1)."""
        first = t == 1
        numbers = (self.momentum, self.dampening, self.nesterov, first)
        return (RuleKind.sgd, self.lr, self.weight_decay, False, *numbers, 0.0, 0.0, 0.0, 1.0, 1.0)

    def apply(
        self,
        p: torch.Tensor,
        g: torch.Tensor,
        buffers: list[torch.Tensor],
        t: int,
        powers: Powers | None = None,
    ) -> None:
        """Apply the rule in torch: the reference."""
        g = g + self.weight_decay * p
        if buffers:
            (b,) = buffers
            b.copy_(g if t == 1 else self.momentum * b + (1 - self.dampening) * g)
            g = g + self.momentum * b if self.nesterov else b
        p.sub_(self.lr * g)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """The rule of ``torch.optim.Adam`` (weight decay joins the gradient)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        validate.non_negative(lr=self.lr)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise InvalidInput(
                "betas",
                expected="two numbers in [0, 1)",
                got=self.betas,
                remedy="Pass a pair such as (0.9, 0.999).",
            )
        validate.half_open_unit(beta1=self.betas[0])
        validate.half_open_unit(beta2=self.betas[1])
        validate.non_negative(eps=self.eps)
        validate.non_negative(weight_decay=self.weight_decay)

    @property
    def decoupled(self) -> bool:
        """Whether the decay multiplies the parameter (AdamW)."""
        return False

    @property
    def shrink(self) -> float:
        """Factor of the parameter in front of the update: decoupled decay."""
        return 1 - self.lr * self.weight_decay if self.decoupled else 1.0

    flops = 16
    """Operations on one entry."""

    def buffer_names(self) -> tuple[str, ...]:
        """Return names of the buffers, one tensor per parameter each."""
        return ("exp_avg", "exp_avg_sq")

    def init(self, params: Sequence[torch.Tensor]) -> State:
        """Return a fresh state."""
        return _fresh_state(self.buffer_names(), params)

    def powers(self, t: int) -> Powers:
        """Return ``beta1^t`` and ``beta2^t``."""
        beta1, beta2 = self.betas
        return beta1**t, beta2**t

    def packed(self, t: int, powers: Powers | None = None) -> tuple[float, ...]:
        """Return the kernels' form, at update number t (from 1), with the powers if given."""
        power1, power2 = self.powers(t) if powers is None else powers
        moments = (*self.betas, self.eps, 1 - power1, 1 - power2)
        return (
            RuleKind.adam,
            self.lr,
            self.weight_decay,
            self.decoupled,
            0.0,
            0.0,
            False,
            False,
            *moments,
        )

    def apply(
        self,
        p: torch.Tensor,
        g: torch.Tensor,
        buffers: list[torch.Tensor],
        t: int,
        powers: Powers | None = None,
    ) -> None:
        """Apply the rule in torch: the reference."""
        mean, square = buffers
        power1, power2 = self.powers(t) if powers is None else powers
        beta1, beta2 = self.betas
        if self.decoupled:
            p.mul_(self.shrink)
        else:
            g = g + self.weight_decay * p
        mean.add_((1 - beta1) * (g - mean))
        square.copy_(beta2 * square + (1 - beta2) * g * g)
        root = square.sqrt() / math.sqrt(1 - power2) + self.eps
        p.sub_(self.lr / (1 - power1) * (mean / root))


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """The rule of ``torch.optim.AdamW`` (decoupled weight decay)."""

    weight_decay: float = 1e-2

    @property
    def decoupled(self) -> bool:
        """Whether the decay multiplies the parameter (AdamW)."""
        return True


Rule = SGD | Adam


def _fresh_state(names: Sequence[str], params: Sequence[torch.Tensor]) -> State:
    return State(0, {name: [torch.zeros_like(p) for p in params] for name in names})
