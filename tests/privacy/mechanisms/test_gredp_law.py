"""The released law of a step against the published pipeline: two samples of 2000 draws each.

Energy distance between the noisy gradients of ``DPStep.finish`` and those of the literal loop, with
permutations for its law under equality; each kind of noise is told from the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from dpkern.ops import clip
from dpkern.ops.spectral import Band, literal
from dpkern.privacy.mechanisms import GReDP, Mechanism, Site, SpectralDP
from dpkern.step.step import DPStep
from tests.privacy.mechanisms.spectral_sites import circulant, conv

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWS = 2000
AB = ("ab", 0.9, math.sqrt(0.19))
CONV, BLOCKS = conv(2, 1, 3, 6), circulant(1, 2, 8)
BAND = Band((6, 6), "shells", 0.5)
CODED = Band((9, 9), "authors_slice", 0.5)


def config(site: Site, noise: Any, **changes: Any) -> literal.Pipeline:
    parts = {"circular": literal.CIRCULAR, "real": (1.0, 0.0)}.get(noise) or noise[1:]
    size = site.kernel if site.kind == "circulant" else (6, 6)
    plain = literal.Pipeline(
        kernel=site.kernel, size=size, bound=1.0, noise_multiplier=1.0, noise=parts
    )
    return replace(plain, **changes)


def call(x: torch.Tensor, g: torch.Tensor, pipeline: literal.Pipeline, seed: int) -> torch.Tensor:
    """The literal pipeline of the site that these operands belong to."""
    form = literal.gredp if pipeline.band is None else literal.spectral_dp
    form = literal.circulant if len(pipeline.size) == 1 else form
    return form(x, g, pipeline, torch.Generator().manual_seed(seed))


def clean(site: Site, pipeline: literal.Pipeline) -> torch.Tensor:
    """The clipped sum of one fixed batch, without noise."""
    data = torch.Generator().manual_seed(11)
    shapes = ((2, 1, 6, 6), (2, 2, 4, 4))
    if site.kind == "circulant":
        shapes = ((2, 1, 2, 8), (2, 1, 1, 8))
    x, g = (torch.randn(shape, generator=data) for shape in shapes)
    return call(x, g, replace(pipeline, noise_multiplier=0.0), 0)


@cache
def published(site: Site, pipeline: literal.Pipeline) -> torch.Tensor:
    """Noisy sums of the literal pipeline, ``[draws, coordinates]``: its noise is drawn for as many
    output channels as there are draws, whose gradients are zero."""
    if site.kind == "circulant":
        x, g = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, DRAWS, 8)
    else:
        x, g = torch.zeros(1, 1, 6, 6), torch.zeros(1, 2 * DRAWS, 4, 4)
    noise = call(x, g, pipeline, 12).reshape(DRAWS, -1)
    return noise + clean(site, pipeline).flatten()


def released(mechanism: Mechanism, site: Site, pipeline: literal.Pipeline) -> torch.Tensor:
    """The same batch through ``DPStep``: its clipped sum, released 2000 times."""
    # The stored slice is the filter of its gains; what is summed is the filtered gradient.
    quiet = replace(pipeline, stored=False)
    total = clean(site, replace(quiet, band=None) if site.kind == "circulant" else quiet)
    step = DPStep(
        mechanism,
        [torch.zeros(site.shape)],
        expected_batch_size=1.0,
        sample_rate=0.5,
        unsafe_seed=13,
    )
    result = clip.ClipResult(
        sums=(total,),
        norm_bound=2.0,
        norms=torch.ones(2, 1),
        nonfinite=torch.zeros((), dtype=torch.int64),
        batch_size=2,
        arithmetic="float",
        unit=None,
        p=2,
        max_norms=(1.0,),
        clipped_as=tuple(block.release for block in step.plan.blocks),
    )
    draws = []
    for _ in range(DRAWS):
        step.add(sum=replace(result, sums=(total.clone(),)))
        (gradient,) = step.finish() or ()
        assert gradient is not None
        draws.append(gradient.flatten())
    return torch.stack(draws)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the energy distance is within the 98 % quantile of 100 permutations."""
    pooled = torch.cat([one, other])
    distance = torch.cdist(pooled, pooled)
    n = len(one)
    signs = torch.cat([torch.ones(n), -torch.ones(len(other))])
    generator = torch.Generator().manual_seed(14)
    columns = [signs] + [signs[torch.randperm(len(signs), generator=generator)] for _ in range(100)]
    rows = torch.stack(columns, 1)
    energy = -(rows * (distance @ rows)).sum(0)
    return bool((energy[1:] >= energy[0]).sum() >= 2)


def gredp(site: Site, noise: Any, **changes: Any) -> GReDP:
    return GReDP(noise_multiplier=1.0, max_grad_norm=1.0, mode="published", noise_kind=noise,
                 sites=(site,), **changes)  # fmt: skip


def spectral(noise: Any, site: Site = CONV, **changes: Any) -> SpectralDP:
    return SpectralDP(noise_multiplier=1.0, max_grad_norm=1.0, mode="published",
                      noise_kind=noise, sites=(site,), **changes)  # fmt: skip


CASES: list[tuple[str, Callable[[], Mechanism], Site, literal.Pipeline]] = [
    ("gredp circular", lambda: gredp(CONV, "circular"), CONV, config(CONV, "circular")),
    ("gredp real", lambda: gredp(CONV, "real"), CONV, config(CONV, "real")),
    ("gredp blocks", lambda: gredp(BLOCKS, "circular"), BLOCKS, config(BLOCKS, "circular")),
    ("gredp real blocks", lambda: gredp(BLOCKS, "real"), BLOCKS, config(BLOCKS, "real")),
    ("gredp ab blocks", lambda: gredp(BLOCKS, AB), BLOCKS, config(BLOCKS, AB)),
    ("spectral", lambda: spectral("circular"), CONV, config(CONV, "circular", band=BAND)),
    ("spectral real", lambda: spectral("real"), CONV, config(CONV, "real", band=BAND)),
    (
        "spectral ab blocks",
        lambda: spectral(AB, BLOCKS),
        BLOCKS,
        config(BLOCKS, AB, band=Band((8,), "shells", 0.5)),
    ),
    (
        "published code",
        lambda: spectral("circular", mask="authors_slice", noise_band="block", fft_size=((9, 9),)),
        CONV,
        config(CONV, "circular", size=(9, 9), band=CODED, stored=True),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_same_law(case: Any) -> None:
    _, make, site, pipeline = case
    assert equal(released(make(), site, pipeline), published(site, pipeline))


@pytest.mark.parametrize(
    ("make", "site", "pipeline"),
    [
        (lambda: gredp(CONV, "circular"), CONV, config(CONV, "real")),
        (lambda: gredp(BLOCKS, "circular"), BLOCKS, config(BLOCKS, "real")),
        (lambda: gredp(BLOCKS, "circular"), BLOCKS, config(BLOCKS, AB)),
        (lambda: spectral("real"), CONV, config(CONV, "circular", band=BAND)),
        (lambda: spectral("circular"), CONV, config(CONV, "circular")),
        (
            lambda: gredp(CONV, "circular").with_noise_multiplier(1.1),
            CONV,
            config(CONV, "circular"),
        ),
        (lambda: gredp(CONV, "circular"), CONV, config(CONV, "circular", bound=0.5)),
    ],
    ids=["real", "real blocks", "ab blocks", "filtered", "not filtered", "10 % more", "bound"],
)
def test_tells_laws_apart(make: Any, site: Site, pipeline: literal.Pipeline) -> None:
    banded = replace(pipeline, band=BAND) if isinstance(make(), SpectralDP) else pipeline
    sums = replace(banded, bound=1.0)
    assert not equal(released(make(), site, sums), published(site, pipeline))


@pytest.mark.parametrize("form", ["white grid", "half spectrum"])
def test_half_spectrum_trap(form: str) -> None:
    """Noise on a real grid is right; noise of the same sd on the parts of every stored bin is not:
    a bin stands for its mirror too, except in columns 0 and Q/2."""
    generator = torch.Generator().manual_seed(15)
    sd = math.sqrt(0.5)
    if form == "white grid":
        maps = sd * torch.randn(DRAWS, 2, 6, 6, generator=generator)
    else:
        parts = (sd * torch.randn(DRAWS, 2, 6, 4, generator=generator) for _ in range(2))
        maps = torch.fft.irfft2(torch.complex(*parts), s=(6, 6), norm="ortho")
    pipeline = config(CONV, "circular")
    noisy = maps[..., :3, :3].reshape(DRAWS, -1) + clean(CONV, pipeline).flatten()
    assert equal(noisy, published(CONV, pipeline)) == (form == "white grid")
