"""What the published Spectral-DP code does, item by item, and what it then certifies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern.ops.spectral import Band, literal
from dpkern.privacy.accounting.events import non_private
from dpkern.privacy.mechanisms import PartialNoiseMap, SpectralDP, WhitenedCrop
from tests.privacy.mechanisms.spectral_sites import LENET, NETWORK, circulant, conv, other, shapes

pytestmark = pytest.mark.usefixtures("one_thread")


def coded(sites: Any, *, sigma: float = 30.0, batch: int = 4, **changes: Any) -> SpectralDP:
    dense = all(site.kind == "other" for site in sites)
    made = SpectralDP.as_coded(sigma, 1.0, batch, sites=sites, allow_time_domain=dense)
    return replace(made, **changes)


def test_lenet_layer_by_layer() -> None:
    """Certified share of sigma of each convolution, noise once per batch; the third has holes."""
    once = {"gradient_units": "sum", "batch_size": None, "noise_point": "per_batch"}
    for site, size, expected in zip(LENET, (59, 23, 5), (0.7765, 0.5227, 0.0), strict=True):
        mechanism = coded((site,), sigma=10.0, **once)
        plan = mechanism.plan([site.shape])
        (block,) = plan.blocks
        assert plan.noise_multiplier == pytest.approx(10 * expected, abs=6e-4)
        assert isinstance(block.release, WhitenedCrop if expected else PartialNoiseMap)
        assert block.release.size == (size, size)
        assert (plan.spec == non_private()) == (expected == 0)
    assert coded(LENET, **once).certified_for == "nothing"


def test_circulant_layer() -> None:
    """Noise on one frequency of each pair, real part taken: sigma / 2."""
    site = circulant(2, 3, 8)
    mechanism = coded((site,), sigma=10.0, gradient_units="sum", batch_size=None,
                      noise_point="per_batch")  # fmt: skip
    assert mechanism.event_spec()["noise_multiplier"] == pytest.approx(5, rel=1e-8)
    assert mechanism.band((8,)).gains.tolist() == [1, 1, 0.5, 0.5, 0, 0.5, 0.5, 1]


def test_mean_gradients_cost_the_root_of_the_batch() -> None:
    """N = 500: sigma / 22.36 before any effect of the mask."""
    plan = coded((other(7), other(3)), sigma=30.0, batch=500).plan([(7,), (3,)])
    assert plan.noise_multiplier == pytest.approx(30 / math.sqrt(500), rel=1e-8)
    assert plan.noise_multiplier == pytest.approx(30 / 22.36, rel=1e-4)
    # Each of two layers is clipped to C / sqrt(2) in units of the mean, which is right.
    assert plan.bounds == pytest.approx([500 / math.sqrt(2)] * 2)
    assert plan.scales == pytest.approx([30 * math.sqrt(500)] * 2)
    assert (plan.noise_point, plan.samples) == ("per_sample", 500)
    right = coded((other(7), other(3)), sigma=30.0, batch=500, gradient_units="sum")
    assert right.event_spec()["noise_multiplier"] == pytest.approx(30 * math.sqrt(500), rel=1e-7)


def test_everything_together() -> None:
    sites = (conv(6, 1, 5, 32), other(6), circulant(2, 3, 8))
    plan = coded(sites, batch=16).plan(shapes(sites))
    each = 1 / 3 * (1 / 0.77647**2 + 1 + 4)  # C^2 / 3 per layer against its certified noise
    assert plan.noise_multiplier == pytest.approx(30 / 4 / math.sqrt(each), rel=1e-4)
    ids = [note.id for note in plan.notes]
    assert ids == ["G2", "G4", "S6.2", "S6.3", "S6.4", "S6.5", "S6.6"]
    assert coded(LENET, batch=16).plan(shapes(LENET)).spec == non_private()
    assert coded(sites).claimed_event_spec()["noise_multiplier"] == 30


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, ["G2", "G3"]),
        ({"noise_kind": "circular_full", "clipping": "flat"}, []),
        ({"noise_kind": "real"}, ["G1", "G2", "G3", "G5"]),
        ({"mask": "authors_slice"}, ["G2", "G3", "S6.2"]),
        ({"layer_bound": "c_over_sqrt_layers"}, ["G2", "S6.6"]),
        ({"mode": "corrected"}, []),
    ],
    ids=str,
)
def test_notes(changes: dict[str, Any], ids: list[str]) -> None:
    fields = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sites": NETWORK, "mode": "published"}
    mechanism = SpectralDP(**{**fields, **changes})
    assert [note.id for note in mechanism.plan(shapes(NETWORK)).notes] == ids


@pytest.mark.parametrize("size", [(9, 9), (8, 10)], ids=str)
def test_release_is_the_code_without_noise(size: Any) -> None:
    """Slice of the one-sided spectrum and a complex-to-real inverse: our filtered coordinates."""
    site = replace(conv(2, 3, 3, 4), input=size, output=(size[0] - 2, size[1] - 2))
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(2, 3, *size, generator=generator, dtype=torch.float64)
    g = torch.randn(2, 2, size[0] - 2, size[1] - 2, generator=generator, dtype=torch.float64)
    grid = tuple(2 * n - 3 for n in size)  # H' + Ho - 1 with Ho = H' - 2
    config = literal.Pipeline(
        kernel=(3, 3), size=grid, bound=1e9, band=Band(grid, "authors_slice", 0.5), stored=True
    )
    expected = literal.spectral_dp(x, g, config, generator)
    (block,) = coded((site,)).plan([site.shape]).blocks
    assert isinstance(block.release, WhitenedCrop)
    assert block.release.size == grid
    filtered = literal.spectral_dp(x, g, replace(config, stored=False), generator)
    again = block.release.to_gradient(block.release.forward(filtered))
    assert torch.allclose(again, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
