"""Spectral-DP: its released coordinates, what they certify, and that noise off it is a low-pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.ops.spectral import Band, literal, smoothing
from dpkern.ops.spectral._basis import covariance
from dpkern.ops.spectral._sizes import axes
from dpkern.privacy.accounting.events import non_private
from dpkern.privacy.mechanisms import PartialNoiseMap, Site, SpectralDP, WhitenedCrop
from dpkern.privacy.mechanisms._spectral_options import taps
from dpkern.step.step import DPStep
from tests.privacy.mechanisms.spectral_sites import NETWORK, circulant, conv, shapes

pytestmark = pytest.mark.usefixtures("one_thread")

S = math.sqrt(0.5)
AB = ("ab", 0.9, math.sqrt(0.19))
LAYER = (
    Site(
        kind="conv",
        shape=(4, 2, 3, 2),
        input=(9, 8),
        output=(4, 6),
        stride=(2, 1),
        padding=(1, 0),
        dilation=(2, 2),
        groups=2,
    ),
    Site(kind="conv", shape=(3, 2, 3), input=(11,), output=(5,), stride=(2,), padding=(0,),
         dilation=(1,)),
    conv(2, 3, 3, 8, padding=1),
    circulant(2, 3, 8),
)  # fmt: skip


def spectral(**changes: Any) -> SpectralDP:
    fields = {"noise_multiplier": 1.1, "max_grad_norm": 0.7, "sites": NETWORK}
    return SpectralDP(**{**fields, **changes})


def published(**changes: Any) -> SpectralDP:
    return spectral(**{"mode": "published", **changes})


PENCILS = [
    ((34, 34), 3, 0.5, "real", 0.3988),
    ((34, 34), 3, 0.5, "circular", 0.7071),
    ((34, 34), 3, 0.5, AB, 0.5372),
    ((34, 34), 3, 0.5, "circular_full", 1.0),
    ((14, 14), 5, 0.5, "real", 0.1370),
    ((14, 14), 5, 0.5, AB, 0.4490),
    ((14, 14), 5, 0.5, "circular", 0.7071),
]


@pytest.mark.parametrize("row", PENCILS, ids=str)
def test_certified_multiplier_of_one_layer(row: Any) -> None:
    size, d, keep, noise, expected = row
    mechanism = published(
        noise_multiplier=2.0, noise_kind=noise, keep_fraction=keep, sites=(conv(2, 3, d, size[0]),)
    )
    assert mechanism.event_spec()["noise_multiplier"] == pytest.approx(2 * expected, abs=2e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mode": "corrected"}, 1.0),
        ({"mode": "corrected", "noise_kind": "circular"}, S),
        ({"mode": "corrected", "clip_domain": "spectrum", "arithmetic": None}, 1.0),
        ({"clipping": "flat"}, S),
        ({"clipping": "flat", "noise_kind": "circular_full"}, 1.0),
        # Two of the five are biases, with noise of sd sigma C.
        ({}, 1 / math.sqrt(3 * 2 + 2)),
        ({"layer_bound": "c_over_sqrt_layers"}, math.sqrt(5 / (3 * 2 + 2))),
        ({"clip_domain": "kept", "clipping": "flat"}, S),
        ({"clip_domain": "cropped", "clipping": "flat"}, S),
    ],
    ids=str,
)
def test_claimed_and_certified(changes: dict[str, Any], expected: float) -> None:
    mechanism = published(**changes)
    certified = mechanism.event_spec()["noise_multiplier"]
    if changes.get("clip_domain") == "cropped":
        assert certified > 1.1 * expected * (1 - 1e-8)
    else:
        assert certified == pytest.approx(1.1 * expected, rel=2e-6)
    claim = mechanism.claimed_event_spec()["noise_multiplier"]
    assert claim == (certified if mechanism.mode == "corrected" else 1.1)


def test_corrected_releases_whitened_coordinates_as_integers() -> None:
    plan = spectral().plan(shapes(NETWORK))
    assert (plan.arithmetic, plan.certified_for) == ("exact", "released bits")
    assert [block.sensitivity_factor for block in plan.blocks] == [1.0] * 5
    releases = [plan.blocks[i].release for i in (0, 2, 4)]
    assert [r.norm for r in releases if isinstance(r, WhitenedCrop)] == ["release"] * 3
    assert [b.release_shape for b in plan.blocks] == [
        (6, 1, 25), (6,), (16, 6, 25), (16,), (2, 3, 5)
    ]  # fmt: skip
    assert plan.dimension == 6 * 25 + 6 + 96 * 25 + 16 + 30
    assert set(plan.scales) == {1.1 * 0.7}
    # Only convolutions need their operands; circulant layers filter their own gradient.
    assert [r.needs_operands for r in releases if r is not None] == [True, True, False]


@pytest.mark.parametrize("index", range(len(LAYER)))
@pytest.mark.parametrize("noise", ["circular", "circular_full", "real", AB], ids=str)
@pytest.mark.parametrize("mask", ["shells", "rectangle", "authors_slice"])
def test_law_of_the_release(index: int, noise: Any, mask: str) -> None:
    """Coordinates' white noise, led back, has the covariance of noise on the full spectrum."""
    site = LAYER[index]
    mechanism = published(sites=(site,), noise_kind=noise, mask=mask, clipping="flat")
    (block,) = mechanism.plan([site.shape]).blocks
    release = block.release
    assert isinstance(release, (WhitenedCrop, PartialNoiseMap))
    rank = block.release_shape[-1]
    pairs = math.prod(block.release_shape[:-1])
    lead = block.release_shape[:-1]
    columns = torch.eye(rank, dtype=torch.float64)
    factor = torch.stack(
        [release.to_gradient(row.expand(*lead, rank).contiguous()) for row in columns]
    ).reshape(rank, pairs, -1)
    assert (factor == factor[:, :1]).all()  # every pair has the same law
    factor = factor[:, 0] * block.noise_scale / (1.1 * 0.7)
    size = (site.block,) if site.kind == "circulant" else axes(site.padded)
    kernel, dilation = taps(site)
    a, b = mechanism.parts
    expected = covariance(Band(size, mask, 0.5), kernel, dilation, a, b, "mask")
    assert (factor.T @ factor).numpy() == pytest.approx(expected, abs=1e-9)


CONVS = [0, 2]


def operands(site: Site) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    channels = site.shape[1] * site.groups
    x = torch.randn(3, channels, *site.input, generator=generator, dtype=torch.float64)
    g = torch.randn(3, site.shape[0], *site.output, generator=generator, dtype=torch.float64)
    return x, g


def pipeline(site: Site, band: Band | None, bound: float = 1e9) -> literal.Pipeline:
    return literal.Pipeline(
        kernel=site.kernel,
        stride=site.stride,
        padding=site.padding,
        dilation=site.dilation,
        groups=site.groups,
        size=site.padded,
        bound=bound,
        band=band,
    )


@pytest.mark.parametrize("mask", ["shells", "rectangle", "authors_slice"])
@pytest.mark.parametrize("index", CONVS)
@pytest.mark.parametrize("keep", [0.1, 0.5])
def test_noise_off_is_the_low_pass(index: int, mask: str, keep: float) -> None:
    """Coordinates and back: what the literal pipeline gives without noise, and not the gradient."""
    site = LAYER[index]
    x, g = operands(site)
    generator = torch.Generator()
    band = Band(site.padded, mask, keep)
    low = literal.spectral_dp(x, g, pipeline(site, band), generator)
    full = literal.gredp(x, g, pipeline(site, None), generator)
    mechanism = published(sites=(site,), mask=mask, keep_fraction=keep, noise_multiplier=0.0)
    (block,) = mechanism.plan([site.shape]).blocks
    assert isinstance(block.release, WhitenedCrop)
    # The engine sums filtered gradients; the maps only change their basis.
    again = block.release.to_gradient(block.release.forward(low))
    assert torch.allclose(again, low, rtol=0, atol=1e-4 * float(low.abs().max()))
    assert not torch.allclose(low, full, rtol=0.1)


@pytest.mark.parametrize("convention", ["row", "column"])
@pytest.mark.parametrize("mask", ["shells", "authors_slice"])
def test_circulant_layers_are_filtered_by_a_matrix(mask: str, convention: str) -> None:
    site = circulant(2, 3, 8)
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(4, 1, 3, 8, generator=generator, dtype=torch.float64)
    g = torch.randn(4, 1, 2, 8, generator=generator, dtype=torch.float64)
    plain = literal.Pipeline(kernel=(8,), size=(8,), bound=1e9)
    config = replace(plain, band=Band((8,), mask, 0.5))
    gradient, low = (literal.circulant(x, g, c, generator) for c in (plain, config))
    if convention == "column":
        # The first column's gradient is that of the first row with its lags reversed.
        mirror = [(8 - j) % 8 for j in range(8)]
        gradient, low = gradient[..., mirror], low[..., mirror]
    whitened = published(sites=(site,), mask=mask, clip_domain="whitened")
    for mechanism in (published(sites=(site,), mask=mask), whitened):
        (block,) = mechanism.plan([site.shape]).blocks
        assert block.release is not None
        assert not block.release.needs_operands
        again = block.release.to_gradient(block.release.forward(gradient))
        assert torch.allclose(again, low, rtol=0, atol=1e-12)


def test_clip_norms_are_ordered() -> None:
    """Whitened <= kept <= spectrum for every sample, and each proves the same certificate."""
    site = LAYER[2]
    x, g = operands(site)
    band = Band((10, 10), "shells", 0.5)
    (block,) = spectral(sites=(site,), fft_size="padded").plan([site.shape]).blocks
    assert block.release is not None
    for b in range(3):
        sample = x[b : b + 1], g[b : b + 1]
        spectrum = next(literal._conv_spectra(*sample, pipeline(site, None)))
        low = literal.spectral_dp(*sample, pipeline(site, band), torch.Generator())
        full = float(spectrum.abs().square().sum().sqrt())
        kept = float((spectrum.abs().square() * torch.tensor(band.gains)).sum().sqrt())
        whitened = float(block.release.forward(low).norm())
        assert whitened < kept < full
        assert whitened > 0.1 * full


@pytest.mark.parametrize("noise", ["circular", "real", AB], ids=str)
def test_stretch_is_attained(noise: Any) -> None:
    """The worst correlation map of unit norm has exactly the stretch as its release norm."""
    site = conv(1, 1, 3, 6)
    (block,) = published(sites=(site,), noise_kind=noise).plan([site.shape]).blocks
    assert isinstance(block.release, WhitenedCrop)
    band = Band((6, 6), "shells", 0.5)
    impulses = torch.eye(36, dtype=torch.float64).reshape(36, 6, 6)
    maps = torch.fft.ifft2(torch.fft.fft2(impulses) * torch.tensor(band.gains)).real
    rows = block.release.forward(maps[:, None, None, :3, :3]).reshape(36, -1)
    top = float(torch.linalg.svdvals(rows)[0])
    assert top <= block.sensitivity_factor
    assert top == pytest.approx(block.sensitivity_factor, rel=1e-8)


def test_cropped_is_dominated() -> None:
    """Clip, embed, noise, filter, crop: M g + noise M, against DP-SGD followed by M."""
    site = conv(1, 1, 3, 34)
    mechanism = published(sites=(site,), clip_domain="cropped", noise_kind="circular_full")
    (block,) = mechanism.plan([site.shape]).blocks
    assert isinstance(block.release, WhitenedCrop)
    M = smoothing(Band((34, 34), "shells", 0.5), (3, 3), (1, 1))
    back, forward = block.release.post, block.release.signal
    assert back is not None
    assert forward is not None
    assert back @ forward == pytest.approx(M, abs=1e-12)
    assert back @ back.T == pytest.approx(M, abs=1e-12)
    assert block.sensitivity_factor == pytest.approx(np.linalg.norm(forward, 2), rel=1e-8)
    assert block.sensitivity_factor >= np.linalg.norm(forward, 2)
    assert np.trace(M) == pytest.approx(4.62, abs=0.05)
    assert np.linalg.eigvalsh(M - M @ M)[0] > -1e-12


def test_whitened_noise_is_white() -> None:
    """The literal pipeline's noise in the coordinates of six pairs: chi^2 of 54."""
    site = conv(6, 1, 3, 9)
    (block,) = spectral(sites=(site,), fft_size="padded").plan([site.shape]).blocks
    assert block.release is not None
    config = replace(pipeline(site, Band((9, 9), "shells", 0.5), 1.0), noise_multiplier=1.0,
                     noise=(1.0, 1.0))  # fmt: skip
    x, g = torch.zeros(1, 1, 9, 9), torch.zeros(1, 6 * 4000, 7, 7)
    noise = literal.spectral_dp(x, g, config, torch.Generator().manual_seed(10))
    squares = block.release.forward(noise).square().sum(-1).reshape(4000, 6).sum(1)
    assert float(squares.mean()) == pytest.approx(54, abs=1)
    assert float(squares.var()) == pytest.approx(108, abs=8)


def test_float_sums_keep_out_of_weak_directions() -> None:
    def magnified(**changes: Any) -> float:
        sites = (conv(2, 3, 5, 14),)
        (block,) = spectral(sites=sites, keep_fraction=0.1, **changes).plan(shapes(sites)).blocks
        assert isinstance(block.release, WhitenedCrop)
        assert block.release.signal is not None
        return float(np.linalg.cond(block.release.signal))

    assert magnified(arithmetic="float") < 2**10
    assert magnified(clip_domain="spectrum") < 2**10
    assert magnified() > 2**14
    assert magnified(mode="published") > 2**11


def test_steps_take_released_coordinates() -> None:
    """Explicit samples of a filtered layer come as coordinates; a circulant layer maps its own."""
    site = LAYER[2]
    x, g = operands(site)
    config = pipeline(site, Band(site.padded, "shells", 0.5))
    each = [
        literal.spectral_dp(x[b : b + 1], g[b : b + 1], config, torch.Generator()) for b in range(3)
    ]
    mechanism = spectral(
        sites=(site,), noise_multiplier=0.0, max_grad_norm=math.inf, fft_size="padded"
    )
    params = [torch.zeros(site.shape, dtype=torch.float64)]
    step = DPStep(mechanism, params, expected_batch_size=1.0, sample_rate=0.5)
    release = step.plan.blocks[0].release
    assert release is not None
    with pytest.raises(InvalidInput, match="released"):
        step.add([torch.stack(each)])
    step.add([release.forward(torch.stack(each))], released=True)
    (gradient,) = step.finish() or ()
    assert gradient is not None
    assert torch.allclose(gradient, sum(each), rtol=0, atol=1e-9)  # type: ignore[arg-type]


def test_circulant_steps_as_integers() -> None:
    """Corrected, exact: whitened coordinates are clipped to C and noised by sigma C each."""
    site = circulant(2, 3, 8)
    step = DPStep(
        spectral(sites=(site,), noise_multiplier=0.25),
        [torch.zeros(site.shape)],
        expected_batch_size=1.0,
        sample_rate=0.5,
        unsafe_seed=1,
    )
    release = step.plan.blocks[0].release
    assert release is not None
    gradients = torch.randn(4, *site.shape, generator=torch.Generator().manual_seed(2))
    coordinates = release.forward(gradients)
    norms = coordinates.flatten(1).norm(dim=1)
    assert (norms > 0.7).all()
    clean = release.to_gradient((coordinates * (0.7 / norms)[:, None, None, None]).sum(0))
    rows = []
    for _ in range(300):
        step.add([gradients])
        (gradient,) = step.finish() or ()
        assert gradient is not None
        rows.append(release.forward(gradient.double()))
    noise = torch.stack(rows) - release.forward(clean)
    assert float(noise.mean()) == pytest.approx(0, abs=0.01)
    assert float(noise.std()) == pytest.approx(0.25 * 0.7, rel=0.03)


def test_real_noise_on_circulant_layers_is_open() -> None:
    plan = published(noise_kind="real", sites=(circulant(1, 2, 8),)).plan([(1, 2, 8)])
    (block,) = plan.blocks
    assert isinstance(block.release, PartialNoiseMap)
    assert block.release.band == Band((8,), "shells", 0.5)
    assert plan.spec == non_private()
    assert plan.distribution == "gaussian"


def test_sizes() -> None:
    site = conv(2, 1, 3, 31, padding=2, stride=2)  # padded 35, outputs 17
    seen = {}
    for rule in ("padded", "fast", "linear", ((40, 41),)):
        (block,) = spectral(sites=(site,), fft_size=rule).plan([site.shape]).blocks
        assert isinstance(block.release, WhitenedCrop)
        seen[str(rule)] = block.release.size
        assert block.release.band == Band(block.release.size or (), "shells", 0.5)
    assert list(seen.values()) == [(35, 35), (36, 36), (67, 67), (40, 41)]
    (line,) = spectral(sites=(LAYER[1],)).plan([LAYER[1].shape]).blocks
    assert isinstance(line.release, WhitenedCrop)
    assert line.release.size == (1, 12)
    # The size is part of what a checkpoint knows its run by.
    assert len({spectral(fft_size=rule).fingerprint for rule in ("padded", "fast")}) == 2


def test_share_by_its_two_names() -> None:
    mechanism = spectral(keep_fraction=0.25)
    assert (mechanism.rho_kept, mechanism.rho_deleted) == (0.25, 0.75)


def test_configuration_without_sites() -> None:
    bare = spectral(sites=None)
    assert bare.event_spec()["noise_multiplier"] == pytest.approx(1.1, rel=1e-5)
    assert bare.certified_for == "released bits"
    with pytest.raises(InvalidInput, match="sites"):
        bare.plan([(3, 3)])
    with pytest.raises(InvalidInput, match="sites"):
        SpectralDP.as_coded(30.0, 1.0, 4).event_spec()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mask": "authors_slice"}, "mask"),
        ({"noise_band": "block"}, "noise_band"),
        ({"clip_domain": "kept"}, "clip_domain"),
        ({"clip_domain": "cropped"}, "clip_domain"),
        ({"gradient_units": "mean"}, "gradient_units"),
        ({"keep_fraction": 0.0}, "keep_fraction"),
        ({"keep_fraction": 1.5}, "keep_fraction"),
        ({"layer_bound": "c_over_sqrt_layers"}, "layer_bound"),
        ({"arithmetic": "exact", "noise_kind": "circular"}, "arithmetic"),
        ({"arithmetic": "exact", "clip_domain": "spectrum"}, "arithmetic"),
        ({"mode": "published", "noise_band": "block"}, "noise_band"),
        ({"mode": "published", "clip_domain": "whitened", "noise_kind": "real"}, "clip_domain"),
        ({"mode": "published", "clip_domain": "kept", "mask": "authors_slice"}, "clip_domain"),
        ({"mode": "published", "gradient_units": "mean"}, "gradient_units"),
        ({"fft_size": ((33, 33), None, (13, 14), None, None)}, "fft_size"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        spectral(**changes)
    assert raised.value.name == name
