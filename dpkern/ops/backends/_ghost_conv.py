"""Choose routes of the compiled kernels of convolutions, and the layout of kept gradients."""

from __future__ import annotations

import torch

from ...base.dtypes import sum_dtype
from ...base.kernel import Kernel
from ...base.schema import BoundCall
from ..ghost import conv
from ..ghost.conv import Geometry
from ._native import compiled


@compiled
def conv_order(plan: Geometry, wide: bool) -> int:
    """Return which channels lie innermost in kept gradients.

    These are 0 for those of the inputs, 1 for those of the outputs, 2 for neither. ``wide`` stands
    for float64.
    """
    raise NotImplementedError


def gradients(bound: BoundCall) -> torch.Tensor:
    """Allocate the gradients ``[B, co, ci / groups, *kernel]``, in the kernel's order."""
    geometry: Geometry = bound.plan
    out, per_group, *kernel = geometry.weight_shape
    kind, batch, last = sum_dtype(bound.args[0].dtype), geometry.batch, 2 + len(kernel)
    order = conv_order(geometry, kind is torch.float64)
    if order == 0:
        made = torch.empty(batch, out, *kernel, per_group, dtype=kind, device="cpu")
        return made.permute(0, 1, last, *range(2, last))
    if order == 1:
        made = torch.empty(batch, per_group, *kernel, out, dtype=kind, device="cpu")
        return made.permute(0, last, 1, *range(2, last))
    return torch.empty(batch, out, per_group, *kernel, dtype=kind, device="cpu")


def planar(compiled: Kernel) -> Kernel:
    """Make a kernel of planes and lines, which has no third dimension."""

    def refuse(bound: BoundCall) -> str | None:
        if bound.args[0].dim() == 5:
            return "has convolutions of 1 and 2 spatial dimensions, got 3"
        return None if compiled.refuse is None else compiled.refuse(bound)

    return Kernel(compiled.run, refuse)


def norm(compiled: Kernel) -> Kernel:
    """Run the kernel of ``ghost.conv_norm``, with its route chosen."""

    def run(bound: BoundCall) -> torch.Tensor:
        *others, route = bound.args
        args = *others, conv.norm_route(bound.plan, route)
        squares: torch.Tensor = compiled.run(bound._replace(args=args))
        return squares

    return planar(Kernel(run, compiled.refuse))


__all__ = ["gradients", "norm", "planar"]
