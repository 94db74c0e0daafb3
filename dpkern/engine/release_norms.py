"""Give each parameter's per-sample gradients the norm that its release map clips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from ..base.errors import PrivacyError, UnsupportedModule
from ..privacy.mechanisms import Plan
from ..privacy.mechanisms.release import DiagonalMap, Taps
from .clip_norms import (
    L1Normed,
    NormedGradients,
    ReleaseNormed,
    ScaledNormed,
    SpectrumNormed,
    WhitenedBinsNormed,
    WhitenedNormed,
)
from .per_sample_gradients import CirculantGradients, ConvolutionGradients, PerSampleGradients
from .uses import ParameterSource

if TYPE_CHECKING:
    from .capture import Capture


class Kept(Protocol):
    """Rule by which gradients are materialized (``KeepBudget.kept``)."""

    def __call__(self, record: PerSampleGradients, *, written: bool = False) -> PerSampleGradients:
        """Return the gradients as they are, or materialized."""


def take_over(capture: Capture, plan: Plan) -> None:
    """Give each captured parameter its release map of this plan.

    Raises:
        PrivacyError: gradients have been normed for another release map.
    """
    capture.p = plan.p
    for slot, block in zip(capture.slots, plan.blocks, strict=True):
        if slot.release is block.release:
            continue
        normed = any(isinstance(arrival.record, NormedGradients) for arrival in slot.arrivals)
        if normed and slot.release != block.release:
            raise PrivacyError(
                slot.name,
                expected="the plan that was in force in the backward pass",
                got="another release of this parameter",
                remedy="Change the mechanism between steps, before the forward pass.",
            )
        slot.release = block.release


def with_clip_norm(
    slot: ParameterSource,
    record: PerSampleGradients,
    capture: Capture,
    scale: float = 1.0,
    kept: Kept | None = None,
) -> PerSampleGradients:
    """Return a parameter's gradients with the norm that its release map clips.

    Args:
        slot: the parameter.
        record: gradients of the whole parameter, with their own norm; if with that of the release
            map already, it is returned.
        capture: the capture that holds them.
        scale: factor from captured gradients to those of each sample's own loss.
        kept: returns gradients as they are, or materialized. None is the capture's budget.

    Raises:
        UnsupportedModule: a release map that needs another use of the parameter.
    """
    found = _with_clip_norm(slot, record, capture, scale, kept or capture.budget.kept)
    if isinstance(found, NormedGradients):
        found.samples_apart = capture.samples_apart
    return found


def _with_clip_norm(
    slot: ParameterSource, record: PerSampleGradients, capture: Capture, scale: float, kept: Kept
) -> PerSampleGradients:
    release = slot.release
    if isinstance(record, NormedGradients):
        return record
    if release is None:
        if capture.p == 1:
            return L1Normed(kept(record, written=True))
        return kept(record)
    if capture.p == 1:
        if release.needs_operands or release.centre is not None or release.norm != "release":
            raise UnsupportedModule(
                slot.name,
                expected="release coordinates that a gradient alone tells, with L1 bounds",
                got=f"a release clipped by its {release.norm}, {type(release).__name__}",
                remedy="Clip L2 norms, or coordinates without a centre.",
            )
        return ReleaseNormed(kept(record, written=True), release, capture.p)
    if isinstance(release, DiagonalMap):
        written = release.scale is not None and release.norm == "release"
        return ScaledNormed(kept(record, written=written), release, scale)
    if not isinstance(release, Taps):
        return ReleaseNormed(kept(record, written=True), release, capture.p)
    signal = release.signal if release.norm == "release" else None
    matrix = None if signal is None else torch.tensor(signal)
    if not release.needs_operands:
        record = kept(record, written=matrix is not None)
        return (
            record
            if matrix is None and release.gain == 1
            else WhitenedNormed(record, release, matrix)
        )
    check_use(slot, record, release)
    assert isinstance(record, (ConvolutionGradients, CirculantGradients))
    whole = SpectrumNormed(record, release)
    if matrix is None:
        return whole
    if isinstance(record, CirculantGradients):
        return WhitenedNormed(record, release, matrix @ whole.filter(), behind=whole)
    if whole.whitens_by_bins(len(matrix)):
        return WhitenedBinsNormed(record, release, matrix=matrix)
    filtered = whole.filtered()
    held = kept(filtered, written=True)
    behind = whole if held is filtered or capture.samples_apart else None
    return WhitenedNormed(held, release, matrix, behind=behind)


def check_use(slot: ParameterSource, record: PerSampleGradients, release: Taps) -> None:
    """Refuse a use of the parameter other than the one that its release map was made for.

    Raises:
        UnsupportedModule: it is another use.
    """
    site, got = release.site, f"a use as {type(record).__name__.lower()}"
    if isinstance(record, ConvolutionGradients) and site.kind == "conv":
        names = ("stride", "padding", "dilation", "groups")
        mine = (
            record.shape,
            tuple(record.x.shape[2:]),
            tuple(record.g.shape[2:]),
            *(record.geometry[name] for name in names),
        )
        wanted = (site.shape, site.input, site.output, *(getattr(site, name) for name in names))
        if mine == wanted:
            return
        got = f"a convolution {mine}"
    elif isinstance(record, CirculantGradients) and site.kind == "circulant":
        if record.shape == site.shape:
            return
        got = f"circulant blocks {record.shape}"
    raise UnsupportedModule(
        slot.name,
        expected=f"one use of the whole parameter, as at {site}",
        got=got,
        remedy="Make the sites anew, sites=dpkern.survey(model, example), with inputs of the size "
        "that is trained on; a layer that is used twice cannot have a spectrum's bound.",
    )
