"""The step count in device memory, with which a recorded graph of launches makes fresh noise.

A step counter is an int64 tensor ``[6]`` beside the parameters: the steps taken so far; the bits of
the float64 numbers ``beta1^t``, ``beta2^t``, learning rate and ``1 - lr decay`` of the update that
comes next, ``t = steps + 1``; and which update may run. The steps join the nonce word of the
noise's streams; the numbers are those of a rule that change from step to step.

The last word is 0 where every update may run, whose caller advances the counter behind each. Else
it is the number of the one step that is due: an update at any other count does nothing at all, so
that a replay that was not announced, or comes twice, releases nothing.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from ..base import validate as check
from ._rules import Powers, Rule

SIZE = 6
EVERY, NONE = 0, -1
"""``due`` of a counter at which every update runs, and of one at which none does."""

_WORDS = struct.Struct("=qddddq")


class CountedStep(NamedTuple):
    """A step counter as the host reads it."""

    steps: int
    powers: Powers
    lr: float
    shrink: float
    due: int

    @property
    def is_due(self) -> bool:
        """Whether the update that comes next may run."""
        return self.due in (EVERY, self.steps + 1)


def packed(rule: Rule, steps: int, powers: Powers, due: int) -> bytes:
    """Return the bytes of a step counter."""
    return _WORDS.pack(steps, *powers, rule.lr, rule.shrink, due)


def step_counter(rule: Rule, steps: int, device: torch.device | str) -> torch.Tensor:
    """Return a step counter for the update after ``steps`` others, and for those behind it."""
    words = bytearray(packed(rule, steps, rule.powers(steps + 1), EVERY))
    return torch.frombuffer(words, dtype=torch.int64).to(device)


def write(counters: torch.Tensor, words: bytes) -> None:
    """Write step counters, on their device's current stream; the host does not wait."""
    host = torch.frombuffer(bytearray(words), dtype=torch.int64)
    if counters.is_cuda:
        host = host.pin_memory()  # torch keeps it until it was read
    counters.copy_(host.view(counters.shape), non_blocking=True)


def read(step_counter: torch.Tensor) -> CountedStep:
    """Return what a step counter says; the host waits for it."""
    steps, *bits, due = step_counter.tolist()
    beta1, beta2, lr, shrink = torch.tensor(bits, device="cpu").view(torch.float64).tolist()
    return CountedStep(steps, (beta1, beta2), lr, shrink, due)


def check_step_counter(
    name: str, step_counter: object, device: torch.device | None = None
) -> torch.Tensor:
    """Check that a tensor was made by ``step_counter``, on this device, and return it.

    Raises:
        InvalidInput: anything else.
    """
    kind = {"dtypes": (torch.int64,), "contiguous": True}
    shape = (SIZE,)
    return check.tensor_at(name, step_counter, shape=shape, device=device, **kind)  # type: ignore[arg-type]


__all__ = [
    "EVERY",
    "NONE",
    "SIZE",
    "CountedStep",
    "check_step_counter",
    "packed",
    "read",
    "step_counter",
    "write",
]
