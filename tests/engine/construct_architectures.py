"""Constructs of published architectures: biases in attention, experts, gathered rows, adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import UnsupportedModule
from tests.engine.construct_custom import sequence
from tests.engine.construct_kit import (
    HEADS,
    IMAGE,
    ROWS,
    SEQUENCE,
    Construct,
    E,
    Model,
    Refused,
    T,
    parameter,
)

D = E // HEADS
PLACES = torch.arange(T)[:, None] - torch.arange(T)[None] + T - 1
WINDOW_MASK = torch.zeros(2, 1, T, T).index_fill_(0, torch.tensor([1]), -1.0)
EXPERTS = 3


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, D)).transpose(1, 2)


def biased_attention(m: Model, x: Tensor) -> Tensor:
    """T5, BEiT: a table of relative positions is added to the scores."""
    bias = m.table[PLACES].permute(2, 0, 1).unsqueeze(0)
    return (
        F.scaled_dot_product_attention(*[heads(x)] * 3, attn_mask=bias).transpose(1, 2).flatten(2)
    )


def windows(m: Model, x: Tensor) -> Tensor:
    """Swin: two windows of every sample, with a trained bias and a constant mask of each."""
    both = torch.cat([x, x.flip(1)], dim=1).unflatten(1, (2, T)).flatten(0, 1)
    mask = m.mask.unsqueeze(0).expand(len(x), -1, -1, -1, -1).reshape(-1, 1, T, T)
    bias = m.table[PLACES].permute(2, 0, 1).unsqueeze(0) + mask
    mixed = F.scaled_dot_product_attention(*[heads(both)] * 3, attn_mask=bias)
    return mixed.transpose(1, 2).flatten(2).unflatten(0, (-1, 2)).sum(1)


def relative_keys(m: Model, x: Tensor) -> Tensor:
    """DeBERTa: projected positions, repeated for every sample's heads."""
    keys = m.key(m.table).unflatten(-1, (HEADS, D)).transpose(0, 1).repeat(len(x), 1, 1)
    scores = torch.bmm(heads(x).flatten(0, 1), keys.transpose(1, 2)).softmax(-1)
    return (
        scores.unflatten(0, (len(x), HEADS)).flatten(1, 2).transpose(1, 2).repeat(1, 1, 4)[..., :E]
    )


def reflections(m: Model, x: Tensor) -> Tensor:
    """HRA: a product of reflections that begins at the identity."""
    weight = torch.eye(E, dtype=x.dtype)
    for u in m.u.unbind(0):
        weight = weight @ (torch.eye(E, dtype=x.dtype) - 2 * torch.outer(u, u) / (u @ u))
    return F.linear(x, weight)


def rotation(m: Model, x: Tensor) -> Tensor:
    """OFT: a skew-symmetric matrix whose upper half is written into zeros."""
    skew = torch.zeros(E, E, dtype=m.angles.dtype)
    row, column = torch.triu_indices(E, E, 1)
    skew[row, column] = m.angles
    return x @ torch.matrix_exp(skew - skew.t()).to(x.dtype)


def decay(m: Model, x: Tensor) -> Tensor:
    """RWKV: the last decay of the state is never read."""
    state, seen = torch.zeros_like(x[:, 0]), []
    for step in x.unbind(1):
        seen.append(state + step)
        state = state * torch.sigmoid(m.decay) + step
    return torch.stack(seen, dim=1)


def chosen(x: Tensor) -> Tensor:
    """The expert of each token: it depends on the token alone, and all are met."""
    return (x[:, 0].detach() * 7).floor().long() % EXPERTS


def grouped(m: Model, x: Tensor) -> Tensor:
    """Mixtral: tokens sorted by expert, one grouped product, and back."""
    tokens = x.flatten(0, 1)
    order = chosen(tokens).argsort(stable=True)
    ends = torch.bincount(chosen(tokens), minlength=EXPERTS).cumsum(0).to(torch.int32)
    weight = m.experts.transpose(1, 2)
    made = F.grouped_mm(tokens[order].to(weight.dtype), weight, offs=ends)
    return made[order.argsort()].view_as(x)


def looped(m: Model, x: Tensor) -> Tensor:
    """Switch: each expert takes the tokens that chose it."""
    tokens = x.flatten(0, 1)
    made = torch.zeros_like(tokens)
    for number, expert in enumerate(m.experts):
        (rows,) = torch.where(chosen(tokens) == number)
        made = made.index_add(0, rows, expert(tokens[None, rows].reshape(-1, E)))
    return made.view_as(x)


def masked(m: Model, x: Tensor) -> Tensor:
    chosen_ones = x[..., 0] > 0
    made = torch.zeros_like(x)
    made[chosen_ones] = m.norm(torch.tanh(m.layer(x[chosen_ones])))
    return made


def in_halves(m: Model, x: Tensor) -> Tensor:
    half = len(x) // 2
    return torch.cat([m.layer(x[:half]), m.layer(x[half:])])


def sorted_rows(m: Model, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return m.layer(x[order])[order.argsort()]


def standardised(m: Model, x: Tensor) -> Tensor:
    """NF-ResNet: each filter is standardised by a batch norm of the weight."""
    flat = m.weight.reshape(1, len(m.weight), -1)
    weight = F.batch_norm(flat, None, None, weight=m.gain, training=True, momentum=0.0)
    return F.conv2d(x, weight.reshape_as(m.weight))


class Gathered(nn.Module):
    """A layer before the construct, so that its rows can be followed, and one behind it."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(E, E), middle, nn.Linear(E, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def linears() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(E, E) for _ in range(EXPERTS)])


ARCHITECTURES = [
    Construct(
        "attention-with-trained-bias",
        lambda: sequence(biased_attention, table=parameter(2 * T - 1, HEADS)),
        SEQUENCE,
    ),
    Construct(
        "attention-in-windows-with-trained-bias",
        lambda: sequence(windows, table=parameter(2 * T - 1, HEADS), mask=WINDOW_MASK),
        SEQUENCE,
    ),
    Construct(
        "relative-keys-repeated-per-head",
        lambda: sequence(relative_keys, table=parameter(5, E), key=nn.Linear(E, E, bias=False)),
        SEQUENCE,
    ),
    Construct(
        "buffer-of-ids-expanded",
        lambda: sequence(
            lambda m, x: x + m.table(m.ids.expand(len(x), -1)),
            table=nn.Embedding(3, E),
            ids=torch.zeros(1, T, dtype=torch.long),
        ),
        SEQUENCE,
    ),
    Construct(
        "constant-expanded-into-linear",
        lambda: sequence(
            lambda m, x: x * m.layer(m.places.expand(len(x), -1, -1)).softmax(-1),
            layer=nn.Linear(2, E),
            places=torch.randn(1, T, 2),
        ),
        SEQUENCE,
    ),
    Construct(
        "constant-into-convolution",
        lambda: Model(
            lambda m, x: (x + m.layer(torch.linspace(0, 1, 30).to(x).view(1, 1, 6, 5))).square(),
            layer=nn.Conv2d(1, E, 1),
        ),
        IMAGE,
    ),
    Construct(
        "identity-through-an-adapter",
        lambda: sequence(
            lambda m, x: F.linear(x, m.up(m.down(torch.eye(E, dtype=x.dtype))).t().tanh()),
            down=nn.Linear(E, 2, bias=False),
            up=nn.Linear(2, E, bias=False),
        ),
        SEQUENCE,
    ),
    Construct("product-of-reflections", lambda: sequence(reflections, u=parameter(2, E)), SEQUENCE),
    Construct(
        "written-into-zeros",
        lambda: sequence(rotation, angles=parameter(E * (E - 1) // 2)),
        SEQUENCE,
    ),
    Construct("decayed-state", lambda: sequence(decay, decay=parameter(E)), SEQUENCE),
    Construct(
        "standardised-weights",
        lambda: Model(standardised, weight=parameter(4, E, 3, 3), gain=parameter(4)),
        IMAGE,
    ),
    Construct(
        "experts-grouped",
        lambda: Gathered(Model(grouped, experts=parameter(EXPERTS, E, E))),
        (SEQUENCE[0].float(),),
        dtype=torch.float32,  # as grouped products are
        tolerance=1e-5,
    ),
    Construct("experts-looped", lambda: Gathered(Model(looped, experts=linears())), SEQUENCE),
    Construct(
        "tokens-of-a-mask",
        lambda: Gathered(Model(masked, layer=nn.Linear(E, E), norm=nn.LayerNorm(E))),
        SEQUENCE,
    ),
    Construct(
        "in-two-halves-behind-a-layer",
        lambda: Gathered(Model(in_halves, layer=nn.Linear(E, E))),
        ROWS,
    ),
    Construct(
        "sorted-behind-a-layer",
        lambda: Gathered(Model(sorted_rows, layer=nn.Linear(E, E))),
        ROWS,
    ),
]


def used_and_changed(m: Model, x: Tensor) -> Tensor:
    twice = m.scale * 2
    y = x + twice
    twice.mul_(3)
    return y + twice


def mixed_writes(m: Model, x: Tensor) -> Tensor:
    made = torch.zeros(len(x), T + 1, E, dtype=x.dtype)
    made[:, 0] = m.token
    made[:, 1:] = x
    return made


ARCHITECTURES_REFUSED = [
    Construct(
        "sorted-and-not-put-back",
        lambda: Gathered(Model(lambda m, x: m.layer(x[x[:, 0].argsort()]), layer=nn.Linear(E, E))),
        ROWS,
        Refused(UnsupportedModule, "sample"),
        mixes=True,
    ),
    Construct(
        "gathered-from-the-next-sample",
        lambda: Gathered(
            Model(lambda m, x: m.layer(x[[*range(1, len(x)), 0]]), layer=nn.Linear(E, E))
        ),
        ROWS,
        Refused(UnsupportedModule, "sample"),
        mixes=True,
    ),
    Construct(
        "bias-of-the-next-sample",
        lambda: sequence(
            lambda m, x: x + m.bias.repeat(len(x), 1, 1) * x.roll(1, 0), bias=parameter(1, T, E)
        ),
        SEQUENCE,
        Refused(UnsupportedModule, "sample"),
        mixes=True,
    ),
    Construct(
        "expression-changed-after-a-use",
        lambda: sequence(used_and_changed, scale=parameter(E)),
        SEQUENCE,
        Refused(UnsupportedModule, "a change in place"),
    ),
    Construct(
        "token-and-samples-written-into-zeros",
        lambda: sequence(mixed_writes, token=parameter(E)),
        SEQUENCE,
        Refused(UnsupportedModule, "data that are written"),
    ),
]
