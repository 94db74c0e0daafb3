"""Say which norms of convolutions rest on the error of a library's Fourier transforms.

Kernels of ours compute the others, with bounds that are proved of themselves (docs/spectral.md).
"""

from __future__ import annotations

import torch

from ..base import layouts
from ..base.dispatch import availability
from ..ops.spectral._plan import LONGEST
from ..privacy.mechanisms import Plan
from ..privacy.mechanisms.release import Taps


def assumption_of(plan: Plan, device: torch.device, backend: str | None) -> str | None:
    """Return the condition under which such norms are not too small; None where none is."""
    longest, places = _longest(device, backend), []
    for release in dict.fromkeys(block.release for block in plan.blocks):
        if not (isinstance(release, Taps) and release.needs_operands):
            continue
        size: tuple[int, ...] = release.size or getattr(release.band, "size", None) or ()
        if max(size, default=0) > longest:
            places.append(f"grids of {' x '.join(map(str, size))}")
    if not places:
        return None
    return (
        "torch's Fourier transforms keep the error that theory gives fast transforms: "
        f"norms are taken by them on {', '.join(dict.fromkeys(places))}"
    )


def _longest(device: torch.device, backend: str | None) -> int:
    """Return the largest grid, on an axis, that kernels take; 0 where there are none."""
    if backend in ("reference", "numba"):
        return 0
    if device.type == "cpu":
        return LONGEST if availability("cpu")[0] else 0
    return int(layouts.SPECTRAL_GRID)
