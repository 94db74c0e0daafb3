"""Mechanisms of the frequency domain say how much of a model is in it, and refuse none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpkern import PrivacyEngine, survey
from dpkern.base.errors import InvalidInput
from dpkern.engine.explain import explained
from dpkern.privacy.mechanisms import DPSGD, GReDP, Mechanism, SpectralDP
from dpkern.privacy.mechanisms.site import Site

UNIT: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
IMAGE = torch.zeros(2, 1, 8, 8)
KINDS = [(kind, mode) for kind in (GReDP, SpectralDP) for mode in ("corrected", "published")]


class Reused(nn.Module):
    """A convolution that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.conv(x))  # type: ignore[no-any-return]


class Standardised(nn.Conv2d):
    """A convolution whose kernel is standardised first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return torch.conv2d(x, weight, self.bias)


WITHOUT: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "dense": (nn.Linear(4, 2), torch.zeros(2, 4)),
    "used twice": (Reused(), IMAGE),
    "standardised": (Standardised(1, 2, 3), IMAGE),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, 0.0), torch.zeros(2, 4, 8)),
}


@pytest.mark.parametrize(("kind", "mode"), KINDS)
@pytest.mark.parametrize("name", WITHOUT)
def test_a_model_without_a_layer_is_refused_unless_asked(
    name: str, kind: type[Mechanism], mode: str
) -> None:
    model, example = WITHOUT[name]
    sites = survey(model, example)
    n = len(sites)
    with pytest.raises(InvalidInput, match=f"got 0 of {n} parameters in the frequency") as refused:
        kind(**UNIT, sites=sites, mode=mode)  # type: ignore[call-arg]
    assert "allow_time_domain=True" in str(refused.value)
    asked = kind(**UNIT, sites=sites, mode=mode, allow_time_domain=True)  # type: ignore[call-arg]
    said = f"0 of {n} parameters in the frequency domain: all are released in the time domain"
    assert any(remark.startswith(said) for remark in asked.remarks)
    plan = asked.plan([site.shape for site in sites])
    assert plan.remarks[-1].startswith(said)
    assert all(block.release is None for block in plan.blocks)


def test_the_authors_slice_of_a_volume_says_what_helps() -> None:
    model = nn.Sequential(nn.Conv3d(1, 2, 3, bias=False), nn.Flatten(1, 2), nn.Conv2d(4, 1, 2))
    sites = survey(model, torch.zeros(2, 1, 4, 6, 6))
    with pytest.raises(InvalidInput, match="Site\\(kind='other'") as refused:
        SpectralDP.as_coded(1.0, 1.0, 8, sites=sites)
    assert refused.value.name == "mask"
    known = (Site(kind="other", shape=sites[0].shape), *sites[1:])
    assert SpectralDP.as_coded(1.0, 1.0, 8, sites=known).remarks[-1].startswith("1 of 3 parameters")


def trained(mechanism: Mechanism, model: nn.Module) -> PrivacyEngine:
    engine = PrivacyEngine()
    data = TensorDataset(torch.randn(64, 1, 8, 8), torch.zeros(64, dtype=torch.long))
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=64),
        mechanism=mechanism,
    )
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return engine


def mixed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_k_of_n_stands_wherever_the_run_is_described(kind: type[Mechanism], mode: str) -> None:
    model = mixed()
    mechanism = kind(**UNIT, sites=survey(model, IMAGE), mode=mode)  # type: ignore[call-arg]
    engine = trained(mechanism, model)
    said = "1 of 4 parameters in the frequency domain (18 of 166 numbers)"
    assert said in repr(engine)
    assert said in " ".join(explained(engine).split())
    report = engine.report(1e-5)
    assert said in report["certificate"]["notes"]
    assert report["frequency_domain"] == {
        "parameters": 1,
        "of": 4,
        "numbers": 18,
        "of_numbers": 166,
        "surveyed": True,
        "text": said,
    }


def test_mechanisms_of_the_time_domain_say_nothing_of_it() -> None:
    engine = trained(DPSGD(**UNIT), mixed())
    assert engine.report(1e-5)["frequency_domain"] is None
    assert "frequency" not in repr(engine) + explained(engine)


def test_without_sites_nothing_is_in_the_frequency_domain() -> None:
    """Corrected GReDP needs no sites: it is DP-SGD on every layer, and says so."""
    engine = trained(GReDP(**UNIT), mixed())
    said = "0 of 4 parameters in the frequency domain (no sites were given): all are released in"
    assert said in repr(engine)
    assert any(note.startswith(said) for note in engine.report(1e-5)["certificate"]["notes"])


def test_a_checkpoint_does_not_know_the_option_at_its_default() -> None:
    sites = survey(mixed(), IMAGE)
    assert "allow_time_domain" not in GReDP(**UNIT, sites=sites).fingerprint
    assert "allow_time_domain=True" in GReDP(**UNIT, allow_time_domain=True).fingerprint
