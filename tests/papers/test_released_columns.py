"""Three columns: what AdLM's and Spectral-DP's released code did, beside printed and corrected."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from dpkern.base.json import plain
from dpkern.objective.adlm import ARCHITECTURES
from dpkern.objective.adlm_data import Labelled
from dpkern.papers import ItemRequest, reproduce, spectral_released
from dpkern.papers.adlm import columns, released
from dpkern.papers.adlm.released import FIRST, LAST, ReleasedVersion
from dpkern.papers.pieces import CachedRun
from dpkern.papers.runner import ItemPlanned
from dpkern.privacy import accounting
from dpkern.privacy.mechanisms import Site

pytestmark = pytest.mark.usefixtures("one_thread")

MNIST = (1, 28, 28)
RELEVANCE = torch.linspace(0, 1, 64, dtype=torch.float64)


def records(count: int = 40) -> Labelled:
    """Digits' shape, with a class that the first pixel tells."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 8, 8, generator=generator)
    y = (x[:, 0, 0] > 0.5).long()
    return Labelled(x=x, y=y, x_test=x[:20], y_test=y[:20], classes=2)


def run(version: ReleasedVersion, **changes: float) -> list[float]:
    found = released.train(
        version,
        records(),
        ARCHITECTURES["digits"],
        epsilon=changes.get("epsilon", 0.3),
        relevance=RELEVANCE,
        batch=10,
        epochs=int(changes.get("epochs", 1)),
        lr=1e-3,
        seed=int(changes.get("seed", 0)),
        on_step=lambda done: None,
    )
    accuracy: list[float] = found["accuracy"]
    return accuracy


def test_scales_are_those_of_the_released_script() -> None:
    """At epsilon .3: 9800 / (1800 * .075) for a pixel, 1812.5 / (.15 * 1800) for a label."""
    pixel = released.input_scale(ARCHITECTURES["mnist"], MNIST, released.SHARES[1] * 0.3)
    assert pixel == pytest.approx(9800 / (1800 * 0.075))
    labels = released.label_scale(10, 25, released.SHARES[2] * 0.3)
    assert labels == pytest.approx(1812.5 / (0.15 * 1800))


def test_shares_have_a_mean_of_one_and_a_floor() -> None:
    beta = released.budget_shares(RELEVANCE, 0.3, torch.Generator().manual_seed(0))
    assert float(beta.mean()) == pytest.approx(1, rel=1e-3)
    assert float(beta.min()) >= released.FLOOR
    same = released.budget_shares(
        torch.ones(64).double(), math.inf, torch.Generator().manual_seed(0)
    )
    assert bool((same == released.FLOOR).all() or (same - 1).abs().max() < 1e-9)


def test_laplace_draws_have_their_law() -> None:
    drawn = released.laplace([200_000], 3.0, torch.Generator().manual_seed(0)).double()
    assert float(drawn.abs().mean()) == pytest.approx(3.0, rel=0.02)
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.05)


def test_a_batch_shares_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """The differences of two records of a batch are exact, unless every record has a draw."""
    seen: list[tuple[int, ...]] = []
    drawn = released.laplace

    def watched(
        shape: list[int], scale: torch.Tensor | float, generator: torch.Generator
    ) -> torch.Tensor:
        seen.append(tuple(shape))
        return drawn(shape, scale, generator)

    monkeypatch.setattr(released, "laplace", watched)
    run(ReleasedVersion())
    assert seen == [(64,), *[(1, 64)] * 4]
    seen.clear()
    run(ReleasedVersion(shared=False))
    assert seen == [(64,), *[(10, 64)] * 4]
    seen.clear()
    run(ReleasedVersion(labels=LAST))
    assert seen == [(64,), (16, 2), *[(1, 64)] * 4]
    seen.clear()
    run(ReleasedVersion(noise=False))
    assert not seen


def test_fixed_label_noise_moves_the_output_layer_alone() -> None:
    """Its gradient is the number of entries of the loss times the draw."""
    generator = torch.Generator().manual_seed(0)
    network = released.build(ARCHITECTURES["digits"], (8, 8), 2)
    released.initialise(network, generator)
    fixed = released.laplace([16, 2], 1.0, generator)
    (-20 * (fixed.T * network[1].weight).sum()).backward()
    assert torch.equal(network[1].weight.grad, -20 * fixed.T)  # type: ignore[arg-type]
    assert all(each.grad is None for each in network[0].parameters())


def test_runs_follow_their_seed_and_their_version() -> None:
    torch.manual_seed(1)
    first = run(ReleasedVersion(), epochs=3)
    torch.manual_seed(2)
    assert run(ReleasedVersion(), epochs=3) == first
    without = released.train(
        ReleasedVersion(noise=False),
        records(200),
        ARCHITECTURES["digits"],
        epsilon=math.inf,
        relevance=RELEVANCE,
        batch=20,
        epochs=25,
        lr=3e-3,
        seed=0,
        on_step=lambda done: None,
    )
    assert without["accuracy"][-1] >= 80
    assert not without["collapsed"]


def test_names_of_adlm_columns() -> None:
    assert list(columns.RELEASED) == [
        f"released code, {FIRST} (0445117)",
        f"released code, {LAST} (15fb1f3)",
    ]


def test_spectral_columns_certify_what_they_are() -> None:
    """Printed: below sigma; released: sigma / sqrt(B) or nothing at all; corrected: sigma."""
    layer = Site(kind="circulant", shape=(1, 1, 8), input=(1,), output=(1,))
    made = spectral_released.columns(4.0, 100, (layer,))
    plans = {name: one.plan([layer.shape]) for name, one in made.items()}
    assert plans["corrected"].noise_multiplier == pytest.approx(4.0, rel=1e-6)
    assert plans["printed"].noise_multiplier == pytest.approx(4.0 * 0.5**0.5, rel=1e-6)
    # Half of the noise of each pair on top of one draw of sigma C / B for each of B samples.
    assert plans["released code"].noise_multiplier == pytest.approx(0.4 * 0.5, rel=1e-6)
    run = {"steps": 10, "sample_rate": 0.1, "delta": 1e-5, "sampling": "poisson"}
    conv = Site(
        kind="conv",
        shape=(1, 1, 5, 5),
        input=(5, 5),
        output=(1, 1),
        stride=(1, 1),
        padding=(0, 0),
        dilation=(1, 1),
    )
    open_bins = spectral_released.columns(4.0, 100, (conv,))["released code"]
    fixed = {**run, "sampling": "fixed", "dataset_size": 1000}
    found = accounting.certify(open_bins.plan([conv.shape]), **fixed)
    assert math.isinf(found.epsilon)


def test_columns_stand_at_every_epsilon_and_share_their_controls() -> None:
    pytest.importorskip("dp_accounting")
    pieces: list[CachedRun] = []
    request = ItemRequest(quick=True, rows=600, epsilon=(0.5, 2.0), planned=pieces)
    with pytest.raises(ItemPlanned):
        reproduce("adlm", "released", request)
    # Two runs without noise, and five columns at each epsilon.
    assert len(pieces) == 2 + 5 * 2
    assert len({json.dumps(plain(dict(piece.key)), sort_keys=True) for piece in pieces}) == 12
    assert columns.EPSILONS == (0.5, 2.0)
    numbers: dict[tuple[str, float], dict[str, Any]]
    numbers = {("a", 0.5): {}, ("a", 2.0): {"x": 1}, ("free", math.inf): {}}
    assert columns._at(numbers, 2.0) == {"a": {"x": 1}, "free": {}}


def test_differences_of_the_released_code() -> None:
    rows = spectral_released._differences(500, 5)
    found = {(row.setting, row.quantity): row.ours for row in rows}
    assert found["printed", "bound of all layers together / C"] == pytest.approx(5**0.5)
    noise = "sd of the noise of a sum / (sigma times its bound)"
    assert found["released code", noise] == pytest.approx(1 / 22.36, rel=1e-3)
