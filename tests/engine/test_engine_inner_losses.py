"""Losses that a module computes itself: read off the graph, compared by samples' gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpkern.base.errors import InvalidInput, PrivacyError, UnsupportedModule
from dpkern.engine.inner_difference import check_inner_losses
from tests.engine.engine_run import Run

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class WithLoss(nn.Module):
    """Returns its loss beside its logits, as Hugging Face's models do."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"loss": self.loss(logits, y, x), "logits": logits}


def half_ignored(z: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(z, torch.where(x[:, 0] > 0, y, -100))


def by_counts(z: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(z, y, weight=len(y) / (torch.bincount(y, minlength=2).float() + 1))


RIGHT: dict[str, Loss] = {
    "mean": lambda z, y, x: F.cross_entropy(z, y),
    "class weights": lambda z, y, x: F.cross_entropy(z, y, weight=torch.tensor([1.0, 5.0])),
    "ignored targets": half_ignored,
    "scaled": lambda z, y, x: 0.5 * F.cross_entropy(z, y),
    "two means": lambda z, y, x: F.cross_entropy(z, y) + 0.1 * z.square().mean(),
}
MIXED: dict[str, Loss] = {
    "contrastive": lambda z, y, x: F.cross_entropy(z @ z.T, torch.arange(len(z))),
    "centred": lambda z, y, x: (z - z.mean(0)).square().mean(),
    "centred, detached": lambda z, y, x: (z - z.mean(0).detach()).square().mean(),
    "weights of the batch": by_counts,
    "root": lambda z, y, x: F.mse_loss(z[:, 0], y.float()).sqrt(),
    "spread": lambda z, y, x: F.cross_entropy(z, y) + z.std(0).mean(),
    "masked ratio": lambda z, y, x: (
        (F.cross_entropy(z, y, reduction="none") * (y > 0)).sum() / (y > 0).sum()
    ),
    "largest": lambda z, y, x: F.cross_entropy(z, y, reduction="none").max(),
    "hardest": lambda z, y, x: F.cross_entropy(z, y, reduction="none").topk(3)[0].mean(),
    "divided by its value": lambda z, y, x: (
        F.cross_entropy(z, y, reduction="none") / F.cross_entropy(z, y).detach()
    ).mean(),
}


def train(run: Run) -> None:
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.module(x, y)["loss"].backward()
        run.optimizer.step()


@pytest.mark.parametrize("name", RIGHT)
def test_means_of_the_samples_own_terms_are_trained(name: str) -> None:
    run = Run(module=WithLoss(RIGHT[name]), noise_multiplier=0.0)
    train(run)
    assert run.engine.step.steps == 6


@pytest.mark.parametrize("name", MIXED)
def test_others_are_refused_before_a_release(name: str) -> None:
    run = Run(module=WithLoss(MIXED[name]), noise_multiplier=0.0)
    with pytest.raises((UnsupportedModule, InvalidInput), match=r"loss|sample"):
        train(run)
    assert run.engine.step.steps == 0


@pytest.mark.parametrize(
    ("classes", "told"),
    [
        ([0, 0, 1, 0], True),
        ([1, 1, 1, 1, 0, 1, 1], True),
        ([0, 1, 0, 0, 0], True),
        ([1, 1, 1, 1, 1], False),
    ],
)
def test_classes_of_any_batch_are_counted_anew(classes: list[int], told: bool) -> None:
    """Half of the samples have the class of another sample then, or the batch cannot tell."""
    y = torch.tensor(classes)
    x = torch.randn(len(y), 4, generator=torch.Generator().manual_seed(0))
    for loss, right in ((by_counts, not told), (RIGHT["class weights"], True)):
        module = WithLoss(loss)
        if right:
            uniform = frozenset() if told else frozenset((1,))
            assert check_inner_losses(module, module, ((x, y), {}), len(y)) == (True, uniform)
        else:
            with pytest.raises(UnsupportedModule, match="changed when others were replaced"):
                check_inner_losses(module, module, ((x, y), {}), len(y))


class WithTask(WithLoss):
    """Takes the number of a task too, which all samples have in common."""

    def forward(self, x: Tensor, y: Tensor, task: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(x, y)


@pytest.mark.parametrize("kind", [WithLoss, WithTask])
def test_the_first_batch_of_two_classes_is_probed_however_late(kind: type[WithLoss]) -> None:
    """What is found then may have been released before, and the certificate says so."""
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(5))
    y = torch.zeros(96, dtype=torch.int64)
    tasks = [torch.full((96,), 7)] if kind is WithTask else []
    run = Run(
        module=kind(by_counts),
        noise_multiplier=0.0,
        data_loader=DataLoader(TensorDataset(x, y, *tasks), batch_size=8, shuffle=True),
    )
    guard, batches = run.engine.capture.guard, iter(run.loader)
    guard._occasions.gap = 1 << 60
    for _ in range(11):
        run.module(*next(batches))["loss"].backward()
        run.optimizer.step()
    assert guard.probes == 1
    x, y, *tasks = next(batches)
    y[: len(y) // 2] = 1
    with pytest.raises(UnsupportedModule, match="changed when others were replaced"):
        run.module(x, y, *tasks)["loss"].backward()
    assert run.engine.step.steps == 11
    assert run.engine.get_epsilon(1e-5) == math.inf


def test_classes_are_looked_at_until_two_have_met() -> None:
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(5))
    run = Run(
        module=WithTask(RIGHT["mean"]),
        data_loader=DataLoader(
            TensorDataset(x, torch.zeros(96, dtype=torch.int64), torch.full((96,), 7)),
            batch_size=8,
            shuffle=True,
        ),
    )
    guard, probes = run.engine.capture.guard, []
    guard._occasions.gap = 1 << 60
    for turn, (x, y, task) in enumerate(run.loader):
        if turn == 5 or turn == 7:
            y[: len(y) // 2] = 1
        run.module(x, y, task)["loss"].backward()
        run.optimizer.step()
        probes.append(guard.probes)
    assert probes == [1] * 5 + [2] * 7
    assert guard._uniform == {2}
    assert run.engine.step.epsilon_if_seed_secret(1e-5) < math.inf


def test_what_is_refused_for_another_reason_taints_no_batch_of_one_class() -> None:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, torch.zeros(48, dtype=torch.int64))
    run = Run(
        module=WithLoss(RIGHT["mean"]),
        data_loader=DataLoader(data, batch_size=8, shuffle=True),
    )
    batches = iter(run.loader)
    x, y = next(batches)
    run.module(x, y)["loss"].backward()
    run.optimizer.step()
    run.module.body[0].register_forward_hook(lambda m, a, h: h - h.mean(0).detach())
    x, y = next(batches)
    with pytest.raises(UnsupportedModule):
        run.module(x, y)["loss"].backward()
    assert run.engine.step.epsilon_if_seed_secret(1e-5) < math.inf


def test_each_record_is_divided_by_its_own_targets() -> None:
    """Half of the targets ignored: each of the others counts as if its divisor were the batch."""
    run = Run(module=WithLoss(half_ignored), noise_multiplier=0.0, max_grad_norm=1e6)
    kept = {n: p.detach().clone() for n, p in run.module.named_parameters()}
    x, y = next(iter(run.loader))
    run.module(x, y)["loss"].backward()
    run.optimizer.step()
    plain = WithLoss(half_ignored)
    plain.load_state_dict(kept)
    raw, targets = x.as_subclass(Tensor), y.as_subclass(Tensor)
    terms = F.cross_entropy(
        plain.body(raw), torch.where(raw[:, 0] > 0, targets, -100), reduction="none"
    )
    (terms.sum() / run.engine.step.expected_batch_size).backward()
    for name, parameter in run.module.named_parameters():
        expected = kept[name] - 0.1 * plain.get_parameter(name).grad
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-6)


class LossAlone(WithLoss):
    """Returns nothing but its loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, y)["loss"]


def test_a_module_that_returns_its_loss_alone_is_told_what_to_return() -> None:
    run = Run(module=LossAlone(RIGHT["mean"]), noise_multiplier=0.0)
    x, y = next(iter(run.loader))
    run.module(x, y).backward()
    with pytest.raises(PrivacyError, match="returns the logits beside the loss"):
        run.optimizer.step()
    assert run.engine.step.steps == 0
