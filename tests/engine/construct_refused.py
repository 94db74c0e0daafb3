"""Constructs that must be refused: samples that meet, or a sample axis that is not the first."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import UnsupportedModule
from tests.engine.construct_kit import (
    HEADS,
    IMAGE,
    ROWS,
    SEQUENCE,
    TOKENS,
    VOCABULARY,
    B,
    Construct,
    E,
    Model,
    Refused,
    draw,
    parameter,
)


def refused(says: str) -> Refused:
    return Refused(UnsupportedModule, says)


MIXES = refused("sample")
AXIS = refused("batch")


def between(forward: object) -> nn.Module:
    middle = Model(forward)  # type: ignore[arg-type]
    return nn.Sequential(nn.Linear(E, E), middle, nn.Tanh(), nn.Linear(E, 3))


def time_first(m: Model, x: Tensor) -> Tensor:
    return m.layer(x.transpose(0, 1)).transpose(0, 1)


def functional_batch_norm(m: Model, x: Tensor) -> Tensor:
    return F.batch_norm(m.layer(x), None, None, m.weight, m.bias, training=True)


def absorbing(m: Model, x: Tensor) -> Tensor:
    y = m.layer(x)
    with torch.no_grad():
        m.average.lerp_(y.mean(0), 0.1)
    return y


def in_two_halves(m: Model, x: Tensor) -> Tensor:
    half = len(x) // 2
    return torch.cat([m.layer(x[:half]), m.layer(x[half:])])


def views(x: Tensor) -> Tensor:
    return torch.cat([x, -x])


SQUARE = (draw(B, B, E),)  # time is as long as the batch is large: sizes alone tell nothing

MIXING = [
    Construct(
        "batch-norm",
        lambda: nn.Sequential(nn.Conv2d(E, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
        IMAGE,
        refused("its batch"),
        mixes=True,
    ),
    Construct(
        "functional-batch-norm",
        lambda: Model(
            functional_batch_norm, layer=nn.Conv2d(E, 6, 3), weight=parameter(6), bias=parameter(6)
        ),
        IMAGE,
        MIXES,
        mixes=True,
    ),
    Construct(
        "centred-over-the-batch",
        lambda: between(lambda m, x: x - x.mean(0)),
        SEQUENCE,
        MIXES,
        mixes=True,
    ),
    Construct(
        "softmax-over-the-batch",
        lambda: between(lambda m, x: x.softmax(0)),
        ROWS,
        MIXES,
        mixes=True,
    ),
    Construct(
        "neighbours", lambda: between(lambda m, x: x * x.roll(1, 0)), ROWS, MIXES, mixes=True
    ),
    Construct("reversed-samples", lambda: between(lambda m, x: x.flip(0)), ROWS, MIXES, mixes=True),
    Construct(
        "attention-over-the-batch",
        lambda: Model(
            lambda m, x: m.attention(x, x, x)[0],
            attention=nn.MultiheadAttention(E, HEADS, batch_first=False),
        ),
        SEQUENCE,
        MIXES,
        mixes=True,
    ),
]

AXES = [
    Construct(
        "time-first-transformer",
        lambda: Model(time_first, layer=nn.TransformerEncoderLayer(E, HEADS, 2 * E, dropout=0.0)),
        SEQUENCE,
        refused("batch_first=True"),
    ),
    Construct(
        "time-first-linear", lambda: Model(time_first, layer=nn.Linear(E, E)), SEQUENCE, AXIS
    ),
    Construct(
        "time-first-linear-square", lambda: Model(time_first, layer=nn.Linear(E, E)), SQUARE, AXIS
    ),
    Construct(
        "time-folded-first",
        lambda: Model(
            lambda m, x: (
                m.layer(x.transpose(0, 1).flatten(0, 1))
                .unflatten(0, (x.shape[1], -1))
                .transpose(0, 1)
            ),
            layer=nn.Linear(E, E),
        ),
        SEQUENCE,
        AXIS,
    ),
    Construct("in-two-halves", lambda: Model(in_two_halves, layer=nn.Linear(E, 3)), ROWS, AXIS),
    Construct(
        "two-views-behind-each-other",
        lambda: Model(
            lambda m, x: m.layer(views(x)).tanh().unflatten(0, (2, -1)).sum(0),
            layer=nn.Linear(E, 3),
        ),
        ROWS,
        AXIS,
    ),
    Construct(
        "sorted-samples",
        lambda: Model(
            lambda m, x: m.layer(x[x[:, 0].argsort()])[x[:, 0].argsort().argsort()],
            layer=nn.Linear(E, 3),
        ),
        ROWS,
        AXIS,
    ),
]

STATE = [
    Construct(
        "buffer-absorbs-data",
        lambda: Model(absorbing, layer=nn.Linear(E, 6), average=torch.zeros(6)),
        ROWS,
        refused("buffer"),
    ),
    Construct(
        "instance-norm-tracking",
        lambda: nn.Sequential(
            nn.Conv2d(E, 6, 3), nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        ),
        IMAGE,
        refused("running statistics"),
    ),
    Construct(
        "embedding-max-norm",
        lambda: nn.Sequential(nn.Embedding(VOCABULARY, E, max_norm=1.0), nn.Linear(E, 3)),
        TOKENS,
        refused("max_norm"),
    ),
    Construct(
        "embedding-by-frequency",
        lambda: nn.Embedding(VOCABULARY, E, scale_grad_by_freq=True),
        TOKENS,
        refused("scale_grad_by_freq"),
        mixes=True,
    ),
    Construct(
        "embedding-sparse",
        lambda: nn.Embedding(VOCABULARY, E, sparse=True),
        TOKENS,
        refused("sparse"),
    ),
    Construct(
        "nothing-to-train",
        lambda: nn.Linear(E, 3).requires_grad_(False),
        ROWS,
        refused("no parameter requires a gradient"),
    ),
]

REFUSED = [*MIXING, *AXES, *STATE]
