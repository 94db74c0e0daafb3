"""Closed form of a clipped sum of layers, made of their inputs and output gradients.

For each clip group with float sums the engine takes a squared norm per layer, of the gradient, of
the whole spectrum or of its kept part, one clip factor per sample, and one weighted sum per layer,
which is filtered where the mechanism filters. Other parameters come as per-sample gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.counts import Counts
from ..base.errors import InvalidInput
from ..ops import spectral
from ..ops.spectral import Band
from ..ops.spectral.bins import kept_bins
from ..privacy.mechanisms.plan import Block, Plan
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


def summing(
    plan: Plan,
    clipped: Sequence[int],
    batch: int,
    dtype: torch.dtype,
    sites: Sequence[Site] = (),
) -> Items:
    """Count norms, factors and sums of every clip group.

    Raises:
        InvalidInput: a layer with another norm than these, L1 bounds, or sums of integers.
    """
    if plan.p != 2 or plan.arithmetic == "exact":
        raise InvalidInput(
            "samples",
            expected="float sums of gradients clipped in L2, to be made of operands",
            got=f"{plan.arithmetic} sums, clipped in L{plan.p}, of {plan.mechanism}",
            remedy="Use samples='gradients', or another kind of layer.",
        )
    items: Items = []
    for group, shrunk in zip(plan.groups, clipped, strict=True):
        members = [plan.blocks[i] for i in group]
        found = [_layer(block, sites) for block in members]
        layers = [layer for layer in found if layer is not None]
        given = [block for block, layer in zip(members, found, strict=True) if layer is None]
        written = [b for b, layer in zip(members, found, strict=True) if not _is_summed(layer)]
        factors = shaped((batch,), dtype)
        for layer in layers:
            items += layer.norm(batch, dtype)
        if given:
            grads = [shaped((batch, *block.shape), dtype) for block in given]
            items += call("ghost.explicit_norm", CLIP, grads)
        parts = [shaped((batch,), torch.float64)] * (len(layers) + bool(given))
        how: dict[str, Any] = {"dtype": dtype, "automatic": plan.clipping == "automatic"}
        items += call("ghost.clip_factors", CLIP, parts, members[0].bound, clipped=shrunk, **how)
        entries = sum(math.prod(block.shape) for block in members)
        items += exact(f"{CLIP}: accumulators", glue.filled(entries))
        for layer in layers:
            if layer.summed:
                items += layer.sum(factors)
        if written:
            grads = [shaped((batch, *block.shape), dtype) for block in written]
            outs = [shaped(block.shape, dtype) for block in written]
            items += call("ghost.contract", CLIP, grads, factors, outs)
    return items + exact(f"{CLIP}: which are finite", _told(len(plan.groups), batch))


@dataclass(frozen=True)
class Layer:
    """A layer whose norm is made of its operands.

    Attributes:
        block: its parameter.
        site: its geometry.
    """

    block: Block
    site: Site

    @property
    def summed(self) -> bool:
        """Whether the sum is made of the operands too, and not of gradients that are written."""
        return True

    def norm(self, batch: int, dtype: torch.dtype) -> Items:
        """Count each sample's squared norm."""
        return call("spectral.circulant_norm", CLIP, *operands(self.site, batch, dtype))

    def sum(self, factors: torch.Tensor) -> Items:
        """Count the weighted sum."""
        x, g = operands(self.site, len(factors), factors.dtype)
        out = shaped(self.block.shape, factors.dtype)
        return call("spectral.circulant_sum", CLIP, x, g, factors, out)


@dataclass(frozen=True)
class WrittenLayer(Layer):
    """A convolution whose per-sample gradients are written once, for norm and sum."""

    @property
    def summed(self) -> bool:
        return False

    def norm(self, batch: int, dtype: torch.dtype) -> Items:
        x, g = operands(self.site, batch, dtype)
        return call("ghost.conv_gradient", CLIP, x, g, **geometry(self.site))


@dataclass(frozen=True)
class WhitenedLayer(WrittenLayer):
    """A convolution whose filtered gradients are written, and clipped in whitened coordinates."""

    release: Taps

    def norm(self, batch: int, dtype: torch.dtype) -> Items:
        site, signal = self.site, self.release.signal
        assert signal is not None
        x, g = operands(site, batch, dtype)
        items: Items = []
        arguments = geometry(site)
        if self.release.band is not None:
            rows = site.least
            how: dict[str, Any] = {"padding": site.padding, "rows": rows}
            items += call("spectral.filtered", CLIP, x, band=self.release.band, **how)
            x = shaped((*x.shape[:2], *rows), x.dtype)
            arguments = {**arguments, "padding": (0,) * site.axes}
        items += call("ghost.conv_gradient", CLIP, x, g, **arguments)
        grads = shaped((batch, *self.block.shape), dtype)
        matrix = shaped(signal.shape, torch.float64)
        constants = exact(f"{CLIP}: gain", glue.each(matrix.numel(), MUL=1))
        return items + constants + call("spectral.whitened_norm", CLIP, grads, matrix)


@dataclass(frozen=True)
class WhitenedBinsLayer(Layer):
    """A convolution clipped in whitened coordinates, made of the bins that its sum takes too."""

    release: Taps

    @classmethod
    def serves(cls, release: Taps) -> bool:
        """Whether this is the cheaper way, as the engine chooses it."""
        site, band, signal = release.site, release.band, release.signal
        if not isinstance(band, Band) or signal is None:
            return False
        x, g = operands(site, 1, torch.float32)
        size = band.size if release.size is None else release.size
        how: dict[str, Any] = geometry(site)
        return spectral.norm_by_bins(x, g, rank=len(signal), size=size, band=band, **how)

    def norm(self, batch: int, dtype: torch.dtype) -> Items:
        x, g = operands(self.site, batch, dtype)
        signal = self.release.signal
        assert signal is not None
        matrix = shaped(signal.shape, torch.float64)
        how = {"band": self.release.band, **geometry(self.site)}
        gained = exact(f"{CLIP}: gain", glue.each(batch, MUL=1))
        return call("spectral.whitened_bins", CLIP, x, g, matrix, **how) + gained

    def sum(self, factors: torch.Tensor) -> Items:
        x, g = operands(self.site, len(factors), factors.dtype)
        assert isinstance(self.release.band, Band)
        out = shaped(self.block.shape, factors.dtype)
        return call("spectral.bins_sum", CLIP, *_bins(self.release.band, x, g), factors, out)


@dataclass(frozen=True)
class SpectrumLayer(Layer):
    """A layer that is clipped by the norm of its spectrum, or of its kept part."""

    release: Taps

    def norm(self, batch: int, dtype: torch.dtype) -> Items:
        return _norm(self.release, batch, dtype)

    def sum(self, factors: torch.Tensor) -> Items:
        return _sum(self.release, self.block, factors)


def _is_summed(layer: Layer | None) -> bool:
    return layer is not None and layer.summed


def _layer(block: Block, sites: Sequence[Site]) -> Layer | None:
    """Return how the block's norm is made; None where it comes as per-sample gradients.

    Raises:
        InvalidInput: a norm that is not counted.
    """
    release = block.release
    if release is None:
        site = sites[block.index] if sites else None
        if site is None or site.kind == "other":
            return None
        return Layer(block, site) if site.kind == "circulant" else WrittenLayer(block, site)
    if isinstance(release, Taps):
        if release.norm in ("spectrum", "kept"):
            return SpectrumLayer(block, release.site, release)
        whitened = release.norm == "release" and release.signal is not None
        if whitened and release.site.kind == "conv" and sites:
            kind = WhitenedBinsLayer if WhitenedBinsLayer.serves(release) else WhitenedLayer
            return kind(block, release.site, release)
    raise InvalidInput(
        "samples",
        expected="layers that are clipped by their gradient, spectrum or whitened coordinates",
        got=f"parameter {block.index}, clipped by its {release.norm}",
        remedy="Use samples='gradients' or 'released', or another kind of layer.",
    )


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


def _bins(band: Band, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    """Return both operands' retained bins."""
    kept = len(kept_bins(band))
    return [shaped((kept, len(x), 2, t.shape[1]), x.dtype) for t in (x, g)]


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
        made = (
            []
            if by_bins(release, x, g)
            else call("spectral.conv_bins", CLIP, x, g, band=band, **arguments)
        )
        return made + call("spectral.bins_sum", CLIP, *_bins(band, x, g), factors, out)
    rows = site.least
    filtered = call("spectral.filtered", CLIP, x, padding=site.padding, rows=rows, band=band)
    inputs = shaped((*x.shape[:2], *rows), x.dtype)
    plain = {**arguments, "padding": (0,) * site.axes}
    return filtered + call("ghost.conv_sum", CLIP, inputs, g, factors, out, **plain)


__all__ = ["geometry", "operands", "summing"]
