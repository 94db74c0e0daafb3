"""Draws without a record, and draws of one: models that cannot reshape zero rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import (
    HIDDEN,
    Between,
    Language,
    Reader,
    conv,
    cross_entropy,
    fit,
    mlp,
)
from tests.engine.guards.records import CLASSES, FEATURES, IMAGES, TARGET, TEXTS, TOKENS, padded

TABLE = Table("empty draws")

EMPTY = [(0, 1, TARGET), (), (TARGET,)]
"""The last draw is empty where the target is absent."""


@TABLE.right()
def plain_network(w: World) -> None:
    fit(w, mlp(), draws=EMPTY)


@TABLE.right()
def heads_split_by_a_wild_card(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        return h.view(h.shape[0], HIDDEN, -1).transpose(1, 2).reshape(h.shape[0], -1)

    fit(w, Between(middle), draws=EMPTY)


@TABLE.right(kind=IMAGES)
def images_flattened_by_a_wild_card(w: World) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv2d(2, 3, 3), nn.Linear(12, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).tanh().reshape(len(x), -1))

    fit(w, Flat(), draws=EMPTY)


@TABLE.right(kind=TOKENS)
def mask_of_the_longest_text(w: World) -> None:
    def middle(m: nn.Module, ids: Tensor, h: Tensor) -> Tensor:
        longest = int((ids != 0).sum(1).max())
        return h[:, :longest]

    fit(w, Reader(middle), draws=EMPTY)


@TABLE.right(kind=TOKENS)
def recurrent(w: World) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(17, HIDDEN)
            self.body = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
            self.head = nn.Linear(HIDDEN, CLASSES)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.body(self.table(ids))[0][:, -1])

    fit(w, Recurrent(), draws=EMPTY)


@TABLE.right(kind=TOKENS)
def attention(w: World) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(17, 4), layer
            self.head = nn.Linear(4, CLASSES)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.layer(self.table(ids)).mean(1))

    fit(w, Encoder(), draws=EMPTY)


@TABLE.right(kind=IMAGES)
def interpolated_and_pooled(w: World) -> None:
    body = nn.Sequential(
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )
    fit(w, body, draws=EMPTY)


@TABLE.right(kind=TEXTS)
def padded_texts(w: World) -> None:
    model, optimizer, loader = w.private(
        Language(), loader=w.loader(collate_fn=padded), masked_padding=True, draws=EMPTY
    )
    for batch in loader:
        optimizer.zero_grad()
        logits = model(**batch)
        each = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"], reduction="none")
        mask = batch["attention_mask"]
        ((each * mask).sum(1) / mask.sum(1).clamp(min=1)).mean().backward()
        optimizer.step()


@TABLE.right()
def rows_one_by_one(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, torch.stack([row / row.norm() for row in x]), y)

    fit(w, mlp(), loss, draws=EMPTY)


@TABLE.right()
def first_row_printed(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        str(x[0].tolist())
        return cross_entropy(model, x, y)

    fit(w, mlp(), loss, draws=EMPTY)


@TABLE.right()
def largest_logit(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        output.max().item()
        return F.cross_entropy(output, y)

    fit(w, mlp(), loss, draws=EMPTY)


@TABLE.right()
def empty_part_of_a_split_batch(w: World) -> None:
    fit(w, mlp(), draws=[(0, 1, TARGET), (), (TARGET,)], max_physical_batch_size=1)


@TABLE.right()
def sum_divided_by_the_expected_size(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="sum")

    fit(w, mlp(), loss, draws=EMPTY, loss_reduction="sum")


@TABLE.right()
def only_empty_draws(w: World) -> None:
    fit(w, mlp(CLASSES, FEATURES), draws=[(), (TARGET,), ()])


@TABLE.right(kind=IMAGES)
def convolution(w: World) -> None:
    fit(w, conv(), draws=EMPTY)
