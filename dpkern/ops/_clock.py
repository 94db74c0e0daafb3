"""The step count in device memory: what lets a recorded graph of launches make fresh noise.

A clock is an int64 tensor ``[3]`` beside the parameters: the steps taken so far, and the bits of
the float64 powers ``beta1^t`` and ``beta2^t`` of the update that comes next, ``t = steps + 1``. The
steps join the nonce word of the noise's streams; the powers are Adam's bias corrections.
"""

from __future__ import annotations

import torch

from .. import _validate as check
from .._dispatch import Cost, op
from ..errors import InvalidInput
from ._rules import SGD, Adam, Powers, Rule

SIZE = 3


def clock(rule: Rule, steps: int, device: torch.device | str) -> torch.Tensor:
    """A clock for the update after ``steps`` others."""
    powers = torch.tensor(rule.powers(steps + 1), dtype=torch.float64)
    return torch.cat((torch.tensor([steps]), powers.view(torch.int64))).to(device)


def read(clock: torch.Tensor) -> tuple[int, Powers]:
    """Steps taken and the powers; the host waits for them."""
    steps, *bits = clock.tolist()
    beta1, beta2 = torch.tensor(bits).view(torch.float64).tolist()
    return steps, (beta1, beta2)


def check_clock(name: str, clock: object, device: torch.device | None = None) -> torch.Tensor:
    """A tensor made by ``clock``, on this device.

    Raises:
        InvalidInput: anything else.
    """
    kind = {"dtypes": (torch.int64,), "contiguous": True}
    return check.tensor_at(name, clock, shape=(SIZE,), device=device, **kind)  # type: ignore[arg-type]


def _validate_advance(clock: torch.Tensor, *, rule: Rule, backend: str | None = None) -> str:
    if not isinstance(rule, (SGD, Adam)):
        raise InvalidInput(
            "rule",
            expected="an update.SGD, Adam or AdamW",
            got=type(rule).__name__,
            remedy="Pass the rule that the clock was made for.",
        )
    return check_clock("clock", clock).device.type


def _cost_advance(clock: torch.Tensor, **_: object) -> Cost:
    return Cost(bytes_read=8 * SIZE, bytes_written=8 * SIZE, flops=SIZE)


@op(validate=_validate_advance, cost=_cost_advance)
def advance(clock: torch.Tensor, *, rule: Rule, backend: str | None = None) -> torch.Tensor:
    """One more step, in place: ``steps += 1`` and each power times its beta.

    Args:
        clock: int64 ``[3]``, from ``clock``.
        rule: the rule that the clock was made for.
        backend: who runs it.

    Returns:
        The clock.

    Raises:
        InvalidInput: no clock, or no rule.
    """
    clock[0] += 1
    powers = clock[1:].view(torch.float64)
    for i, beta in enumerate(rule.betas if isinstance(rule, Adam) else (1.0, 1.0)):
        powers[i] *= beta
    return clock


__all__ = ["SIZE", "advance", "check_clock", "clock", "read"]
