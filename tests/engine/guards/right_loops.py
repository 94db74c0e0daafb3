"""Everyday training loops around a private step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.checkpoint import checkpoint

import dpkern
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import HIDDEN, Between, cross_entropy, fit, mlp
from tests.engine.guards.records import CLASSES, IMAGES

TABLE = Table("loops")

HALF = 2.0**-7
"""What rounding to 16 bits may move: a mean over another number of rows rounds otherwise."""


@TABLE.right()
def logging_losses_and_accuracy(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    losses, hits, seen = [], 0, 0
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        hits += (output.argmax(1) == y).sum().item()
        seen += y.size(0)
        f"{sum(losses) / len(losses):.3f} {hits / max(seen, 1):.3f} {output.detach().std():.2f}"


@TABLE.right()
def running_averages_of_the_loss(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    total, best = torch.zeros(()), torch.tensor(float("inf"))
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        best = torch.minimum(best, loss.detach())
        if torch.isnan(loss) or torch.isinf(loss):
            total.zero_()


@TABLE.right()
def evaluation_after_every_epoch(w: World) -> None:
    held_out = w.loader(batch_size=5)
    model, optimizer, loader = w.private(mlp())
    for _ in range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, y in held_out:
                (model(x).argmax(1) == y).float().mean().item()


@TABLE.right()
def evaluation_within_the_epoch(w: World) -> None:
    x_held, y_held = next(iter(w.loader(batch_size=12)))
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        with torch.inference_mode():
            cross_entropy(model, x_held, y_held).item()


@TABLE.right()
def accuracy_before_the_step(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        with torch.no_grad():
            (model(x).argmax(1) == y).float().mean().item()
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.right()
def average_of_the_weights(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    average = torch.optim.swa_utils.AveragedModel(model)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        average.update_parameters(model)


@TABLE.right()
def best_weights_kept(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        copy.deepcopy(model.state_dict())


@TABLE.right()
def schedule_of_learning_rates(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    schedules = [StepLR(optimizer, 1), CosineAnnealingLR(optimizer, 10)]
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        for schedule in schedules:
            schedule.step()


@TABLE.right()
def closure(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:

        def evaluate(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            loss.backward()
            return loss

        optimizer.step(evaluate)


@TABLE.right()
def gradients_cleared_by_the_module(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        model.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.right()
def gradients_cleared_after_the_step(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        cross_entropy(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@TABLE.right()
def gradients_clipped_once_more(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@TABLE.right()
def adam_with_weight_decay(w: World) -> None:
    model = mlp()
    fit(w, model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.0))


@TABLE.right(slack=HALF)
def autocast(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()


@TABLE.right()
def scaled_losses(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    scaler = torch.amp.GradScaler("cpu")
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model, x, y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@TABLE.right(random=True)
def dropout(w: World) -> None:
    model = nn.Sequential(nn.Linear(6, HIDDEN), nn.Dropout(0.3), nn.Linear(HIDDEN, CLASSES))
    fit(w, model)


@TABLE.right(random=True, kind=IMAGES)
def stochastic_depth(w: World) -> None:
    """Each sample skips the block by a coin of its own."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3, padding=1)
            self.head = nn.Linear(12, CLASSES)

        def forward(self, x: Any) -> Any:
            h = self.first(x).tanh()
            keep = torch.rand(len(x), 1, 1, 1) < 0.7 if self.training else 1.0
            h = h + keep * self.block(h)
            return self.head(h.flatten(1))

    fit(w, Skipping())


@TABLE.right(random=True)
def layer_dropped_for_the_whole_batch(w: World) -> None:
    def middle(m: Any, h: Any) -> Any:
        return h if m.training and torch.rand(()) < 0.5 else h + m.block(h)

    fit(w, Between(middle, block=nn.Linear(HIDDEN, HIDDEN)))


@TABLE.right(random=True, slack=HALF)
def dropout_autocast_and_checkpoints(w: World) -> None:
    def middle(m: Any, h: Any) -> Any:
        return checkpoint(lambda h: F.dropout(m.block(h), 0.2), h, use_reentrant=False)

    model = Between(middle, block=nn.Linear(HIDDEN, HIDDEN))
    model, optimizer, loader = w.private(model)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()


@TABLE.right()
def gradient_checkpoints(w: World) -> None:
    block = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
    fit(w, Between(lambda m, h: checkpoint(m.block, h, use_reentrant=False), block=block))


@TABLE.right()
def several_passes_of_one_batch(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        (0.5 * F.mse_loss(model(0.5 * x), F.one_hot(y, CLASSES).float())).backward()
        optimizer.step()


@TABLE.right()
def discriminator(w: World) -> None:
    model, optimizer, loader = w.private(mlp(1))
    for x, _ in loader:
        optimizer.zero_grad()
        F.softplus(-model(x)).mean().backward()
        with w.engine.public():
            F.softplus(model(torch.randn(4, 6))).mean().backward()
        optimizer.step()


@TABLE.right()
def public_data_mixed_in(w: World) -> None:
    public = torch.randn(5, 6, generator=torch.Generator().manual_seed(9))
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        with w.engine.public():
            cross_entropy(model, public, torch.arange(5) % CLASSES).backward()
        optimizer.step()


@TABLE.right()
def samples_without_a_loader(w: World) -> None:
    """Every record is accounted as if it were in every step."""
    model, optimizer, _ = w.private(
        mlp(), data_loader=None, expected_batch_size=4, sample_rate=1.0, dataset_size=12
    )
    for x, y in w.batches():
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.right()
def records_drawn_by_the_caller(w: World) -> None:
    model, optimizer, _ = w.private(
        mlp(), data_loader=None, expected_batch_size=4, sample_rate=1 / 3, dataset_size=12
    )
    for x, y in w.batches():
        w.engine.new_samples()
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.right()
def engine_saved_and_resumed(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    state = w.engine.state_dict()
    w.engine.detach()
    w.engine = dpkern.PrivacyEngine()
    model, optimizer, loader = w.private(model)
    w.engine.load_state_dict(state)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.right()
def unfinished_batch_dropped(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        if step == 1:
            w.engine.drop()
            break
        optimizer.step()


@TABLE.right()
def validated_on_a_batch_first(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    w.engine.validate(None, torch.randn(3, 6))
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.right()
def clipping_layer_by_layer(w: World) -> None:
    fit(w, mlp(), clipping="per_layer", max_grad_norm=[w.bound / 2] * 4)


@TABLE.right()
def exact_arithmetic(w: World) -> None:
    fit(w, mlp(), arithmetic="exact", noise_multiplier=1.0)


@TABLE.right()
def hooks_that_only_look(w: World) -> None:
    model = mlp()
    shapes: list[Any] = []
    model[0].register_forward_hook(lambda m, args, output: shapes.append(output.shape))
    fit(w, model)


@TABLE.right()
def frozen_then_thawed_head(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for step, (x, y) in enumerate(loader):
        model[0].requires_grad_(step > 0)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.right()
def embedded_in_a_larger_module(w: World) -> None:
    """The private network is a part; the rest is frozen."""
    frozen = nn.Linear(6, 6).requires_grad_(False)
    inner = mlp()
    whole = nn.Sequential(frozen, nn.Tanh(), inner)
    _, optimizer, loader = w.private(inner)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(whole, x, y).backward()
        optimizer.step()
