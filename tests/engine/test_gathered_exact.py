"""Gathered rows in exact arithmetic: how many others have changes no sample's integers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpkern import PrivacyEngine
from dpkern.engine import clipping
from dpkern.engine.capture import Capture
from dpkern.engine.use_counts import CONDITION
from dpkern.privacy.mechanisms import Plan
from tests.engine.device_path import device_path, needs_emulation
from tests.engine.test_exact_sums import integers, plan_of, summed

T, D = 40, 64


class Experts(nn.Module):
    """A layer, and one that takes the rows whose first input is positive.

    Numbers are small multiples of 1/8, so that no product rounds, among few rows or many.
    """

    def __init__(self, pick: Callable[[nn.Linear, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.expert = nn.Linear(D, D), nn.Linear(D, D)
        self.pick = pick
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.pick(self.expert, self.first(x), x[..., 0] > 0)


def looped(expert: nn.Linear, h: Tensor, chosen: Tensor) -> Tensor:
    rows = torch.where(chosen.flatten())[0]
    tokens = h.flatten(0, 1)
    return torch.zeros_like(tokens).index_add(0, rows, expert(tokens[rows])).view_as(h)


def masked(expert: nn.Linear, h: Tensor, chosen: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    made[chosen] = expert(h[chosen])
    return made


def batches() -> tuple[Tensor, Tensor]:
    """One where sample 0 alone has rows for the expert, and one where sample 3 has more."""
    x = torch.randint(-3, 4, (4, T, D), generator=torch.Generator().manual_seed(1)).float()
    x[..., 0] = -1
    x[0, 0, 0] = 1
    other = x.clone()
    other[3, :35, 0] = 1
    return x, other


@pytest.mark.parametrize("where", ["cpu", pytest.param("device", marks=needs_emulation)])
@pytest.mark.parametrize("pick", [looped, masked])
def test_a_samples_integers_are_its_own(pick: Any, where: str) -> None:
    torch.manual_seed(0)
    module = Experts(pick)
    plan, weights = plan_of(module), torch.tensor([100.0, 0, 0, 0])
    with device_path() if where == "device" else nullcontext():
        found = [summed(module, x, plan, weights, loss=torch.clone) for x in batches()]
    few, many = map(integers, found)
    assert bool(few.any())
    assert torch.equal(few, many)


@pytest.mark.parametrize("pick", [looped, masked])
def test_sums_of_floats_are_filled_up_no_further_than_needed(pick: Any) -> None:
    torch.manual_seed(0)
    module = Experts(pick)
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        from dpkern.engine import uses

        usual = uses.by_sample

        def noted(*given: Any) -> Tensor:
            made = usual(*given)
            seen.append(made.shape[1])
            return made

        patch.setattr(uses, "by_sample", noted)
        summed(module, batches()[0], plan_of(module, "float"))
        assert set(seen) == {1}
        summed(module, batches()[0], plan_of(module))
        assert set(seen) == {1, T}


def test_gathered_rows_are_no_room_for_kept_gradients() -> None:
    """Another layer's gradients would be kept or not by how many rows others have."""

    def room(x: Tensor, plan: Plan) -> int:
        capture = Capture(Experts(looped), loss_reduction="sum")
        clipping.prepare(capture, lambda: plan)
        capture.attach()
        capture.module(x)
        found = capture.budget.activations
        capture.detach()
        return found

    module = Experts(looped)
    few, many = batches()
    assert room(few, plan_of(module)) == room(many, plan_of(module)) > 0
    assert room(few, plan_of(module, "float")) < room(many, plan_of(module, "float"))


class Adapter(nn.Module):
    """A layer that is used once more if some sample asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h, asks = self.inner(x[:, 0]), (x[:, 1, 0] > 0).float()[:, None]
        return h + asks * self.inner(h) if bool(asks.any()) else h


@pytest.mark.parametrize("asked", [False, True])
def test_uses_that_differ_between_batches_are_a_condition(asked: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 2, D)
    x[:, 1, 0] = -1
    x[0, 1, 0] = 1 if asked else -1
    model, engine = Adapter(), PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x), batch_size=4),
        sampling="fixed",
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(3):
        for (some,) in loader:
            optimizer.zero_grad()
            model(some).square().sum(1).mean().backward()
            optimizer.step()
    notes = engine.step.certify(1e-5).notes
    assert any(CONDITION in note for note in notes) == asked


@pytest.mark.parametrize("lengths", [(5, 5), (5, 3)])
def test_lengths_that_differ_between_batches_are_a_condition(lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer, engine = nn.Linear(D, D), PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(48, 5, D)), batch_size=4),
        sampling="fixed",
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        model(x[:, : lengths[step > 8]]).square().sum((1, 2)).mean().backward()
        optimizer.step()
    assert engine.capture.program.replays > 3
    notes = engine.step.certify(1e-5).notes
    assert any(CONDITION in note for note in notes) == (lengths == (5, 3))


def padded(records: list[tuple[Tensor, int]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([x[:n] for x, n in records], batch_first=True)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("longest", [5, 4])
def test_lengths_that_could_differ_are_a_condition(longest: int, arithmetic: str) -> None:
    """They are 4 in every batch, but a longer record would change them, where there is one."""
    torch.manual_seed(0)
    lengths = [4] * 47 + [longest]
    layer, engine = nn.Linear(D, D), PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=0.1),
        data_loader=DataLoader(
            [*zip(torch.randn(48, 5, D), lengths, strict=True)], batch_size=4, collate_fn=padded
        ),
        sampling="fixed",
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        arithmetic=arithmetic,
        masked_padding=True,
    )
    x = next(iter(loader))
    model(x).square().sum((1, 2)).mean().backward()
    optimizer.step()
    notes = engine.step.certify(1e-5).notes
    stated = longest == 5 and arithmetic == "exact"
    assert any(CONDITION in note for note in notes) == stated


class Bags(nn.Module):
    """Weighted bags of unequal lengths, given by offsets, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(50, 8, mode="sum"), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = x[..., 0].long(), x[..., 1]
        lengths = torch.tensor([2, 5, 3])
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
        return self.last(self.bag(ids[mask], starts, per_sample_weights=weights[mask]))


@pytest.mark.parametrize("weight", [float("inf"), float("nan")])
def test_a_bag_is_not_filled_up_with_its_neighbours_weights(weight: float) -> None:
    torch.manual_seed(0)
    module, own = Bags(), torch.tensor([1.0, 0, 0])
    ids = torch.randint(50, (3, 6), generator=torch.Generator().manual_seed(1)).float()
    x = torch.stack([ids, torch.ones(3, 6)], dim=2)
    usual = summed(module, x, plan_of(module), own)
    x[1, 0, 1] = weight
    found = summed(module, x, plan_of(module), own)
    assert torch.equal(integers(found), integers(usual))
    assert float(found.norms[0]) == float(usual.norms[0]) > 0
