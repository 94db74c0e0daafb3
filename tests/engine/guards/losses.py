"""Losses in which samples meet, and everyday ones in which they do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import UnsupportedModule
from tests.engine.guards.kit import WIDE, Table, World
from tests.engine.guards.models import Language, fit, mlp
from tests.engine.guards.records import CLASSES, SCALARS, TEXTS, padded

TABLE = Table("losses", bounds=WIDE)


Loss = Callable[[Tensor, Tensor], Tensor]


def of_outputs(loss: Loss) -> Callable[..., Tensor]:
    return lambda model, x, y: loss(model(x), y)


@TABLE.refused(UnsupportedModule, "got matmul")
def contrastive_over_the_batch(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(z)
        return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)))

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got matmul")
def two_views_against_each_other(w: World) -> None:
    """InfoNCE: all other samples of the batch are negatives."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(model(x)), F.normalize(model(0.5 * x))
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(x)))

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, "got cdist")
def hardest_triplets(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        apart = torch.cdist(z, z)
        same = y[:, None] == y
        hard = (apart * same).amax(1) - (apart + 1e3 * same).amin(1)
        return (hard + 1.0).relu().mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got triplet_margin_loss")
def rolled_triplets(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0))))


@TABLE.refused(UnsupportedModule, "got sub")
def barlow_twins(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        z = (z - z.mean(0)) / (z.std(0) + 1e-3)
        return (z.T @ z / len(z) - torch.eye(z.shape[1])).square().sum()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got std")
def variance_over_the_batch(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y) + (1 - z.std(0)).relu().mean()))


@TABLE.refused(UnsupportedModule, "got sub", kind=SCALARS)
def correlation(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        z, y = z - z.mean(), y - y.mean()
        return -(z * y).sum() / (z.norm() * y.norm() + 1e-3)

    fit(w, mlp(1), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got sqrt", kind=SCALARS)
def root_mean_square(w: World) -> None:
    fit(w, mlp(1), of_outputs(lambda z, y: F.mse_loss(z, y).sqrt()))


@TABLE.refused(UnsupportedModule, "got sub", kind=SCALARS)
def explained_variance(w: World) -> None:
    fit(w, mlp(1), of_outputs(lambda z, y: (z - y).square().sum() / (y - y.mean()).square().sum()))


@TABLE.refused(UnsupportedModule, "got sub", kind=SCALARS)
def ranking_of_neighbours(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        sign = (y - y.roll(1, 0)).sign()
        return F.margin_ranking_loss(z, z.roll(1, 0), sign, margin=0.1)

    fit(w, mlp(1), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got log")
def logarithm_of_the_mean(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y).log()))


@TABLE.refused(UnsupportedModule, "got pow")
def squared_mean(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y) ** 2))


@TABLE.refused(UnsupportedModule, "got abs")
def flooding(w: World) -> None:
    """The mean loss is kept above a level by turning its sign."""
    fit(w, mlp(), of_outputs(lambda z, y: (F.cross_entropy(z, y) - 1.15).abs() + 1.15))


@TABLE.refused(UnsupportedModule, "got clamp")
def mean_clamped(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y).clamp(max=1.15)))


@TABLE.refused(UnsupportedModule, "got topk")
def hardest_half(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return each.topk((len(each) + 1) // 2).values.mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got max")
def worst_sample(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y, reduction="none").max()))


@TABLE.refused(UnsupportedModule, "got median")
def median_sample(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y, reduction="none").median()))


@TABLE.refused(UnsupportedModule, "got logsumexp")
def soft_maximum_over_samples(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y, reduction="none").logsumexp(0)))


@TABLE.refused(UnsupportedModule, "got quantile")
def outliers_above_the_batch_quantile_ignored(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return (each * (each.detach() <= each.detach().quantile(0.6))).sum() / len(each)

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got softmax")
def weights_from_all_losses(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return (each.detach().softmax(0) * each).sum()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got div")
def divided_by_its_own_detached_sum(w: World) -> None:
    """Two losses on one scale."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        value, second = F.cross_entropy(z, y), z.square().mean()
        return value + second / second.detach()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got div")
def dice_over_the_batch(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        p, hot = z.softmax(1), F.one_hot(y, CLASSES)
        return 1 - (2 * (p * hot).sum() / (p.sum() + hot.sum()))

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got log")
def entropy_of_the_mean_prediction(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        mean = z.softmax(1).mean(0)
        return F.cross_entropy(z, y) + (mean * mean.log()).sum()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got clamp")
def centres_of_the_classes(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        hot = F.one_hot(y, CLASSES).float()
        centres = hot.T @ z / hot.sum(0).clamp(min=1)[:, None]
        return (z - centres.detach()[y]).square().sum(1).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got log_softmax")
def softmax_over_the_batch(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: -z.log_softmax(0).gather(1, y[:, None]).mean()))


@TABLE.refused(UnsupportedModule, "got square")
def halves_with_equal_features(w: World) -> None:
    """Maximum mean discrepancy between two halves of the batch."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        half = len(z) // 2
        return F.cross_entropy(z, y) + (z[:half].mean(0) - z[half:].mean(0)).square().sum()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got unique")
def mean_of_the_class_means(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return torch.stack([each[y == c].mean() for c in y.unique()]).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got bincount")
def rare_classes_of_the_batch_weigh_more(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        counts = torch.bincount(y, minlength=CLASSES)
        return (F.cross_entropy(z, y, reduction="none") / counts[y]).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got div")
def weights_normalised_over_the_batch(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weights = x[:, 0].exp()
        each = F.cross_entropy(model(x), y, reduction="none")
        return (each * weights).sum() / weights.sum()

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, "got eq")
def pairs_of_neighbours(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        half = len(z) // 2
        a, b = z[:half], z[half : 2 * half]
        return F.cosine_embedding_loss(a, b, torch.where(y[:half] == y[half : 2 * half], 1, -1))

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got gt")
def loss_chosen_by_the_batch(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(z, y)
        return torch.where(value > 1.2, value, -0.5 * value)

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got sub")
def teacher_that_sees_the_batch(w: World) -> None:
    """Outputs of a frozen network, sharpened by the batch mean, as targets."""
    teacher = mlp().requires_grad_(False)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            targets = teacher(x)
            targets = (targets - targets.mean(0)).softmax(1)
        return F.cross_entropy(model(x), targets)

    fit(w, mlp(), loss)


@TABLE.right()
def cross_entropy_with_class_weights(w: World) -> None:
    """The mean divides by the weights of the batch: every sample gets its own weight instead."""
    weight = torch.tensor([0.2, 1.0, 3.0])
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y, weight=weight)))


@TABLE.right(kind=TEXTS)
def mean_over_the_tokens_of_the_batch(w: World) -> None:
    """Long records weigh more: the divisor depends on everybody's length."""
    model, optimizer, loader = w.private(
        Language(), loader=w.loader(collate_fn=padded), masked_padding=True
    )
    for batch in loader:
        optimizer.zero_grad()
        ids = batch["input_ids"]
        labels = ids.masked_fill(ids == 0, -100)
        logits = model(**batch)[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).backward()
        optimizer.step()


@TABLE.right(kind=TEXTS)
def mean_over_the_tokens_of_each_record(w: World) -> None:
    model, optimizer, loader = w.private(
        Language(), loader=w.loader(collate_fn=padded), masked_padding=True
    )
    for batch in loader:
        optimizer.zero_grad()
        ids = batch["input_ids"]
        labels = ids.masked_fill(ids == 0, -100)
        logits = model(**batch)[:, :-1].transpose(1, 2)
        each = F.cross_entropy(logits, labels[:, 1:], ignore_index=-100, reduction="none")
        (each.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean().backward()
        optimizer.step()
