"""Everyday losses that are sums over records."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import LossWarning
from tests.engine.guards.kit import WIDE, Table, World
from tests.engine.guards.losses import of_outputs
from tests.engine.guards.models import Language, fit, mlp
from tests.engine.guards.records import CLASSES, SCALARS, TOKENS

TABLE = Table("losses that add up", bounds=WIDE)


@TABLE.right()
def mean_cross_entropy(w: World) -> None:
    fit(w, mlp(), of_outputs(nn.CrossEntropyLoss()))


@TABLE.right()
def sum_of_cross_entropies(w: World) -> None:
    loss = nn.CrossEntropyLoss(reduction="sum")
    fit(w, mlp(), of_outputs(loss), loss_reduction="sum")


@TABLE.right()
def each_sample_then_the_mean(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y, reduction="none").mean()))


@TABLE.right()
def divided_by_a_public_number(w: World) -> None:
    loss = of_outputs(lambda z, y: F.cross_entropy(z, y, reduction="sum") / 4)
    fit(w, mlp(), loss, loss_reduction="sum")


@TABLE.right()
def divided_by_the_length_by_hand(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y, reduction="sum") / len(y)))


@TABLE.right()
def label_smoothing(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1)))


@TABLE.right()
def focal(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def log_softmax_by_hand(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return -z.log_softmax(-1).gather(1, y.unsqueeze(1)).squeeze(1).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def binary_with_logits(w: World) -> None:
    fit(
        w,
        mlp(1),
        of_outputs(
            lambda z, y: F.binary_cross_entropy_with_logits(z.squeeze(1), (y > 0).to(z.dtype))
        ),
    )


@TABLE.right()
def many_labels_with_weights(w: World) -> None:
    weight = torch.tensor([1.0, 2.0, 0.5])

    def loss(z: Tensor, y: Tensor) -> Tensor:
        hot = F.one_hot(y, CLASSES).to(z.dtype)
        return F.binary_cross_entropy_with_logits(z, hot, pos_weight=weight)

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def margin(w: World) -> None:
    fit(w, mlp(), of_outputs(F.multi_margin_loss))


@TABLE.right(kind=SCALARS)
def mean_square(w: World) -> None:
    fit(w, mlp(1), of_outputs(F.mse_loss))


@TABLE.right(kind=SCALARS)
def huber(w: World) -> None:
    fit(w, mlp(1), of_outputs(nn.SmoothL1Loss(beta=0.5)))


@TABLE.right(kind=SCALARS)
def gaussian_with_variance(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        mean, log = z[:, :1], z[:, 1:].clamp(-4, 4)
        return (0.5 * (log + (y - mean).square() / log.exp())).mean()

    fit(w, mlp(2), of_outputs(loss))


@TABLE.right(kind=SCALARS)
def quantile_regression(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(0.9 * (y - z), -0.1 * (y - z)).mean()

    fit(w, mlp(1), of_outputs(loss))


@TABLE.right()
def weights_of_the_record(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weights = x[:, 0].sigmoid()
        return (weights * F.cross_entropy(model(x), y, reduction="none")).mean()

    fit(w, mlp(), loss)


@TABLE.right()
def class_weights_looked_up(w: World) -> None:
    weight = torch.tensor([0.2, 1.0, 3.0])

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return (weight[y] * F.cross_entropy(z, y, reduction="none")).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def distillation(w: World) -> None:
    teacher = mlp().requires_grad_(False).eval()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        with torch.no_grad():
            targets = (teacher(x) / 2).softmax(1)
        soft = F.kl_div((output / 2).log_softmax(1), targets, reduction="batchmean")
        return 0.5 * F.cross_entropy(output, y) + 2.0 * soft

    fit(w, mlp(), loss)


@TABLE.right()
def entropy_bonus(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        p = z.softmax(1)
        return F.cross_entropy(z, y) + 0.1 * (p * p.log()).sum(1).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def penalty_on_the_outputs(w: World) -> None:
    loss = of_outputs(lambda z, y: F.cross_entropy(z, y) + 1e-2 * z.square().sum(1).mean())
    fit(w, mlp(), loss)


@TABLE.right()
def two_heads_and_two_losses(w: World) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = mlp(5), nn.Linear(5, CLASSES), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x)
            return self.a(h), self.b(h)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a, b = model(x)
        return F.cross_entropy(a, y) + 0.3 * F.mse_loss(b.squeeze(1), y.to(b.dtype))

    fit(w, Heads(), loss)


@TABLE.right()
def outputs_in_a_dictionary(w: World) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.body(x), "hidden": x}

    fit(w, Named(), lambda model, x, y: F.cross_entropy(model(x)["logits"], y))


@TABLE.right()
def loss_times_a_constant(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: 128.0 * F.cross_entropy(z, y) / 64))


@TABLE.right()
def autoencoder(w: World) -> None:
    fit(w, mlp(6), lambda model, x, y: F.mse_loss(model(x), x))


@TABLE.right(random=True)
def variational_autoencoder(w: World) -> None:
    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(4), mlp(6, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log = self.encoder(x).chunk(2, 1)
            z = mean + (0.5 * log).exp() * torch.randn_like(mean)
            return self.decoder(z), mean, log

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        again, mean, log = model(x)
        divergence = -0.5 * (1 + log - mean.square() - log.exp()).sum(1)
        return F.mse_loss(again, x, reduction="sum") / len(x) + divergence.mean()

    fit(w, Variational(), loss)


@TABLE.right()
def both_views_of_a_record_agree(w: World) -> None:
    """Consistency within a record: no other record is looked at."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a, b = model(x), model(0.9 * x)
        return F.cross_entropy(a, y) + (1 - F.cosine_similarity(a, b, dim=1)).mean()

    fit(w, mlp(), loss)


@TABLE.right()
def contrast_with_fixed_negatives(w: World) -> None:
    """Triplets of a record, its view and a public anchor."""
    anchors = torch.randn(CLASSES, CLASSES, generator=torch.Generator().manual_seed(3))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        return F.triplet_margin_loss(z, anchors[y], anchors[(y + 1) % CLASSES])

    fit(w, mlp(), loss)


@TABLE.right()
def teacher_that_follows_the_student(w: World) -> None:
    """A moving average of noisy parameters costs nothing."""
    model, optimizer, loader = w.private(mlp())
    teacher = copy.deepcopy(model).requires_grad_(False)
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        with torch.no_grad():
            targets = teacher(x).softmax(1)
        (F.cross_entropy(output, y) + F.cross_entropy(output, targets)).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.lerp_(new.detach(), 0.1)


@TABLE.right(kind=TOKENS)
def next_word_with_public_lengths(w: World) -> None:
    def loss(model: nn.Module, ids: Tensor, y: Tensor) -> Tensor:
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.reshape(-1, 17), ids[:, 1:].reshape(-1))

    fit(w, Language(), loss)


@TABLE.right()
def gradient_through_a_chosen_output(w: World) -> None:
    """Policy gradient: the log probability of the record's own action times its reward."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        log = torch.distributions.Categorical(logits=model(x)).log_prob(y)
        return -(log * x[:, 1].tanh()).mean()

    fit(w, mlp(), loss)


@TABLE.right()
def loss_without_a_mean_to_see(w: World) -> None:
    """Added up sample by sample in Python."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        parts = [F.cross_entropy(z[None], t[None]) for z, t in zip(output, y, strict=True)]
        return torch.stack(parts).sum()

    with pytest.warns(LossWarning, match="divided by the number of all samples that passed"):
        fit(w, mlp(), loss)
