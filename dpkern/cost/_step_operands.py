"""Closed form of a clipped sum of spectral layers, made of their inputs and output gradients.

For each clip group with float sums the engine takes a squared norm per layer, of the whole spectrum
or of the kept part, one clip factor per sample, and one weighted sum per layer, which is filtered
where the mechanism filters. Parameters of other layers come as per-sample gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..base.counts import Counts
from ..base.errors import InvalidInput
from ..ops import spectral
from ..ops.spectral import Band
from ..ops.spectral.bins import kept_bins
from ..privacy.mechanisms.plan import Block
from ..privacy.mechanisms.release import Taps
from ..privacy.mechanisms.site import Site
from . import _glue as glue
from ._ops import call, shaped
from ._step_maps import Items, exact
from .phases import CLIP


def operands(site: Site, batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shape-only tensors for a layer's input and output gradient."""
    if site.kind == "circulant":
        rows, columns, block = site.shape
        positions = site.input
        return (
            shaped((batch, *positions, columns, block), dtype),
            shaped((batch, *positions, rows, block), dtype),
        )
    channels = site.shape[1] * site.groups
    return (
        shaped((batch, channels, *site.input), dtype),
        shaped((batch, site.shape[0], *site.output), dtype),
    )


def geometry(site: Site) -> dict[str, object]:
    """Return a convolution's arguments."""
    names = ("stride", "padding", "dilation", "groups")
    return {"kernel_size": site.kernel, **{name: getattr(site, name) for name in names}}


def release_of(block: Block) -> Taps:
    """Return the block's release map, whose norm must be a spectrum's.

    Raises:
        InvalidInput: another one.
    """
    release = block.release
    if isinstance(release, Taps) and release.norm in ("spectrum", "kept"):
        return release
    raise InvalidInput(
        "samples",
        expected="layers that are clipped by the norm of their spectrum",
        got=f"parameter {block.index}, clipped by its "
        f"{'gradient' if release is None else release.norm}",
        remedy="Use samples='gradients' or 'released'.",
    )


def summing(
    blocks: Sequence[Block],
    groups: Sequence[Sequence[int]],
    clipped: Sequence[int],
    batch: int,
    dtype: torch.dtype,
) -> Items:
    """Count norms, factors and sums of every clip group."""
    items: Items = []
    for group, shrunk in zip(groups, clipped, strict=True):
        layers = [blocks[i] for i in group if blocks[i].release is not None]
        others = [blocks[i] for i in group if blocks[i].release is None]
        grads = [shaped((batch, *block.shape), dtype) for block in others]
        outs = [shaped(block.shape, dtype) for block in others]
        factors = shaped((batch,), dtype)
        for block in layers:
            items += _norm(release_of(block), batch, dtype)
        if others:
            items += call("ghost.explicit_norm", CLIP, grads)
        parts = [shaped((batch,), torch.float64)] * (len(layers) + bool(others))
        items += call(
            "ghost.clip_factors", CLIP, parts, blocks[group[0]].bound, dtype=dtype, clipped=shrunk
        )
        entries = sum(math.prod(blocks[i].shape) for i in group)
        items += exact(f"{CLIP}: accumulators", glue.filled(entries))
        for block in layers:
            items += _sum(release_of(block), block, factors)
        if others:
            items += call("ghost.contract", CLIP, grads, factors, outs)
    return items + exact(f"{CLIP}: which are finite", _told(len(groups), batch))


def _told(groups: int, batch: int) -> Counts:
    """Count the norm over all groups, and how many samples have no finite norm."""
    combined = Counts()
    if groups > 1:
        each = glue.each(groups * batch) + glue.each(groups * batch, MUL=1)
        combined = each + glue.folded(groups * batch, batch, "ADD") + glue.each(batch, SQRT=1)
    counted = glue.each(batch, NOT=1) + glue.sum_read(batch)
    return combined + glue.are_finite(batch) + counted


def by_bins(release: Taps, x: torch.Tensor, g: torch.Tensor) -> bool:
    """Whether the retained bins of the norm serve the sum too."""
    band = release.band
    if not isinstance(band, Band) or release.norm != "spectrum" or release.site.kind != "conv":
        return False
    size = band.size if release.size is None else release.size
    route = spectral.sum_route(x, g, size=size, band=band, **geometry(release.site))  # type: ignore[arg-type]
    return size == band.size and route == "bins"


def _norm(release: Taps, batch: int, dtype: torch.dtype) -> Items:
    site, band = release.site, release.band
    x, g = operands(site, batch, dtype)
    gained = exact(f"{CLIP}: gain", glue.each(batch, MUL=1))
    kept = band if release.norm == "kept" else None
    if site.kind == "circulant":
        return call("spectral.circulant_norm", CLIP, x, g, band=kept) + gained
    arguments = geometry(site)
    if by_bins(release, x, g):
        return call("spectral.conv_bins", CLIP, x, g, band=band, **arguments) + gained
    size = release.size if release.size is not None else getattr(band, "size", None)
    return call("spectral.conv_norm", CLIP, x, g, size=size, band=kept, **arguments) + gained


def _sum(release: Taps, block: Block, factors: torch.Tensor) -> Items:
    site, band = release.site, release.band
    x, g = operands(site, len(factors), factors.dtype)
    out = shaped(block.shape, factors.dtype)
    if site.kind == "circulant":
        return call("spectral.circulant_sum", CLIP, x, g, factors, out, band=band)
    arguments = geometry(site)
    if band is None:
        return call("ghost.conv_sum", CLIP, x, g, factors, out, **arguments)
    assert isinstance(band, Band)
    size = band.size if release.size is None else release.size
    route = spectral.sum_route(x, g, size=size, band=band, **arguments)  # type: ignore[arg-type]
    if route == "bins":
        kept = len(kept_bins(band))
        pairs = [shaped((kept, len(x), 2, t.shape[1]), x.dtype) for t in (x, g)]
        made = (
            []
            if by_bins(release, x, g)
            else call("spectral.conv_bins", CLIP, x, g, band=band, **arguments)
        )
        return made + call("spectral.bins_sum", CLIP, *pairs, factors, out)
    rows = site.least
    filtered = call("spectral.filtered", CLIP, x, padding=site.padding, rows=rows, band=band)
    inputs = shaped((*x.shape[:2], *rows), x.dtype)
    plain = {**arguments, "padding": (0,) * site.axes}
    return filtered + call("ghost.conv_sum", CLIP, inputs, g, factors, out, **plain)


__all__ = ["geometry", "operands", "summing"]
