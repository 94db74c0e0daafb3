"""Elementwise, generic and computed uses of private parameters, against the loop over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern.base.errors import UnsupportedModule
from dpkern.engine import layers  # noqa: F401  (registers the rules)
from tests.engine.engine_oracle import Op, check, draw, make

B = 3
Build = Callable[[], nn.Module]
Case = tuple[Build, tuple[Tensor, ...]]
DTYPES = [torch.float64, torch.float32]


def op(function: Callable[..., Any], *inputs: Tensor, **shapes: tuple[int, ...]) -> Case:
    return lambda: Op(function, **shapes), inputs


def seq(*modules: Callable[[], nn.Module]) -> Build:
    return lambda: nn.Sequential(*(module() for module in modules))


def elementwise(function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> Case:
    """``function(h, w)`` of a trained layer's output ``h [B, 4, 6]``."""
    return op(lambda m, x: function(F.linear(x, m.v), m.w), draw(B, 4, 5), v=(6, 5), w=shape)


def in_place(h: Tensor, w: Tensor) -> Tensor:
    h = h * 1
    h += w
    return h.mul_(w)


def relative(length: int) -> Tensor:
    """Difference of column and row, from 0."""
    places = torch.arange(length)
    return places[None] - places[:, None] + length - 1


ELEMENTWISE: dict[str, Case] = {
    "scale": elementwise(lambda h, w: h * w, 6),
    "scale-left": elementwise(lambda h, w: w * h, 6),
    "shift": elementwise(lambda h, w: h + w, 6),
    "shift-left": elementwise(lambda h, w: w + h, 6),
    "shift-positions": elementwise(lambda h, w: h + w, 4, 6),
    "shift-positions-row": elementwise(lambda h, w: h + w, 1, 4, 6),
    "shift-per-position": elementwise(lambda h, w: h + w, 4, 1),
    "sub": elementwise(lambda h, w: h - w, 6),
    "sub-left": elementwise(lambda h, w: w - h, 6),
    "sub-alpha": elementwise(lambda h, w: torch.sub(h, w, alpha=3), 6),
    "add-alpha": elementwise(lambda h, w: h.add(w, alpha=3), 1, 6),
    "rsub": elementwise(lambda h, w: torch.rsub(h, w), 6),
    "div": elementwise(lambda h, w: h / w, 6),
    "div-left": elementwise(lambda h, w: w / (h + 9), 6),
    "pow": elementwise(lambda h, w: (h.square() + 1) ** w, 6),
    "pow-left": elementwise(lambda h, w: (w * w + 1).pow(h), 6),
    "pow-numbers": elementwise(lambda h, w: h * w**2 + 2**w, 6),
    "scalar": elementwise(lambda h, w: h * w),
    "scalar-exp": elementwise(lambda h, w: w.exp() * h),
    "one-number": elementwise(lambda h, w: h * w + w, 1),
    "maximum": elementwise(lambda h, w: torch.maximum(h, w), 6),
    "in-place": elementwise(in_place, 6),
    "broadcast-data": elementwise(lambda h, w: h[:, :, :1] * w, 6),
    "broadcast-data-positions": elementwise(lambda h, w: h[:, :1] * w, 4, 6),
    "per-channel": elementwise(lambda h, w: h * w[:, None], 4),
    "per-channel-view": elementwise(lambda h, w: h * w.view(1, -1, 1), 4),
    "class-token-expand": elementwise(
        lambda h, w: torch.cat([w.expand(len(h), -1, -1), h], 1), 1, 1, 6
    ),
    "class-token-expand-flat": elementwise(
        lambda h, w: torch.cat([w.expand(len(h), 1, 6), h], 1), 6
    ),
    "class-token-repeat": elementwise(
        lambda h, w: torch.cat([w.repeat(len(h), 1, 1), h], 1), 1, 2, 6
    ),
    "class-token-tile": elementwise(
        lambda h, w: torch.cat([torch.tile(w, (len(h), 2, 1)), h], 1), 1, 1, 6
    ),
    "class-token-repeat-flat": elementwise(
        lambda h, w: torch.cat([w.repeat(len(h), 2, 1), h], 1), 6
    ),
    "class-token-broadcast": elementwise(
        lambda h, w: torch.cat([torch.broadcast_to(w, (len(h), 1, 6)), h], 1), 1, 1, 6
    ),
    "class-token-unsqueezed": elementwise(
        lambda h, w: torch.cat([w[None, None].expand(len(h), 1, 6), h], 1), 6
    ),
    "mask-token": elementwise(lambda h, w: torch.where(h[..., :1] > 0, h, w), 6),
    "expand-as": elementwise(lambda h, w: h * w.expand_as(h), 6),
    "data-expanded-as": elementwise(
        lambda h, w: h[:, :1, :1].expand_as(w.expand(len(h), 4, 6)) * w, 4, 6
    ),
    "raw-input": op(lambda m, x: x * m.w + m.b, draw(B, 6), w=(6,), b=(1, 6)),
    "raw-folded": op(lambda m, x: (x.flatten(0, 1) * m.w).view(len(x), -1), draw(B, 4, 6), w=(6,)),
    "raw-positions": op(lambda m, x: x + m.p, draw(B, 4, 6), p=(4, 6)),
    "raw-row": op(lambda m, x: x + m.p, draw(B, 4, 6), p=(1, 4, 6)),
    "prelu": (lambda: nn.PReLU(), (draw(B, 4, 6),)),
    "prelu-channels": (seq(lambda: nn.Linear(6, 6), lambda: nn.PReLU(4)), (draw(B, 4, 6),)),
}

GENERIC: dict[str, Case] = {
    "einsum": op(lambda m, x: torch.einsum("bti,io->bto", x, m.w), draw(B, 4, 5), w=(5, 6)),
    "einsum-two": op(
        lambda m, x: torch.einsum("bi,io,oj->bj", x, m.w, m.v), draw(B, 5), w=(5, 4), v=(4, 3)
    ),
    "einsum-after": op(
        lambda m, x: torch.einsum("bti,hio->bhto", F.linear(x, m.v), m.w),
        draw(B, 4, 5),
        w=(2, 6, 3),
        v=(6, 5),
    ),
    "lerp": op(lambda m, x: torch.lerp(x, m.w, 0.3), draw(B, 5), w=(1, 5)),
    "tensordot": op(lambda m, x: torch.tensordot(x, m.w, dims=([1], [0])), draw(B, 5), w=(5, 4)),
    "grouped-linear": op(
        lambda m, x: torch.baddbmm(m.b, x, m.w.expand(len(x), 5, 4)),
        draw(B, 2, 5),
        w=(1, 5, 4),
        b=(1, 2, 4),
    ),
    "cosine": op(lambda m, x: F.cosine_similarity(x, m.w, dim=-1), draw(B, 4, 5), w=(5,)),
    "addcmul": op(lambda m, x: torch.addcmul(x, x, m.w), draw(B, 5), w=(1, 5)),
}


def casted(m: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x.double(), m.w.to(torch.float64), m.b.double()).to(x.dtype)


EXPRESSION: dict[str, Case] = {
    "lora": op(
        lambda m, x: F.linear(x, m.w + m.b @ m.a), draw(B, 4, 5), w=(6, 5), b=(6, 2), a=(2, 5)
    ),
    "scaled": op(lambda m, x: F.linear(x, 0.3 * m.w, m.b.exp()), draw(B, 5), w=(6, 5), b=(6,)),
    "rows": op(lambda m, x: F.linear(x, m.w[:3], m.b[:3]), draw(B, 4, 5), w=(6, 5), b=(6,)),
    "one-row": op(lambda m, x: x * m.w[2], draw(B, 4, 5), w=(6, 5)),
    "columns": op(lambda m, x: F.linear(x, m.w[:, 1:4]), draw(B, 4, 3), w=(6, 5)),
    "rows-overlapping": op(
        lambda m, x: F.linear(x, m.w[:4]) + F.linear(x, m.w[2:]), draw(B, 4, 5), w=(6, 5)
    ),
    "rows-disjoint": op(
        lambda m, x: F.linear(x, m.w[:3]) + F.linear(x, m.w[3:]), draw(B, 4, 5), w=(6, 5)
    ),
    "rows-twice": op(
        lambda m, x: F.linear(x, m.w[:3]) + F.linear(x * 2, m.w[:3]), draw(B, 4, 5), w=(6, 5)
    ),
    "rows-and-whole": op(
        lambda m, x: F.linear(x, m.w[:5])[..., :5] @ m.w.t(), draw(B, 4, 5), w=(6, 5)
    ),
    "chunk": op(
        lambda m, x: F.linear(x, m.w.chunk(3)[0]) * F.linear(x, m.w.chunk(3)[2]),
        draw(B, 4, 5),
        w=(6, 5),
    ),
    "chunk-columns": op(lambda m, x: F.linear(x, m.w.chunk(2, 1)[1]), draw(B, 4, 3), w=(6, 6)),
    "split": op(
        lambda m, x: sum(F.linear(x, w) for w in m.w.split([2, 2, 2])), draw(B, 4, 5), w=(6, 5)
    ),
    "unbind": op(lambda m, x: sum(x * w for w in m.w), draw(B, 4, 5), w=(6, 5)),
    "stack": op(lambda m, x: F.linear(x, torch.stack([m.a, m.b])), draw(B, 4, 5), a=(5,), b=(5,)),
    "cat": op(lambda m, x: F.linear(x, torch.cat([m.a, m.b])), draw(B, 4, 5), a=(2, 5), b=(3, 5)),
    "view": op(lambda m, x: F.linear(x, m.w.view(6, 5)), draw(B, 4, 5), w=(30,)),
    "view-conv": op(lambda m, x: F.conv1d(x, m.w.view(6, 5, 1)), draw(B, 5, 4), w=(6, 5)),
    "reshape-transposed": op(
        lambda m, x: F.linear(x, m.w.t().reshape(6, 5)), draw(B, 4, 5), w=(6, 5)
    ),
    "permute": op(lambda m, x: F.conv1d(x, m.w.permute(2, 1, 0)), draw(B, 5, 4), w=(3, 5, 6)),
    "rows-transposed": op(lambda m, x: x @ m.w[:3].t(), draw(B, 4, 5), w=(6, 5)),
    "squeeze": op(lambda m, x: x @ m.w.squeeze(), draw(B, 4, 5), w=(5, 1)),
    "normalised": op(
        lambda m, x: F.linear(F.normalize(x, dim=-1), F.normalize(m.w)), draw(B, 5), w=(6, 5)
    ),
    "softmax": op(lambda m, x: x * m.w.softmax(0), draw(B, 4, 5), w=(5,)),
    "standardised-conv": op(
        lambda m, x: F.conv1d(
            x, (m.w - m.w.mean((1, 2), keepdim=True)) / m.w.std((1, 2), keepdim=True)
        ),
        draw(B, 4, 5),
        w=(6, 4, 3),
    ),
    "masked": op(
        lambda m, x: F.linear(x, m.w * torch.ones_like(m.w).tril()), draw(B, 4, 5), w=(B, 5)
    ),
    "type-as": op(lambda m, x: F.linear(x, m.w.type_as(x)), draw(B, 4, 5), w=(6, 5)),
    "to-data": op(lambda m, x: x @ m.w.to(x), draw(B, 4, 5), w=(5, 6)),
    "cast": op(casted, draw(B, 4, 5), w=(6, 5), b=(6,)),
    "contiguous": op(lambda m, x: F.linear(x, m.w.t().contiguous()), draw(B, 4, 5), w=(5, 6)),
    "queries": op(
        lambda m, x: torch.softmax(F.linear(m.q, m.w).expand(len(x), -1, -1) @ x.mT, -1) @ x,
        draw(B, 4, 5),
        q=(1, 2, 5),
        w=(5, 5),
    ),
    "relative-bias": op(
        lambda m, x: (x @ x.mT + m.w[torch.arange(16).view(4, 4) % 7]).softmax(-1) @ x,
        draw(B, 4, 5),
        w=(7,),
    ),
    "relative-bias-heads": op(
        lambda m, x: (
            x[:, None] @ x[:, None].mT
            + F.embedding(torch.arange(16).view(4, 4) % 7, m.w).permute(2, 0, 1).unsqueeze(0)
        ),
        draw(B, 4, 5),
        w=(7, 2),
    ),
    "relative-bias-as-many-as-samples": op(
        lambda m, x: (x @ x.mT + m.w[relative(B)]).softmax(-1) @ x, draw(B, B, 5), w=(2 * B - 1,)
    ),
    "relative-bias-heads-as-many-as-samples": op(
        lambda m, x: (
            x[:, None] @ x[:, None].mT + F.embedding(relative(B), m.w).permute(2, 0, 1)[None]
        ),
        draw(B, B, 5),
        w=(2 * B - 1, 2),
    ),
    "parameter-list": (
        lambda: Listed(),
        (draw(B, 4, 5),),
    ),
    "buffer-as-many-as-samples": (lambda: Buffered(B), (draw(B, B, 5),)),
    "buffer-in-a-network": (lambda: Positioned(B), (draw(B, B, 5),)),
    "weight-norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)),
        (draw(B, 4, 5),),
    ),
    "weight-norm-conv": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3)),
        (draw(B, 4, 5),),
    ),
    "orthogonal": (
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 5), "weight", "householder"),
        (draw(B, 4, 5),),
    ),
}


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(5, 5) / 2 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


class Buffered(nn.Module):
    """Buffers whose first dimension is as long as the batch."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.row = nn.Parameter(torch.randn(5))
        self.table = nn.Parameter(torch.randn(7, 5))
        self.register_buffer("wave", torch.randn(length, 5))
        self.register_buffer("ids", torch.tensor([[6, 2, 2], [0, 1, 2], [3, 3, 3]])[:, :length])

    def forward(self, x: Tensor) -> Tensor:
        bias = F.embedding(self.ids, self.table).mean(-1)
        return (x @ x.mT + bias) @ (x + self.scale * self.wave + self.row * self.wave[:3])


class Positioned(nn.Module):
    """A bias of positions computed by a small network from a buffer."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, length))
        self.register_buffer("places", torch.randn(length, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT + self.net(self.places)).softmax(-1) @ x


FAMILIES = {"elementwise": ELEMENTWISE, "generic": GENERIC, "expression": EXPRESSION}
CASES = {
    f"{family}-{name}": case for family, cases in FAMILIES.items() for name, case in cases.items()
}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_norms_and_sums(case: Case, dtype: torch.dtype) -> None:
    build, inputs = case
    check(make(build), inputs, dtype=dtype)


def test_samples_whose_own_ids_follow_a_difference_are_refused() -> None:
    """They are taken for positions, of which each sample had a part: nothing is summed wrongly."""
    module = make(lambda: Op(lambda m, x: F.embedding((x * 1).long(), m.w).sum(2), w=(2 * B, 3)))
    with pytest.raises(UnsupportedModule, match="every sample has its own part"):
        check(module, (relative(B).double(),), dtype=torch.float64)
