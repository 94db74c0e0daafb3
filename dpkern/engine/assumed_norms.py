"""Say which norms of convolutions rest on the error of a library's Fourier transforms.

Kernels of ours compute the others, with bounds that are proved of themselves (docs/spectral.md).
"""

from __future__ import annotations

import math

import torch

from ..base.dispatch import availability, wanted_backend
from ..base.layouts import SPECTRAL_VOLUME_WIDE
from ..ops.spectral._lines import LONGEST, LONGEST_WHOLE
from ..ops.spectral._plan import takes
from ..ops.spectral._sizes import axes, fast
from ..privacy.mechanisms import Plan
from ..privacy.mechanisms.release import Taps
from ..step import DPStep

_BLOCK = 128
"""Largest blocks of circulant layers whose norms are all taken by kernels of ours."""

_COLUMN = 1024
"""Values of a column that blocks of CUDA's kernels hold, whatever their factors."""


_VOLUME = int(SPECTRAL_VOLUME_WIDE)
"""Complex numbers of volumes' planes and columns that they hold, for one frequency of rows."""


class AssumedNorms:
    """Enter into the ledger what norms rest on, for each backend that takes some of them.

    Args:
        step: the private step, whose plan says what is normed and on which grids.
        device: the parameters' device.
        backend: the backend of all steps; None is that in force around each.
    """

    def __init__(self, step: DPStep, device: torch.device, backend: str | None) -> None:
        self._step, self._device, self._backend = step, device, backend
        self._looked_at: set[str | None] = set()
        self()

    def __call__(self) -> None:
        """Enter it for the backend that is in force now."""
        backend = self._backend or wanted_backend()
        if backend in self._looked_at:
            return
        self._looked_at.add(backend)
        assumed = assumption_of(self._step.plan, self._device, backend)
        if assumed is not None:
            self._step.ledger.assume(assumed)


def assumption_of(plan: Plan, device: torch.device, backend: str | None) -> str | None:
    """Return the condition under which such norms are not too small; None where none is."""
    places = []
    for release in dict.fromkeys(block.release for block in plan.blocks):
        if not (isinstance(release, Taps) and release.needs_operands):
            continue
        size: tuple[int, ...] = release.size or getattr(release.band, "size", None) or ()
        if size and not _proved(release, size, device, backend):
            places.append(f"grids of {' x '.join(map(str, size))}")
    if not places:
        return None
    return (
        "torch's Fourier transforms keep the error that theory gives fast transforms: "
        f"norms are taken by them on {', '.join(dict.fromkeys(places))}"
    )


def _proved(
    release: Taps, size: tuple[int, ...], device: torch.device, backend: str | None
) -> bool:
    """Whether a kernel takes this norm."""
    if backend in ("reference", "numba"):
        return False
    if device.type != "cpu":
        short = max(size) <= LONGEST and len(size) < 3
        return short or _proved_on_device(release, size, backend)
    if not availability("cpu")[0]:
        return False
    if release.site.kind != "conv":
        return max(size) <= _BLOCK
    return takes(axes(_grid(release, size)))


def _proved_on_device(release: Taps, size: tuple[int, ...], backend: str | None) -> bool:
    """Whether a kernel takes this norm, on a grid that is too large for Triton's."""
    if backend not in ("cuda", "cupy") and not (backend is None and availability("cuda")[0]):
        return False
    grid = axes(_grid(release, size))
    if len(grid) == 2:
        held = grid[0] <= _COLUMN
    else:
        held = 2 * math.prod(grid[:2]) <= _VOLUME and max(grid) <= LONGEST_WHOLE
    return release.site.kind == "conv" and held and takes(grid)


def _grid(release: Taps, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the grid that the norm is taken on, ``ConvolutionGrid.norm_size`` without a band."""
    if release.band is not None:
        return size
    site = release.site
    found = list(size)
    for axis, (stride, outputs) in enumerate(zip(site.stride, site.output, strict=True)):
        at = axis + len(size) - site.axes
        linear = site.least[axis] + stride * (outputs - 1)
        if size[at] >= linear:
            found[at] = fast(linear, stride)
    return tuple(found)
