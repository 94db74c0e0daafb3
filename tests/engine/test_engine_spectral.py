"""Spectral mechanisms behind ``make_private``: integers and floats, parts and schedules agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpkern
from dpkern import PrivacyEngine
from dpkern.base.errors import InvalidInput
from dpkern.nn import BlockCirculantLinear, SpectralConv2d
from dpkern.privacy.mechanisms import DPSGD, GReDP, SpectralDP
from dpkern.privacy.mechanisms.base import Mechanism
from dpkern.privacy.mechanisms.site import Site
from tests.engine.engine_oracle import draw, make, sample_losses

pytestmark = pytest.mark.usefixtures("one_thread")

X = draw(8, 1, 10, 10).float()
NUMBERS: dict[str, Any] = {"noise_multiplier": 0.1, "max_grad_norm": 0.5}


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.Tanh(),
        SpectralConv2d(3, 4, 3, stride=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        BlockCirculantLinear(36, 5, 4),
        nn.Tanh(),
        nn.Linear(5, 2),
    )


def upwards() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.Tanh(),
        nn.Unflatten(2, (2, 4)),
        nn.ConvTranspose3d(4, 2, (2, 1, 2), dilation=(1, 1, 2), bias=False),
        nn.Tanh(),
        nn.Conv3d(2, 2, (2, 3, 3), stride=(1, 1, 2)),
        nn.Tanh(),
        nn.Conv3d(2, 2, (1, 2, 1), padding=(1, 0, 0), bias=False),
        nn.Flatten(),
    )


SITES = dpkern.survey(small(), X)
UPWARDS = dpkern.survey(upwards(), X)


def train(
    mechanism: Mechanism,
    *,
    parts: int = 1,
    steps: int = 2,
    of: Callable[[], nn.Module] = small,
    **changes: Any,
) -> Tensor:
    """The parameters after a few steps, each in so many parts; ``changes`` before the second."""
    model = make(of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    engine = PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=None,
        mechanism=mechanism,
        sample_rate=0.1,
        expected_batch_size=len(X),
        unsafe_seed=7,
    )
    for step in range(steps):
        if step:
            for name, value in changes.items():
                setattr(optimizer, name, value)
        for i, x in enumerate(X.chunk(parts)):
            engine.adapter.begin_batch(len(x), first=i == 0, final=i == parts - 1)
            sample_losses(model(x)).mean().backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def spectral(**options: Any) -> SpectralDP:
    return SpectralDP(**{**NUMBERS, "sites": SITES, **options})


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=2e-5)


def test_integers_and_floats_release_the_same() -> None:
    exact, inexact = (train(spectral(arithmetic=tier)) for tier in ("exact", "float"))
    assert close(exact, inexact)
    assert not close(exact, train(spectral(keep_fraction=0.3)))


@pytest.mark.parametrize("tier", ["exact", "float"])
def test_parts_of_a_batch_are_the_batch(tier: str) -> None:
    mechanism = spectral(arithmetic=tier)
    assert close(train(mechanism, parts=2), train(mechanism))


def test_a_schedule_changes_the_bound() -> None:
    mechanism = spectral(arithmetic="float")
    changed = train(mechanism, max_grad_norm=0.1)
    assert not close(changed, train(mechanism))
    exact = train(replace(mechanism, arithmetic="exact"), max_grad_norm=0.1)
    assert close(changed, exact)


def test_gredp_with_a_cropped_clip_is_dpsgd() -> None:
    gredp = GReDP(**NUMBERS, sites=SITES)
    assert torch.equal(train(gredp), train(DPSGD(**NUMBERS)))


def test_volumes_and_transposed_convolutions_are_in_the_frequency_domain() -> None:
    assert sum(site.kind == "conv" for site in UPWARDS) == 5
    exact, inexact = (
        train(spectral(sites=UPWARDS, arithmetic=tier), of=upwards) for tier in ("exact", "float")
    )
    assert close(exact, inexact)
    whole = spectral(sites=UPWARDS, arithmetic="exact")
    assert close(exact, train(whole, parts=2, of=upwards))
    assert not close(exact, train(spectral(sites=UPWARDS, keep_fraction=0.3), of=upwards))
    gredp = GReDP(**NUMBERS, sites=UPWARDS)
    assert torch.equal(train(gredp, of=upwards), train(DPSGD(**NUMBERS), of=upwards))


@pytest.mark.parametrize(("sites", "of"), [(SITES, small), (UPWARDS, upwards)])
@pytest.mark.parametrize("kind", ["circular", "real"])
def test_a_spectrum_bounds_more_than_the_gradient(
    kind: str, sites: tuple[Site, ...], of: Callable[[], nn.Module]
) -> None:
    options: dict[str, Any] = {**NUMBERS, "sites": sites, "mode": "published", "noise_kind": kind}
    spectrum = train(GReDP(**options, clip_domain="spectrum", clipping="flat"), of=of)
    cropped = train(GReDP(**options, clip_domain="cropped", clipping="flat"), of=of)
    assert not close(spectrum, cropped)
    # Nothing is clipped then, and both release the same.
    free: dict[str, Any] = {**options, "noise_multiplier": 2.0**-4, "max_grad_norm": 100.0}
    spectrum = train(GReDP(**free, clip_domain="spectrum", clipping="flat"), of=of)
    cropped = train(GReDP(**free, clip_domain="cropped", clipping="flat"), of=of)
    assert close(spectrum, cropped)


def test_sites_are_asked_for() -> None:
    with pytest.raises(InvalidInput, match=r"dpkern\.survey\(model, example\)"):
        train(spectral(sites=None))
