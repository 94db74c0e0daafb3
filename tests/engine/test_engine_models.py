"""Whole models: attention in every form, recurrent networks, and random stacks of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpkern.engine import layers  # noqa: F401  (registers the rules)
from tests.engine.engine_oracle import check, draw, make, tokens

B, T, E = 3, 4, 8
PADDED = torch.arange(5).expand(B, 5) >= torch.tensor([[5], [3], [1]])


class Attention(nn.Module):
    """An attention layer of sequences, batch first outside whatever it is inside."""

    def __init__(self, call: dict[str, Any], **options: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(E, 2, **options)
        self.call = call
        self.weights = call.pop("weights", False)

    def forward(self, *inputs: Tensor) -> Tensor:
        *inputs, padding = inputs if inputs[-1].dtype is torch.bool else (*inputs, None)  # type: ignore[assignment]
        three = (*inputs, *inputs[-1:] * 2)[:3]
        if not self.layer.batch_first:
            turned = {id(x): x.transpose(0, 1) for x in three}
            three = tuple(turned[id(x)] for x in three)
        output, shares = self.layer(
            *three, key_padding_mask=padding, need_weights=self.weights, **self.call
        )
        output = output if self.layer.batch_first else output.transpose(0, 1)
        return torch.cat([output, shares @ inputs[-1]], 2) if self.weights else output


SELF = (draw(B, T, E),)
CROSS = (draw(B, T, E), draw(B, 5, E, seed=2))
APART = (*CROSS, draw(B, 5, E, seed=3))
CAUSAL = torch.ones(T, T).triu(1).bool()

ATTENTION: dict[str, tuple[dict[str, Any], tuple[Tensor, ...], dict[str, Any]]] = {
    "self": ({}, SELF, {}),
    "self-weights": ({}, SELF, {"weights": True}),
    "cross": ({}, CROSS, {}),
    "three": ({}, APART, {}),
    "no-bias": ({"bias": False}, CROSS, {}),
    "masked": ({}, SELF, {"attn_mask": CAUSAL}),
    "causal": ({}, SELF, {"attn_mask": CAUSAL, "is_causal": True}),
    "padded": ({}, (*CROSS, PADDED), {}),
    "kdim-vdim": ({"kdim": 6, "vdim": 7}, (SELF[0], draw(B, 5, 6), draw(B, 5, 7)), {}),
    "bias-kv": ({"add_bias_kv": True}, CROSS, {}),
    "zero-attention": ({"add_zero_attn": True}, SELF, {}),
}


@pytest.mark.parametrize("batch_first", [False, True], ids=["time-first", "batch-first"])
@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION)
def test_attention(
    case: tuple[dict[str, Any], tuple[Tensor, ...], dict[str, Any]], batch_first: bool
) -> None:
    options, inputs, call = case
    check(make(lambda: Attention(dict(call), batch_first=batch_first, **options)), inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_transformer_layers(kind: Any, norm_first: bool, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    module = make(lambda: kind(E, 2, 12, activation=F.gelu, **options))
    check(module, SELF if kind is nn.TransformerEncoderLayer else CROSS, dtype=dtype)


def test_whole_transformer() -> None:
    module = make(lambda: nn.Transformer(E, 2, 1, 1, 12, dropout=0.0, batch_first=True))
    check(module, CROSS)


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(5, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.batch_first:
            return self.layer(x)[0]  # type: ignore[no-any-return]
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)  # type: ignore[no-any-return]


class Cells(nn.Module):
    """Cells in a loop, the second one shared by two places."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(5, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        c = h = k = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h, c = self.lstm(x[:, t], (h, c))
            k = self.rnn(self.gru(h, self.gru(k, h)), k)
        return k


@pytest.mark.parametrize("batch_first", [False, True], ids=["time-first", "batch-first"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}],
    ids=["plain", "deep-both-ways", "no-bias"],
)
def test_recurrent(kind: Any, options: dict[str, Any], batch_first: bool) -> None:
    module = make(lambda: Recurrent(kind, batch_first=batch_first, **options))
    check(module, (draw(B, T, 5),))


def test_recurrent_with_projection() -> None:
    check(make(lambda: Recurrent(nn.LSTM, proj_size=3, batch_first=True)), (draw(B, T, 5),))


def test_cells() -> None:
    check(make(Cells), (draw(B, T, 5),))


class Frozen(nn.Module):
    """Batch norm with statistics that stay as they are, and its scale and shift trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_batch_norm_with_fixed_statistics(dtype: torch.dtype) -> None:
    module = make(Frozen)
    before = module.get_buffer("norm.running_mean").clone()
    check(module, (draw(B, 3, 5, 5),), dtype=dtype)
    torch.testing.assert_close(module.get_buffer("norm.running_mean").float(), before)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True], ids=["offsets", "with-last"])
def test_bags_by_offsets(mode: str, last: bool) -> None:
    ids, offsets = tokens(9), torch.tensor([0, 4, 4, 7, 9][: 5 if last else 4])
    rows = torch.tensor([[0, 4], [4, 4], [4, 7], [7, 9]])

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(11, 5, mode=mode, include_last_offset=last)

        def forward(self, spans: Tensor) -> Tensor:
            if len(spans) == 4:
                return self.bag(ids, offsets)  # type: ignore[no-any-return]
            (start, end), one = spans[0].tolist(), torch.tensor([0])
            chosen = ids[start:end]
            ends = torch.tensor([0, end - start]) if last else one
            return self.bag(chosen, ends)  # type: ignore[no-any-return]

    check(make(Bags), (rows,))


class Conv1D(nn.Module):
    """The linear layer of GPT-2: weight ``[d, p]`` and a folded ``addmm``."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, p) / math.sqrt(d))
        self.bias = nn.Parameter(torch.randn(p))

    def forward(self, x: Tensor) -> Tensor:
        folded = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return folded.view(*x.shape[:-1], -1)


class LowRank(nn.Module):
    """A frozen layer and a trained correction of low rank."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.base = nn.Linear(d, d).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, d) / 3)
        self.b = nn.Parameter(torch.randn(d, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)  # type: ignore[no-any-return]


class Patches(nn.Module):
    """A small vision transformer: convolution, class token, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, E, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, E))
        self.places = nn.Parameter(torch.randn(1, 5, E))
        self.block = Block("attention", 0)
        self.gamma = nn.Parameter(torch.randn(E))
        self.head = Conv1D(E, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.places
        return self.head(h + self.gamma * self.block(h))[:, 0]  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer on ``[B, T, E]``; square ones may be shared or transposed."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.layer: nn.Module = nn.Linear(E, E, bias=seed % 2 == 0)
        elif kind == "transposed":
            self.layer = Conv1D(E, E)
        elif kind == "conv":
            self.layer = nn.Conv1d(E, E, 3, padding=1, groups=1 + seed % 2)
        elif kind == "layer-norm":
            self.layer = nn.LayerNorm(E)
        elif kind == "rms-norm":
            self.layer = nn.RMSNorm(E)
        elif kind == "group-norm":
            self.layer = nn.GroupNorm(2, E)
        elif kind == "attention":
            self.layer = nn.MultiheadAttention(E, 2, batch_first=bool(seed % 2))
        elif kind == "low-rank":
            self.layer = LowRank(E)
        elif kind == "gru":
            self.layer = nn.GRU(E, E, batch_first=True)
        else:
            self.layer = nn.Identity()
            self.scale = nn.Parameter(torch.randn(E))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("conv", "group-norm"):
            return self.layer(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]
        if self.kind == "attention":
            h = x if self.layer.batch_first else x.transpose(0, 1)
            h = self.layer(h, h, h, need_weights=False)[0]
            return h if self.layer.batch_first else h.transpose(0, 1)
        if self.kind == "gru":
            return self.layer(x)[0]  # type: ignore[no-any-return]
        if self.kind == "scale":
            return x * self.scale
        return self.layer(x)  # type: ignore[no-any-return]


KINDS = (
    *("linear", "transposed", "conv", "layer-norm", "rms-norm", "group-norm"),
    *("attention", "low-rank", "gru", "scale"),
)


class Stack(nn.Module):
    """Tokens or vectors through blocks, some used again, some under a checkpoint."""

    def __init__(self, plan: list[tuple[str, int | None, str]], embedded: bool, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, E, padding_idx=2) if embedded else None
        self.blocks = nn.ModuleList()
        self.order: list[tuple[int, str]] = []
        for seed, (kind, again, mode) in enumerate(plan):
            if again is not None and self.blocks:
                self.order.append((again % len(self.blocks), mode))
            else:
                self.blocks.append(Block(kind, seed))
                self.order.append((len(self.blocks) - 1, mode))
        self.head = nn.Linear(E, 7, bias=False)
        if tied and self.table is not None:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.table is None else self.table(x)
        for index, mode in self.order:
            step = self.blocks[index]
            if mode == "plain" or not h.requires_grad:
                h = h + torch.tanh(step(h))
            else:
                h = h + torch.tanh(checkpoint(step, h, use_reentrant=mode == "reentrant"))
        return self.head(h)  # type: ignore[no-any-return]


BLOCKS = st.tuples(
    st.sampled_from(KINDS),
    st.none() | st.integers(0, 5),
    st.sampled_from(["plain", "plain", "saved", "reentrant"]),
)


@hypothesis.settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(
    plan=st.lists(BLOCKS, min_size=1, max_size=5),
    embedded=st.booleans(),
    tied=st.booleans(),
    batch=st.integers(1, 5),
    time=st.integers(1, 6),
    reduction=st.sampled_from(["sum", "mean"]),
    clipping=st.sampled_from(["flat", "per_layer", "automatic"]),
    passes=st.integers(1, 2),
)
def test_random_stacks(
    plan: list[tuple[str, int | None, str]],
    embedded: bool,
    tied: bool,
    batch: int,
    time: int,
    reduction: str,
    clipping: str,
    passes: int,
) -> None:
    module = make(lambda: Stack(plan, embedded, tied))
    x = tokens(batch, time, high=7) if embedded else draw(batch, time, E)
    check(module, (x,), reduction=reduction, clipping=clipping, passes=passes)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "patches": (Patches, draw(B, 3, 4, 4)),
    "gpt": (
        lambda: Stack(
            [("layer-norm", None, "plain"), ("transposed", None, "saved")] * 2, True, True
        ),
        tokens(B, T, high=7),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_models(case: tuple[Callable[[], nn.Module], Tensor], dtype: torch.dtype) -> None:
    build, x = case
    check(make(build), (x,), dtype=dtype)
