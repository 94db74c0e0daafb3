"""Constructs of custom modules: own parameters, sharing, adapters, wrappers, control flow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests.engine.construct_kit import (
    HEADS,
    IMAGE,
    ROWS,
    SEQUENCE,
    TOKENS,
    VOCABULARY,
    Construct,
    E,
    Model,
    T,
    parameter,
)


def sequence(forward: Callable[..., Tensor], **parts: object) -> nn.Module:
    """The construct between two layers, so that its input needs a gradient and its output is
    used."""
    middle = Model(forward, **parts)
    return nn.Sequential(nn.Linear(E, E), nn.Tanh(), middle, nn.Tanh(), nn.Linear(E, 3))


OWN_PARAMETERS = [
    Construct(
        "functional-linear",
        lambda: sequence(lambda m, x: F.linear(x, m.w, m.b), w=parameter(E, E), b=parameter(E)),
        SEQUENCE,
    ),
    Construct(
        "broadcast-branch",
        lambda: Model(
            lambda m, x: m.layer(x) * m.other(m.constant),
            layer=nn.Linear(E, 3),
            other=nn.Linear(E, 3),
            constant=torch.ones(1, E),
        ),
        ROWS,
    ),
    Construct("matmul", lambda: sequence(lambda m, x: x @ m.w, w=parameter(E, E)), SEQUENCE),
    Construct("matmul-2d", lambda: sequence(lambda m, x: x @ m.w, w=parameter(E, E)), ROWS),
    Construct(
        "matmul-transposed", lambda: sequence(lambda m, x: x @ m.w.t(), w=parameter(E, E)), SEQUENCE
    ),
    Construct(
        "matmul-mT", lambda: sequence(lambda m, x: torch.matmul(x, m.w.mT), w=parameter(E, E)), ROWS
    ),
    Construct(
        "matmul-vector",
        lambda: sequence(lambda m, x: x * (x @ m.w).unsqueeze(-1), w=parameter(E)),
        SEQUENCE,
    ),
    Construct(
        "matmul-per-head",
        lambda: sequence(
            lambda m, x: (x.view(*x.shape[:2], HEADS, 1, -1) @ m.w).flatten(2),
            w=parameter(HEADS, E // HEADS, E // HEADS),
        ),
        SEQUENCE,
    ),
    Construct(
        "matmul-from-the-left",
        lambda: sequence(lambda m, x: m.w @ x, w=parameter(T, T)),
        SEQUENCE,
    ),
    Construct(
        "einsum",
        lambda: sequence(lambda m, x: torch.einsum("bte,ef->btf", x, m.w), w=parameter(E, E)),
        SEQUENCE,
    ),
    Construct(
        "einsum-per-head",
        lambda: sequence(
            lambda m, x: torch.einsum("bthd,hdf->bthf", x.unflatten(2, (HEADS, -1)), m.w).flatten(
                2
            ),
            w=parameter(HEADS, E // HEADS, E // HEADS),
        ),
        SEQUENCE,
    ),
    Construct(
        "layer-scale", lambda: sequence(lambda m, x: x * m.scale, scale=parameter(E)), SEQUENCE
    ),
    Construct(
        "channel-scale",
        lambda: nn.Sequential(
            nn.Conv2d(E, 4, 3), Model(lambda m, x: m.scale * x, scale=parameter(4, 1, 1))
        ),
        IMAGE,
    ),
    Construct("bias", lambda: sequence(lambda m, x: x + m.bias, bias=parameter(E)), SEQUENCE),
    Construct(
        "scale-and-shift",
        lambda: sequence(
            lambda m, x: torch.addcmul(m.shift, x, m.scale), scale=parameter(E), shift=parameter(E)
        ),
        SEQUENCE,
    ),
    Construct("scalar", lambda: sequence(lambda m, x: x * m.scale, scale=parameter()), SEQUENCE),
    Construct(
        "temperature",
        lambda: sequence(lambda m, x: x / (m.temperature.exp() + 1), temperature=parameter()),
        ROWS,
    ),
    Construct(
        "gate",
        lambda: sequence(lambda m, x: x * torch.sigmoid(m.gate), gate=parameter(E)),
        SEQUENCE,
    ),
    Construct(
        "class-token",
        lambda: sequence(
            lambda m, x: torch.cat([m.token.expand(len(x), -1, -1), x], dim=1),
            token=parameter(1, 1, E),
        ),
        SEQUENCE,
    ),
    Construct(
        "class-token-repeated",
        lambda: sequence(
            lambda m, x: torch.cat([m.token.repeat(len(x), 1, 1), x], dim=1),
            token=parameter(1, 1, E),
        ),
        SEQUENCE,
    ),
    Construct(
        "learned-positions",
        lambda: sequence(lambda m, x: x + m.position, position=parameter(1, T, E)),
        SEQUENCE,
    ),
    Construct(
        "learned-positions-cut",
        lambda: sequence(
            lambda m, x: x + m.position[:, : x.shape[1]], position=parameter(1, T + 4, E)
        ),
        SEQUENCE,
    ),
    *(
        Construct(
            f"position-ids-{name}",
            lambda positions=positions: sequence(
                lambda m, x: x + m.table(m.positions),
                table=nn.Embedding(T + 1, E),
                positions=positions,
            ),
            SEQUENCE,
        )
        for name, positions in (("of-time", torch.arange(T)), ("of-one", torch.arange(T)[None]))
    ),
    Construct(
        "indexed-table",
        lambda: Model(lambda m, tokens: m.table[tokens], table=parameter(VOCABULARY, E)),
        TOKENS,
    ),
    Construct(
        "parameter-list",
        lambda: sequence(
            lambda m, x: x + sum(F.linear(x, w) for w in m.weights),
            weights=nn.ParameterList([parameter(E, E), parameter(E, E)]),
        ),
        SEQUENCE,
    ),
    Construct(
        "parameter-dict",
        lambda: sequence(
            lambda m, x: x @ m.weights["a"] + m.weights["b"],
            weights=nn.ParameterDict({"a": parameter(E, E), "b": parameter(E)}),
        ),
        SEQUENCE,
    ),
]


def low_rank(m: Model, x: Tensor) -> Tensor:
    return m.base(x) + F.linear(F.linear(x, m.down), m.up) * 0.5


def folded_addmm(m: Model, x: Tensor) -> Tensor:
    """The Conv1D of GPT-2: weights [in, out], batch and time folded into one axis."""
    shape = (*x.shape[:-1], m.bias.shape[0])
    return torch.addmm(m.bias, x.view(-1, x.shape[-1]), m.weight).view(shape)


def nested() -> nn.Module:
    def blocks() -> nn.ModuleList:
        return nn.ModuleList([nn.Linear(E, E), nn.ModuleList([nn.Linear(E, E)])])

    def forward(m: Model, x: Tensor) -> Tensor:
        for first, (second,) in m.blocks:
            x = x + torch.tanh(second(torch.tanh(first(x))))
        return x

    return Model(forward, blocks=nn.ModuleList([blocks(), blocks()]))


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(E, E)

    def forward(self, *, features: Tensor) -> Tensor:
        return self.inner(input=features)


class FrozenNorm(nn.Module):
    """Batch normalisation that stays in eval mode, as in detection models."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.norm.running_mean = torch.randn(6)
        self.norm.running_var = torch.rand(6) + 0.5
        self.norm.requires_grad_(False)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def pruned() -> nn.Module:
    layer = nn.Linear(E, E)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    # A pre-hook of prune multiplies by the mask at every call.
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(E, 3))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(E, E), nn.Tanh(), nn.Linear(E, E))


def in_place(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    y += x
    return m.second(y.relu_()).mul_(0.5)


def autocast(m: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.second(torch.tanh(m.norm(m.first(x)))).float()


COMPOSED = [
    Construct(
        "called-twice",
        lambda: Model(lambda m, x: m.layer(torch.tanh(m.layer(x))), layer=nn.Linear(E, E)),
        SEQUENCE,
    ),
    Construct(
        "called-twice-at-other-lengths",
        lambda: Model(
            lambda m, x: m.layer(x) + m.layer(x[:, 0]).unsqueeze(1), layer=nn.Linear(E, E)
        ),
        SEQUENCE,
    ),
    Construct(
        "one-weight-in-two-operations",
        lambda: sequence(lambda m, x: F.linear(x, m.w) + x * m.w.diagonal(), w=parameter(E, E)),
        SEQUENCE,
    ),
    Construct(
        "shared-convolution",
        lambda: Model(
            lambda m, x: m.layer(torch.tanh(m.layer(x))), layer=nn.Conv2d(E, E, 3, padding=1)
        ),
        IMAGE,
    ),
    Construct("nested-lists", nested, SEQUENCE),
    Construct(
        "executed-in-another-order",
        lambda: Model(
            lambda m, x: m.first(torch.tanh(m.second(x))),
            first=nn.Linear(5, 3),
            second=nn.Linear(E, 5),
        ),
        ROWS,
    ),
    Construct(
        "low-rank-adapter",
        lambda: sequence(
            low_rank,
            base=nn.Linear(E, E).requires_grad_(False),
            down=parameter(2, E),
            up=parameter(E, 2),
        ),
        SEQUENCE,
    ),
    Construct(
        "folded-addmm",
        lambda: sequence(folded_addmm, weight=parameter(E, E), bias=parameter(E)),
        SEQUENCE,
    ),
    Construct(
        "folded-linear",
        lambda: sequence(
            lambda m, x: m.layer(x.flatten(0, 1)).view_as(x), layer=nn.Linear(E, E, bias=False)
        ),
        SEQUENCE,
    ),
    Construct(
        "weight-norm", lambda: sequence_of(parametrizations.weight_norm(nn.Linear(E, E))), SEQUENCE
    ),
    Construct(
        "spectral-norm",
        # So many iterations that one more, in another pass, changes nothing.
        lambda: sequence_of(
            parametrizations.spectral_norm(nn.Linear(E, E), n_power_iterations=400)
        ),
        SEQUENCE,
    ),
    Construct("pruned", pruned, SEQUENCE),
    Construct(
        "frozen",
        lambda: nn.Sequential(
            nn.Linear(E, E).requires_grad_(False), nn.Tanh(), nn.Linear(E, 3), nn.LayerNorm(3)
        ),
        SEQUENCE,
    ),
    Construct(
        "frozen-in-the-middle",
        lambda: nn.Sequential(
            nn.Linear(E, E), nn.Linear(E, E).requires_grad_(False), nn.Tanh(), nn.Linear(E, 3)
        ),
        SEQUENCE,
    ),
    Construct("frozen-batch-norm", lambda: nn.Sequential(nn.Conv2d(E, 6, 3), FrozenNorm()), IMAGE),
    Construct(
        "unused",
        lambda: Model(lambda m, x: m.used(x), used=nn.Linear(E, 3), unused=nn.Linear(E, 3)),
        ROWS,
    ),
    Construct(
        "detached",
        lambda: Model(
            lambda m, x: m.head(m.body(x).detach()), body=nn.Linear(E, 5), head=nn.Linear(5, 3)
        ),
        ROWS,
    ),
    Construct(
        "in-place", lambda: Model(in_place, first=nn.Linear(E, E), second=nn.Linear(E, 3)), SEQUENCE
    ),
    Construct(
        "in-place-activation",
        lambda: nn.Sequential(nn.Conv2d(E, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 2)),
        IMAGE,
    ),
    *(
        Construct(
            f"checkpoint-{'reentrant' if reentrant else 'saved-tensors'}",
            lambda reentrant=reentrant: sequence(
                lambda m, x: checkpoint(m.block, x, use_reentrant=reentrant), block=block()
            ),
            SEQUENCE,
        )
        for reentrant in (True, False)
    ),
    Construct(
        "keyword", lambda: sequence(lambda m, x: m.part(features=x), part=Keyword()), SEQUENCE
    ),
    Construct(
        "autocast",
        lambda: Model(
            autocast, first=nn.Linear(E, E), norm=nn.LayerNorm(E), second=nn.Linear(E, 3)
        ),
        (SEQUENCE[0].float(),),
        dtype=torch.float32,
        tolerance=0.03,
    ),
    Construct(
        "residual-convolutions",
        lambda: Model(
            lambda m, x: x + m.second(torch.relu(m.norm(m.first(x)))),
            first=nn.Conv2d(E, 6, 3, padding=1, bias=False),
            norm=nn.GroupNorm(3, 6),
            second=nn.Conv2d(6, E, 3, padding=1, bias=False),
        ),
        IMAGE,
    ),
    Construct(
        "pooled-squeeze-and-excite",
        lambda: Model(
            lambda m, x: x * torch.sigmoid(m.gate(x.mean((2, 3))))[:, :, None, None],
            gate=nn.Linear(E, E),
        ),
        IMAGE,
    ),
]


def sequence_of(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(E, 3))


CUSTOM = [*OWN_PARAMETERS, *COMPOSED]
