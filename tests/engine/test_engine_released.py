"""Sums in front of a release: every sample alone, its whole correlation map, by the definitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpkern
from dpkern.base.errors import PrivacyError, UnsupportedModule
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums, prepare
from dpkern.ops.spectral import Band, pencil
from dpkern.privacy.mechanisms.release import DiagonalMap, PartialNoiseMap, ReleaseMap, WhitenedCrop
from dpkern.privacy.mechanisms.site import Site
from tests.engine.engine_oracle import cast, draw, make, reference_gradients, sample_losses
from tests.engine.released_oracle import (
    MODELS,
    B,
    compare,
    expected,
    grid,
    maps_of,
    plan_of,
    released,
    surveyed,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def of_site(kind: str, site: Site) -> ReleaseMap | None:
    """The release of a mechanism of this kind at a site."""
    if site.kind == "other":
        return None
    size = grid(site)
    spread = site.dilation if site.kind == "conv" else (1,)
    some, every = Band(size, "shells", 0.4), Band(size, "all")
    given: dict[str, Any] = {"site": site, "size": size}
    if kind == "spectrum":
        return WhitenedCrop(**given, norm="spectrum")
    if kind == "spectrum, printed scaling":
        return WhitenedCrop(**given, norm="spectrum", gain=0.3)
    if kind in ("spectrum, filtered", "kept", "gradient, filtered", "whitened"):
        # real noise: the coordinates are no plain rotation
        made = pencil(some, site.kernel, spread, 1.0, 0.5)
        norm = {"kept": "kept", "whitened": "release"}.get(kind, kind.partition(",")[0])
        return WhitenedCrop(site=site, band=some, norm=norm, signal=made.signal, post=made.post)
    if kind == "coordinates":
        made = pencil(every, site.kernel, spread, 1.0, 0.0)
        keep = made.lam > 1e-3
        return WhitenedCrop(site=site, signal=made.signal[keep], post=made.post[:, keep], gain=0.5)
    assert kind == "open"
    return PartialNoiseMap(**given, norm="spectrum", noise=np.ones((site.taps, 2)))


KINDS = (
    "spectrum",
    "spectrum, printed scaling",
    "spectrum, filtered",
    "kept",
    "gradient, filtered",
    "whitened",
    "coordinates",
    "open",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_are_those_of_one_sample_at_a_time(name: str, kind: str) -> None:
    model, inputs, sites = surveyed(name)
    compare(model, inputs, [of_site(kind, site) for site in sites], sites)


@pytest.mark.parametrize("kind", ["spectrum", "kept", "whitened"])
def test_also_in_float32_layer_by_layer_with_and_without_kept_gradients(kind: str) -> None:
    for keep_budget in (0.0, 100.0):
        model, inputs, sites = surveyed("lenet")
        releases = [of_site(kind, site) for site in sites]
        options: dict[str, Any] = {"per_layer": True, "keep_budget": keep_budget}
        compare(model, inputs, releases, sites, dtype=torch.float32, **options)
        compare(model, inputs, releases, sites, dtype=torch.float32, keep_budget=keep_budget)


def test_a_mean_loss_changes_nothing() -> None:
    model, inputs, sites = surveyed("strided, grouped, dilated")
    releases = [of_site("whitened", site) for site in sites]
    compare(model, inputs, releases, sites, reduction="mean")


@pytest.mark.parametrize("kind", ["whitened", "coordinates"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_exact_arithmetic_gets_release_coordinates(name: str, kind: str, reduction: str) -> None:
    model, inputs, sites = surveyed(name)
    model, inputs = model.double(), cast(inputs, torch.float64)
    releases = [of_site(kind, site) for site in sites]
    plan = plan_of(model, releases, arithmetic="exact")
    found = released(model, inputs, plan, reduction=reduction)
    grads, maps = reference_gradients(model, inputs), maps_of(model, inputs, sites)
    for mine, release, g, m, block in zip(found, releases, grads, maps, plan.blocks, strict=True):
        _, summed = expected(release, g, m)
        wanted = summed if release is None else release.forward(summed)
        assert mine.shape == (B, *block.release_shape)
        assert (mine - wanted).abs().max() <= 1e-10 * wanted.abs().max()


def test_a_sample_that_is_not_finite_is_dropped() -> None:
    model, inputs, sites = surveyed("lenet")
    model = model.double()
    plan = plan_of(model, [of_site("whitened", site) for site in sites])
    clean = released(model, [inputs[0][1:]], plan)
    inputs[0][0, 0, 0, 0] = float("nan")
    result = released(model, inputs, plan)
    assert int(result.nonfinite) == 1
    for mine, theirs in zip(result.sums, clean.sums, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_another_use_than_the_surveyed_one_is_refused(arithmetic: str) -> None:
    model = make(Twice).double()
    x = draw(B, 2, 6, 6)
    sites = dpkern.survey(model, x)
    release = of_site("whitened", sites[0])
    plan = plan_of(model, [release], arithmetic=arithmetic)
    assert released(model, [x], plan) is not None
    with pytest.raises(UnsupportedModule, match=r"layer\.weight.*survey"):
        released(model, [draw(B, 2, 7, 6)], plan)
    model.times = 2
    with pytest.raises(UnsupportedModule, match=r"layer\.weight.*survey"):
        released(model, [x], plan)


def test_a_release_may_not_change_between_backward_and_step() -> None:
    model, inputs, sites = surveyed("lenet")
    plan = plan_of(model, [of_site("whitened", site) for site in sites])
    capture = Capture(model.double(), loss_reduction="sum")
    prepare(capture, lambda: plan)
    capture.attach()
    sample_losses(model(*inputs)).sum().backward()
    same = replace(plan, blocks=tuple(
        block if block.release is None else replace(block, release=of_site("whitened", site))
        for block, site in zip(plan.blocks, sites, strict=True)
    ))  # fmt: skip
    other = plan_of(model, [of_site("kept", site) for site in sites])
    with pytest.raises(PrivacyError, match="another release"):
        clipped_sums(capture, other)
    assert clipped_sums(capture, same) is not None
    capture.detach()


def test_l1_bounds_speak_of_release_coordinates_or_are_refused() -> None:
    model, inputs, sites = surveyed("strided, grouped, dilated")
    model, inputs = model.double(), cast(inputs, torch.float64)
    grads = reference_gradients(model, inputs)
    scales = [0.5 + draw(*g.shape[1:]).double().abs() for g in grads]
    found = released(model, inputs, plan_of(model, [DiagonalMap(scale=s) for s in scales], p=1))
    pairs = zip(grads, scales, strict=True)
    wanted = torch.stack([(g / s).abs().flatten(1).sum(1) for g, s in pairs]).sum(0)
    assert (found.norms - wanted).abs().max() <= 1e-10 * wanted.max()

    centred = [DiagonalMap(centre=s) for s in scales]
    for releases in ([of_site("spectrum", site) for site in sites], centred):
        with pytest.raises(UnsupportedModule, match="L1"):
            released(model, inputs, plan_of(model, releases, p=1))
