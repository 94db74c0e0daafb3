"""Everyday ways from the loader to the module: every row stays one record's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import conv, cross_entropy, fit, mlp
from tests.engine.guards.records import IMAGES

TABLE = Table("batches")


@TABLE.right()
def plain_loop(w: World) -> None:
    fit(w, mlp())


@TABLE.right()
def micro_batches_by_chunk(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), loss_reduction="sum")
    for x, y in loader:
        optimizer.zero_grad()
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            F.cross_entropy(model(a), b, reduction="sum").backward()
        optimizer.step()


@TABLE.right()
def micro_batches_by_split(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        for a, b in zip(x.split(2), y.split(2), strict=True):
            F.cross_entropy(model(a), b).backward()
        optimizer.step()


@TABLE.right()
def micro_batches_by_slices(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), loss_reduction="sum")
    for x, y in loader:
        optimizer.zero_grad()
        for start in range(0, len(x), 2):
            part = slice(start, start + 2)
            F.cross_entropy(model(x[part]), y[part], reduction="sum").backward()
        optimizer.step()


@TABLE.right()
def one_sample_at_a_time(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), loss_reduction="sum")
    for x, y in loader:
        optimizer.zero_grad()
        for row, label in zip(x, y, strict=True):
            F.cross_entropy(model(row[None]), label[None]).backward()
        optimizer.step()


@TABLE.right()
def rows_augmented_one_by_one(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = torch.stack([row / (1 + row.norm()) for row in x])
        return cross_entropy(model, x, y)

    fit(w, mlp(), loss)


@TABLE.right()
def rows_permuted(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        return cross_entropy(model, x[order], y[order])

    fit(w, mlp(), loss)


@TABLE.right()
def rows_sorted_by_size(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        order = x.norm(dim=1).argsort(descending=True)
        return cross_entropy(model, x.index_select(0, order), y[order])

    fit(w, mlp(), loss)


@TABLE.right()
def rows_reversed(w: World) -> None:
    fit(w, mlp(), lambda model, x, y: cross_entropy(model, x.flip(0), y.flip(0)))


@TABLE.right()
def rows_of_one_class_only(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        kept = y != 1
        return F.cross_entropy(model(x[kept]), y[kept], reduction="sum")

    fit(w, mlp(), loss, loss_reduction="sum")


@TABLE.right(random=True)
def half_of_the_rows(w: World) -> None:
    """Which ones is a coin's matter, thrown for each record anew."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.ones(len(x)).bernoulli_(0.9, generator=torch.Generator().manual_seed(0))
        return (F.cross_entropy(model(x), y, reduction="none") * mask).mean()

    fit(w, mlp(), loss)


@TABLE.right()
def two_views_in_two_passes(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (cross_entropy(model, x, y) + cross_entropy(model, -x, y)) / 2

    fit(w, mlp(), loss)


@TABLE.right()
def two_views_behind_each_other(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, torch.cat([x, -x]), torch.cat([y, y]))

    fit(w, mlp(), loss)


@TABLE.right()
def two_views_next_to_each_other(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        both = torch.stack([x, -x], 1).flatten(0, 1)
        return cross_entropy(model, both, y.repeat_interleave(2))

    fit(w, mlp(), loss)


@TABLE.right()
def four_copies_of_every_row(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        copies = x.repeat_interleave(4, 0) * 0.9
        return cross_entropy(model, copies, y.repeat_interleave(4))

    fit(w, mlp(), loss)


@TABLE.right(kind=IMAGES)
def several_crops(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        crops = [F.pad(x, (1, 0))[..., :4], F.pad(x, (0, 1))[..., 1:], x.flip(-1)]
        return sum(cross_entropy(model, crop, y) for crop in crops) / len(crops)

    fit(w, conv(), loss)


@TABLE.right(kind=IMAGES)
def several_crops_in_one_pass(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        crops = torch.cat([x, x.flip(-1), x.flip(-2)])
        outputs = model(crops).chunk(3)
        return sum(F.cross_entropy(output, y) for output in outputs) / 3

    fit(w, conv(), loss)


@TABLE.right()
def split_into_physical_batches(w: World) -> None:
    fit(w, mlp(), max_physical_batch_size=2)


@TABLE.right()
def fixed_batch_size(w: World) -> None:
    fit(w, mlp(), sampling="fixed")


@TABLE.right()
def handed_on_through_a_function_and_a_queue(w: World) -> None:
    """Prepared by a generator that keeps one batch at a time."""

    def prepared(loader: Any) -> Any:
        for x, y in loader:
            waiting = [(x.contiguous(), y.view(-1))]
            yield waiting.pop()

    model, optimizer, loader = w.private(mlp())
    for x, y in prepared(loader):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.right()
def numpy_round_trip_adopted(w: World) -> None:
    """The remedy: the loop vouches that row i is still record i's."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, w.engine.adopt(torch.from_numpy(x.numpy() * 2.0)), y)

    fit(w, mlp(), loss)


def two_views(records: Any) -> list[Tensor]:
    """All first views, then all second ones."""
    x, y = torch.utils.data.default_collate(records)
    return [torch.cat([x, -x]), torch.cat([y, y])]


@TABLE.right()
def views_made_by_the_collate_function(w: World) -> None:
    fit(w, mlp(), loader=w.loader(collate_fn=two_views), views=2)
