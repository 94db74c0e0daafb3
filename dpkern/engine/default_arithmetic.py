"""Choose the arithmetic of a run that asks for none.

Integer sums certify released bits, sums of floats real-number sums only (``docs/accounting.md``).
Integers are the default wherever the engine makes them in place: they then take the time and the
memory of floats (``docs/exact.md``).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..base import dispatch
from ..nn import BlockCirculantLinear
from ..ops.clip import sum_dtype
from ..privacy.mechanisms.base import Mechanism
from .arguments import MakePrivateOptions
from .capture import Capture


def choose_arithmetic(
    options: MakePrivateOptions, capture: Capture, *, mechanism: Mechanism | None
) -> tuple[MakePrivateOptions, str]:
    """Return the options with an arithmetic, and a sentence if floats are taken by default.

    Args:
        options: those of the user.
        capture: of the module.
        mechanism: the user's mechanism, which has an arithmetic of its own.
    """
    if mechanism is not None or options.arithmetic is not None:
        return options, ""
    why = _why_float(options, capture)
    sentence = f"sums are made in floating point by default, because {why}" if why else ""
    return replace(options, arithmetic="float" if why else "exact"), sentence


def _why_float(options: MakePrivateOptions, capture: Capture) -> str:
    """Return why integers would not be made in place; empty if they are."""
    parameters = capture.parameters
    devices = {p.device.type for p in parameters} - {"cpu"}
    wide = {p.dtype for p in parameters if sum_dtype(p.dtype) is not torch.float32}
    circulant = _has_circulant(capture.module)
    available, missing = dispatch.availability("cpu")
    checks = (
        (
            options.clipping == "automatic",
            "automatic clipping would write integers of every sample out",
        ),
        (bool(devices), f"integers on {', '.join(sorted(devices))} were not timed beside floats"),
        (bool(wide), f"integers of {', '.join(map(str, wide))} gradients would be written out"),
        (circulant, "integers of circulant layers would be written out"),
        (not available, f"the compiled kernels are not used: {missing}"),
    )
    return next((reason for found, reason in checks if found), "")


def _has_circulant(module: nn.Module) -> bool:
    return any(isinstance(part, BlockCirculantLinear) for part in module.modules())


__all__ = ["choose_arithmetic"]
