"""The step count in device memory, with which a recorded graph of launches makes fresh noise.

A step counter is an int64 tensor ``[3]`` beside the parameters: the steps taken so far, and the
bits of the float64 powers ``beta1^t`` and ``beta2^t`` of the update that comes next, ``t = steps +
1``. The steps join the nonce word of the noise's streams; the powers are Adam's bias corrections.
"""

from __future__ import annotations

import torch

from ..base import validate as check
from ._rules import Powers, Rule

SIZE = 3


def step_counter(rule: Rule, steps: int, device: torch.device | str) -> torch.Tensor:
    """Return a step counter for the update after ``steps`` others."""
    powers = torch.tensor(rule.powers(steps + 1), dtype=torch.float64, device="cpu")
    return torch.cat((torch.tensor([steps], device="cpu"), powers.view(torch.int64))).to(device)


def read(step_counter: torch.Tensor) -> tuple[int, Powers]:
    """Return the steps taken and the powers; the host waits for them."""
    steps, *bits = step_counter.tolist()
    beta1, beta2 = torch.tensor(bits, device="cpu").view(torch.float64).tolist()
    return steps, (beta1, beta2)


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


__all__ = ["SIZE", "check_step_counter", "read", "step_counter"]
