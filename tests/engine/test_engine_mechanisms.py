"""Mechanisms that scale, centre, learn or clip by L1 norms: the engine does what DPStep does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern import DPStep, PrivacyEngine
from dpkern.nn import BlockCirculantLinear
from dpkern.ops import update
from dpkern.privacy.mechanisms import DPSGD, AdaClip, Directional, LaplaceSGD, Pruned
from dpkern.privacy.mechanisms.base import Mechanism
from tests.engine.engine_oracle import draw, make, reference_gradients, sample_losses

pytestmark = pytest.mark.usefixtures("one_thread")

B, STEPS = 8, 3
X = draw(B, 1, 8, 8).float()
SHARED: dict[str, Any] = {"sample_rate": 0.1, "expected_batch_size": B}


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.Tanh(),
        nn.Flatten(),
        BlockCirculantLinear(108, 6, 4),
        nn.LayerNorm(6),
        nn.Linear(6, 3),
    )


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_engine(mechanism: Mechanism, seed: int = 5) -> Tensor:
    model = make(small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=None,
        mechanism=mechanism,
        unsafe_seed=seed,
        **SHARED,
    )
    for _ in range(STEPS):
        sample_losses(model(X)).mean().backward()
        optimizer.step()
    return values(model)


def by_hand(mechanism: Mechanism) -> Tensor:
    model = make(small)
    params = [p.detach() for p in model.parameters()]
    step = DPStep(mechanism, params, unsafe_seed=5, optimizer=update.SGD(lr=0.1), **SHARED)
    for _ in range(STEPS):
        step.add(per_sample=[g.float() for g in reference_gradients(model, [X])])
        step.finish()
    return values(model)


def adaclip(arithmetic: str) -> Mechanism:
    return AdaClip(
        noise_multiplier=0.1, expected_batch_size=B, arithmetic=arithmetic, initial_scale=0.1
    )


def laplace(arithmetic: str, clipping: str) -> Mechanism:
    return LaplaceSGD(
        noise_multiplier=0.1, max_grad_norm=2.0, clipping=clipping, arithmetic=arithmetic
    )


def directional(arithmetic: str) -> Mechanism:
    return Directional(
        mode="published", epsilon=8.0, delta=1e-5, steps=10, sample_rate=0.1, max_grad_norm=0.5,
        arithmetic=arithmetic,
    )  # fmt: skip


def pruned(arithmetic: str, mask: str, bound: float = 0.5, **options: Any) -> Mechanism:
    inner = DPSGD(noise_multiplier=0.1, max_grad_norm=bound, arithmetic=arithmetic, **options)
    return Pruned(inner=inner, expected_batch_size=B, ratio=0.6, mask=mask, refresh=2)


CASES: dict[str, Callable[[], Mechanism]] = {
    "adaclip float": lambda: adaclip("float"),
    "adaclip exact": lambda: adaclip("exact"),
    "laplace float": lambda: laplace("float", "flat"),
    "laplace float, each layer": lambda: laplace("float", "per_layer"),
    "laplace exact": lambda: laplace("exact", "flat"),
    "directional": lambda: directional("float"),
    "pruned float": lambda: pruned("float", "previous"),
    "pruned float, each layer": lambda: pruned("float", "previous", clipping="per_layer"),
    "pruned exact": lambda: pruned("exact", "previous"),
    # Where all are clipped, a wrong scale of the gradients would not show.
    "pruned exact, few clipped": lambda: pruned("exact", "previous", bound=20.0),
    "pruned by coins": lambda: pruned("float", "random"),
    "pruned published": lambda: pruned("float", "published"),
    "pruned laplace": lambda: Pruned(
        inner=laplace("float", "flat"), expected_batch_size=B, mask="random", ratio=0.5
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_engine_does_what_the_step_does(name: str) -> None:
    mechanism = CASES[name]()
    trained, wanted = by_engine(mechanism), by_hand(mechanism)
    moved = float((wanted - values(make(small))).abs().max())
    # Floating-point sums differ by rounding, which scales of AdaClip may magnify a little.
    assert (trained - wanted).abs().max() <= 1e-4 * moved
    assert (by_engine(mechanism, seed=6) - wanted).abs().max() > 0.1 * moved
