"""Launch kernels, and pass their numbers.

Triton passes floats in single precision, retypes integers by their size and makes a kernel of its
own for some values. So integers are annotated and left unspecialised, and floating-point numbers
travel as the 64 bits of a float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, on CPU tensors: decided when they are defined,
by ``TRITON_INTERPRET=1``."""

DEVICE = "cpu" if INTERPRETED else "cuda"
"""The device type of the tensors."""


def at(device: torch.device | str) -> torch.device:
    """Return where a kernel runs whose result goes to ``device``: there, if it can."""
    wanted = torch.device(device)
    return wanted if wanted.type == DEVICE else torch.device(DEVICE)


def capability(x: torch.Tensor) -> int:
    """Return the compute capability of a tensor's device, without what follows the point."""
    if x.is_cuda:
        return torch.cuda.get_device_capability(x.device)[0]
    return int(triton.runtime.driver.active.get_current_target().arch) // 10


def launch(
    kernel: Any,
    grid: int,
    like: torch.Tensor,
    *args: Any,
    warps: int = 4,
    stages: int = 3,
    fused: bool = False,
    **constants: Any,
) -> None:
    """Run ``kernel`` on the device and current stream of ``like``.

    Products and sums stay apart unless ``fused``: a contracted one would round otherwise than every
    other backend's.
    """
    if grid == 0:
        return
    # The interpreter computes in numpy, which warns where a device's arithmetic goes on.
    with torch.cuda.device(like.device) if like.is_cuda else np.errstate(all="ignore"):
        # Kernels write what autograd watches: the caller tells it.
        detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        kernel[(grid,)](
            *detached, num_warps=warps, num_stages=stages, enable_fp_fusion=fused, **constants
        )


@triton.jit
def number(bits, dtype: tl.constexpr):
    """Return the float64 of these bits in ``dtype``, which holds it exactly."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(dtype)
