"""Certificates name the assumption that norms of large grids rest on, and only where they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.engine import assumed_norms
from dpkern.privacy.mechanisms import GReDP, SpectralDP


def network(padding: int) -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Conv2d(1, 2, 3, padding=padding), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*parts, nn.Linear(8, 2))


def conditions(*given: Any, **options: Any) -> str:
    return " ".join(made(*given, **options)[0].step.ledger.conditions)


def made(
    side: int,
    kind: type[GReDP] | type[SpectralDP],
    backend: str | None = None,
    padding: int = 1,
    **options: Any,
) -> tuple[dpkern.PrivacyEngine, tuple[Any, ...]]:
    model, x = network(padding), torch.randn(4, 1, side, side)
    given = {"keep_fraction": 0.5} if kind is SpectralDP else {}
    mechanism = kind(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sites=dpkern.survey(model, x[:2]),
        mode="published",
        **given,
        **options,
    )
    engine = dpkern.PrivacyEngine()
    private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, torch.zeros(4, dtype=torch.long)), batch_size=2),
        mechanism=mechanism,
        backend=backend,
    )
    return engine, private


@pytest.mark.parametrize("kind", [GReDP, SpectralDP])
def test_grids_beyond_the_kernels_are_named(kind: type[GReDP] | type[SpectralDP]) -> None:
    assert "Fourier" not in conditions(16, kind)
    assert "Fourier" not in conditions(134, kind)  # 136 = 17 * 8
    found = conditions(255, kind)  # 257 is a prime number above the kernel's factors
    assert "Fourier transforms keep the error" in found
    assert "on grids of 257 x 257" in found


@pytest.mark.parametrize(("kind", "named"), [(GReDP, False), (SpectralDP, True)])
def test_norms_without_a_filter_take_a_grid_of_their_own(
    kind: type[GReDP] | type[SpectralDP], named: bool
) -> None:
    """No lag wraps around on 257, the linear grid of 129: any larger one has the same norm."""
    size = ((257, 257), None, None, None)
    assert ("Fourier" in conditions(129, kind, padding=0, fft_size=size)) == named


@pytest.mark.parametrize(
    ("chosen", "side", "named"),
    [
        ("cuda", 254, False),
        ("cupy", 1022, False),
        (None, 254, True),  # there is Triton alone, whose kernels take 64 values
        ("triton", 254, True),
        ("triton", 62, False),
        ("cuda", 255, True),  # 257
        ("cuda", 1151, True),  # 1153 is a prime number
        ("cuda", 1150, True),  # 1 152 values of a column
    ],
)
def test_devices_have_kernels_of_their_own(
    chosen: str | None, side: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assumed_norms, "availability", lambda name: (name == "triton", ""))
    model = network(1)
    mechanism = SpectralDP(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sites=dpkern.survey(model, torch.randn(2, 1, side, side)),
        mode="published",
        keep_fraction=0.5,
    )
    plan = mechanism.plan([tuple(p.shape) for p in model.parameters()])
    found = assumed_norms.assumption_of(plan, torch.device("cuda"), chosen)
    assert (found is not None) == named


@pytest.mark.parametrize(
    ("chosen", "depth", "named"),
    [
        ("cuda", 8, False),
        ("cupy", 8, False),
        ("cuda", 40, True),  # a block holds no frequency of 42 x 34 lines in double
        ("triton", 8, True),  # it has no kernel for volumes
        (None, 8, True),
    ],
)
def test_volumes_have_kernels_of_their_own(
    chosen: str | None, depth: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assumed_norms, "availability", lambda name: (name in ("triton", "cpu"), ""))
    model = nn.Conv3d(1, 2, 3, padding=1)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    sites = dpkern.survey(model, torch.zeros(2, 1, depth, 32, 16))
    plan = GReDP(sites=sites, mode="published", **options).plan(
        [tuple(p.shape) for p in model.parameters()]
    )
    found = assumed_norms.assumption_of(plan, torch.device("cuda"), chosen)
    assert (found is not None) == named
    assert assumed_norms.assumption_of(plan, torch.device("cpu"), None) is None


def test_the_reference_has_no_proof_of_its_own() -> None:
    assert "on grids of 18 x 18" in conditions(16, GReDP, "reference")


def test_a_backend_that_the_caller_chose_around_the_engine_counts() -> None:
    with dpkern.use("reference"):
        assert "Fourier" in conditions(16, GReDP)
    assert "Fourier" not in conditions(16, GReDP)


@pytest.mark.parametrize("around", ["backward", "step"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_backend_that_the_loop_chooses_counts(around: str, clipping: str) -> None:
    options = {} if clipping == "flat" else {"clipping": clipping}
    engine, (model, optimizer, loader) = made(16, GReDP, **options)
    for backend, (x, y) in zip(("cpu", "reference"), loader, strict=True):
        chosen, usual = dpkern.use(backend), dpkern.use("cpu")
        with chosen if around == "backward" else usual:
            nn.functional.cross_entropy(model(x), y).backward()
        with dpkern.use(backend if around == "step" else "cpu"):
            optimizer.step()
        optimizer.zero_grad()
        named = "Fourier" in " ".join(engine.step.ledger.conditions)
        assert named == (backend == "reference")


def test_it_counts_in_replayed_steps_too() -> None:
    torch.manual_seed(0)
    model, x = network(1), torch.randn(80, 1, 16, 16)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    engine = dpkern.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, torch.zeros(80, dtype=torch.long)), batch_size=8),
        mechanism=SpectralDP(sites=dpkern.survey(model, x[:2]), keep_fraction=0.5, **options),
        sampling="fixed",
    )
    for step, (inputs, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), target)
        with dpkern.use("reference" if step == 9 else "cpu"):
            loss.backward()
        assert ("Fourier" in " ".join(engine.step.ledger.conditions)) == (step == 9)
        optimizer.step()
    assert engine.capture.program.replays > 1
