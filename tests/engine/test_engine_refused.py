"""What ``PrivacyEngine`` refuses, changing nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dpkern import PrivacyEngine
from dpkern.base.errors import DPKernError, InvalidInput, PrivacyError
from tests.engine.engine_run import DELTA, Run, data


def twice(run: Run) -> None:
    run.make()
    run.make()


def shared_module(run: Run) -> None:
    run.make()
    other = torch.optim.SGD(run.module.parameters(), lr=0.1)
    PrivacyEngine().make_private(
        module=run.module, optimizer=other, data_loader=DataLoader(data()), noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip


BAD: list[tuple[str, Callable[[Run], object], type[DPKernError], str]] = [
    ("no noise", lambda r: r.make(noise_multiplier=None), InvalidInput, "noise_multiplier"),
    ("no bound", lambda r: r.make(max_grad_norm=None), InvalidInput, "max_grad_norm"),
    ("noise", lambda r: r.make(noise_multiplier=-1.0), InvalidInput, "noise_multiplier"),
    ("small noise", lambda r: r.make(noise_multiplier=1e-3), PrivacyError, "noise_multiplier"),
    ("bound", lambda r: r.make(max_grad_norm=0), InvalidInput, "max_grad_norm"),
    ("bounds", lambda r: r.make(max_grad_norm=[1.0] * 4), InvalidInput, "max_grad_norm"),
    (
        "few bounds",
        lambda r: r.make(max_grad_norm=[1.0], clipping="per_layer"),
        InvalidInput,
        "max_grad_norm",
    ),
    ("adaptive", lambda r: r.make(clipping="adaptive"), InvalidInput, "clipping"),
    ("clipping", lambda r: r.make(clipping="layer"), InvalidInput, "clipping"),
    ("groups", lambda r: r.make(clipping="group"), InvalidInput, "groups"),
    ("batch first", lambda r: r.make(batch_first=False), InvalidInput, "batch_first"),
    (
        "generator",
        lambda r: r.make(noise_generator=torch.Generator()),
        InvalidInput,
        "noise_generator",
    ),
    ("mode", lambda r: r.make(grad_sample_mode="ghost_fsdp"), InvalidInput, "grad_sample_mode"),
    ("wrap", lambda r: r.make(wrap_model=False), InvalidInput, "wrap_model"),
    ("random", lambda r: r.make(rand_on_empty=True), InvalidInput, "rand_on_empty"),
    ("unknown", lambda r: r.make(max_batch=3), InvalidInput, "max_batch"),
    ("sampling", lambda r: r.make(sampling="all"), InvalidInput, "sampling"),
    (
        "contradiction",
        lambda r: r.make(sampling="poisson", poisson_sampling=False),
        InvalidInput,
        "sampling",
    ),
    ("rate", lambda r: r.make(sample_rate=0.1), InvalidInput, "sample_rate"),
    ("reduction", lambda r: r.make(loss_reduction="none"), InvalidInput, "loss_reduction"),
    ("arithmetic", lambda r: r.make(arithmetic="int"), InvalidInput, "arithmetic"),
    ("seed", lambda r: r.make(unsafe_seed=-1), InvalidInput, "unsafe_seed"),
    ("rounds", lambda r: r.make(rounds=7), InvalidInput, "rounds"),
    ("part", lambda r: r.make(max_physical_batch_size=0), InvalidInput, "max_physical_batch_size"),
    ("module", lambda r: setattr(r, "module", "net") or r.make(), InvalidInput, "module"),
    ("optimizer", lambda r: setattr(r, "optimizer", "sgd") or r.make(), InvalidInput, "optimizer"),
    ("loader", lambda r: setattr(r, "loader", data()) or r.make(), InvalidInput, "data_loader"),
    ("twice", twice, InvalidInput, "make_private"),
    ("shared", shared_module, InvalidInput, "module"),
    ("early report", lambda r: r.engine.report(DELTA), InvalidInput, "engine"),
    ("early state", lambda r: r.engine.state_dict(), InvalidInput, "engine"),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_refused(act: Callable[[Run], object], error: type[DPKernError], name: str) -> None:
    run = Run(private=False)
    module, optimizer = run.module, run.optimizer
    with pytest.raises(error) as raised:
        act(run)
    assert raised.value.name == name
    if name not in ("make_private", "module") or run.module == "net":
        assert type(next(module.parameters())) is nn.Parameter
        assert "step" not in optimizer.__dict__


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan])
def test_refused_targets(target: float) -> None:
    run = Run(private=False)
    with pytest.raises(InvalidInput, match="target_epsilon"):
        run.engine.make_private_with_epsilon(
            module=run.module, optimizer=run.optimizer, data_loader=run.loader,
            target_epsilon=target, target_delta=DELTA, epochs=1, max_grad_norm=1.0,
        )  # fmt: skip


def test_accumulating_over_batches_is_refused_with_the_way_out() -> None:
    run = Run()
    batches = iter(run.loader)
    x, y = next(batches)
    nn.functional.cross_entropy(run.module(x), y).backward()
    with pytest.raises(PrivacyError, match="max_physical_batch_size"):
        next(batches)
    run.engine.drop()
    assert run.train(most=2) == 2
