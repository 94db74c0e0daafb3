"""Every operation with a private parameter, against the loop over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern.engine import layers  # noqa: F401  (registers the rules)
from tests.engine.engine_oracle import Op, check, draw, make, tokens

B = 3
Build = Callable[[], nn.Module]
Case = tuple[Build, tuple[Tensor, ...]]
DTYPES = [torch.float64, torch.float32]


def op(function: Callable[..., Any], *inputs: Tensor, **shapes: tuple[int, ...]) -> Case:
    return lambda: Op(function, **shapes), inputs


def seq(*modules: Callable[[], nn.Module]) -> Build:
    return lambda: nn.Sequential(*(module() for module in modules))


LINEAR: dict[str, Case] = {
    "2d": (lambda: nn.Linear(5, 4), (draw(B, 5),)),
    "3d": (lambda: nn.Linear(5, 4), (draw(B, 6, 5),)),
    "4d": (lambda: nn.Linear(5, 4), (draw(B, 2, 3, 5),)),
    "no-bias": (lambda: nn.Linear(5, 4, bias=False), (draw(B, 6, 5),)),
    "bias-alone": op(
        lambda m, x: F.linear(x, torch.ones_like(x[0, 0])[None], m.b), draw(B, 6, 5), b=(1,)
    ),
    "strided": (lambda: nn.Linear(5, 4), (draw(B, 6, 10)[..., ::2],)),
    "transposed": (lambda: nn.Linear(5, 4), (draw(B, 5, 6).transpose(1, 2),)),
    "batch-strided": (lambda: nn.Linear(5, 4), (draw(2 * B, 6, 5)[::2],)),
    "expanded": (lambda: nn.Linear(5, 4), (draw(B, 1, 5).expand(-1, 6, -1),)),
    "folded": op(
        lambda m, x: F.linear(x.flatten(0, 1), m.w, m.b).view(len(x), -1),
        draw(B, 6, 5),
        w=(4, 5),
        b=(4,),
    ),
    "matmul": op(lambda m, x: x @ m.w, draw(B, 6, 5), w=(5, 4)),
    "matmul-square": op(lambda m, x: x @ m.w, draw(B, 6, 5), w=(5, 5)),
    "linear-square-transposed": op(lambda m, x: F.linear(x, m.w.t()), draw(B, 5), w=(5, 5)),
    "matmul-t": op(lambda m, x: x @ m.w.t(), draw(B, 6, 5), w=(4, 5)),
    "matmul-T": op(lambda m, x: torch.matmul(x, m.w.T), draw(B, 5), w=(4, 5)),
    "matmul-mT": op(lambda m, x: x.matmul(m.w.mT), draw(B, 5), w=(5, 5)),
    "matmul-transpose": op(lambda m, x: x @ m.w.transpose(0, 1), draw(B, 5), w=(4, 5)),
    "matmul-column": op(lambda m, x: x @ m.w, draw(B, 6, 5), w=(5, 1)),
    "matmul-row": op(lambda m, x: x @ m.w, draw(B, 6, 1), w=(1, 5)),
    "matmul-vector": op(lambda m, x: x @ m.w, draw(B, 6, 5), w=(5,)),
    "mv": op(lambda m, x: torch.mv(x, m.w), draw(B, 5), w=(5,)),
    "mm": op(lambda m, x: torch.mm(x, m.w), draw(B, 5), w=(5, 4)),
    "left": op(lambda m, x: m.w @ x, draw(B, 5, 6), w=(4, 5)),
    "left-4d": op(lambda m, x: m.w @ x, draw(B, 2, 5, 6), w=(4, 5)),
    "left-vector": op(lambda m, x: m.w @ x, draw(B, 5, 6), w=(5,)),
    "matmul-batched": op(lambda m, x: x @ m.w, draw(B, 2, 6, 5), w=(2, 5, 4)),
    "bmm": op(lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)), draw(B, 6, 5), w=(1, 5, 4)),
    "addmm": op(lambda m, x: torch.addmm(m.b, x, m.w), draw(B, 5), w=(5, 4), b=(4,)),
    "addmm-folded": op(
        lambda m, x: torch.addmm(m.b, x.view(-1, 5), m.w).view(len(x), 6, 4),
        draw(B, 6, 5),
        w=(5, 4),
        b=(4,),
    ),
    "addmm-scaled": op(
        lambda m, x: torch.addmm(m.b, x, m.w, beta=2, alpha=3), draw(B, 5), w=(5, 4), b=(4,)
    ),
    "bilinear": (lambda: nn.Bilinear(5, 4, 3), (draw(B, 5), draw(B, 4, seed=2))),
    "bilinear-positions": (
        lambda: nn.Bilinear(5, 4, 3, bias=False),
        (draw(B, 2, 5), draw(B, 2, 4, seed=2)),
    ),
}


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


# Nothing to multiply: positions, inputs or outputs that are none.
LINEAR["no-positions"] = op(
    lambda m, x: F.linear(x[:, :0], m.w, m.b).sum(1) + F.linear(x, m.v).sum(1),
    draw(B, 3, 5),
    w=(4, 5),
    b=(4,),
    v=(4, 5),
)
LINEAR["no-prompt"] = op(
    lambda m, x: F.linear(torch.cat([m.w.expand(len(x), -1, -1), x], 1), m.v),
    draw(B, 3, 5),
    w=(1, 0, 5),
    v=(4, 5),
)
LINEAR["no-inputs"] = op(
    lambda m, x: F.linear(x[:, :0], m.w, m.b) * F.linear(x, m.v),
    draw(B, 5),
    w=(4, 0),
    b=(4,),
    v=(4, 5),
)
LINEAR["no-outputs"] = op(
    lambda m, x: torch.cat([F.linear(x, m.w, m.b), F.linear(x, m.v)], 1),
    draw(B, 5),
    w=(0, 5),
    b=(0,),
    v=(4, 5),
)
LINEAR["weight-frozen"] = (lambda: frozen(nn.Linear(5, 4), "weight"), (draw(B, 6, 5),))
LINEAR["bias-frozen"] = (lambda: frozen(nn.Linear(5, 4), "bias"), (draw(B, 6, 5),))


def conv(dims: int, *args: Any, size: int = 7, ci: int = 4, **options: Any) -> Case:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    sizes = (size, size - 1, size - 2)[:dims]
    return lambda: kind(ci, *args, **options), (draw(B, ci, *sizes),)


def upwards(dims: int, *args: Any, **options: Any) -> Case:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    return lambda: kind(4, *args, **options), (draw(B, 4, *(4, 3, 2)[:dims]),)


CONV: dict[str, Case] = {
    **{f"{d}d": conv(d, 6, 3) for d in (1, 2, 3)},
    **{f"{d}d-stride": conv(d, 6, 3, stride=2, padding=1) for d in (1, 2, 3)},
    **{f"{d}d-dilated": conv(d, 6, 2, dilation=2, padding=2) for d in (1, 2, 3)},
    **{f"{d}d-groups": conv(d, 6, 3, groups=2) for d in (1, 2, 3)},
    **{f"{d}d-depthwise": conv(d, 8, 3, groups=4, padding=1) for d in (1, 2, 3)},
    **{f"{d}d-same": conv(d, 6, 2, padding="same", dilation=3) for d in (1, 2, 3)},
    **{f"{d}d-transposed": upwards(d, 6, 3) for d in (1, 2, 3)},
    **{
        f"{d}d-transposed-all": upwards(
            d, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2
        )
        for d in (1, 2, 3)
    },
    # More output positions than a stride, and padding that takes some of them away again.
    **{
        f"{d}d-transposed-beyond-{stride}-{padding}": upwards(
            d,
            6,
            3,
            stride=stride,
            padding=padding,
            dilation=stride + 1,
            output_padding=stride,
            groups=2,
        )
        for d in (1, 2, 3)
        for stride, padding in ((1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3))
    },
    **{
        f"2d-{mode}": conv(2, 6, 3, padding=(2, 1), padding_mode=mode)
        for mode in ("circular", "reflect", "replicate")
    },
    "1d-circular-same": conv(1, 6, 3, padding="same", padding_mode="circular"),
    "2d-valid": conv(2, 6, 3, padding="valid"),
    "2d-same-odd": conv(2, 6, (3, 4), padding="same"),
    "2d-uneven": conv(2, 6, (2, 3), stride=(3, 1), padding=(0, 2), dilation=(1, 2)),
    "2d-no-bias": conv(2, 6, 3, bias=False),
    "2d-pointwise": conv(2, 6, 1),
    "2d-whole": conv(2, 6, (7, 6)),
    "2d-unread": conv(2, 6, 2, stride=4),
    "2d-channels-last": (
        lambda: nn.Conv2d(4, 6, 3),
        (draw(B, 4, 6, 5).to(memory_format=torch.channels_last),),
    ),
    "2d-channels-last-model": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        (draw(B, 4, 6, 5).to(memory_format=torch.channels_last),),
    ),
    "3d-channels-last-model": (
        lambda: nn.Conv3d(4, 6, 2).to(memory_format=torch.channels_last_3d),
        (draw(B, 4, 4, 3, 3),),
    ),
    "2d-folded-frames": op(
        lambda m, x: F.conv2d(x.flatten(0, 1), m.w, m.b).unflatten(0, (len(x), -1)),
        draw(B, 2, 4, 5, 5),
        w=(6, 4, 3, 3),
        b=(6,),
    ),
    "1d-transposed-folded": op(
        lambda m, x: F.conv_transpose1d(x.flatten(0, 1), m.w, stride=2).unflatten(0, (len(x), -1)),
        draw(B, 2, 4, 5),
        w=(4, 6, 3),
    ),
    "2d-functional": op(
        lambda m, x: F.conv2d(x, m.w, stride=[2], padding=[1, 0], groups=2),
        draw(B, 4, 6, 5),
        w=(6, 2, 3, 3),
    ),
    "2d-bias-alone": op(
        lambda m, x: F.conv2d(x, torch.ones(6, 4, 3, 3, dtype=x.dtype), m.b),
        draw(B, 4, 6, 5),
        b=(6,),
    ),
}

REPEATED = torch.tensor([[1, 1, 4, 1, 10], [2, 3, 4, 5, 6], [7, 7, 7, 7, 7]])
OFFSETS = torch.tensor([0, 4, 4])


def positions(shape: tuple[int, ...]) -> Callable[..., Tensor]:
    """Token and position embeddings; position ids of this shape are shared by all samples."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1]).view(shape)
        return F.embedding(x, m.w) + F.embedding(ids, m.p)

    return forward


def bag(**options: Any) -> Build:
    return lambda: nn.EmbeddingBag(11, 4, **options)


EMBEDDING: dict[str, Case] = {
    "1d": (lambda: nn.Embedding(11, 4), (torch.tensor([4, 4, 0]),)),
    "2d": (lambda: nn.Embedding(11, 4), (tokens(B, 5),)),
    "3d": (lambda: nn.Embedding(11, 4), (tokens(B, 2, 5),)),
    "repeated": (lambda: nn.Embedding(11, 4), (REPEATED,)),
    "int32": (lambda: nn.Embedding(11, 4), (REPEATED.int(),)),
    "strided": (lambda: nn.Embedding(11, 4), (tokens(5, B).t(),)),
    "choices-folded": op(
        lambda m, x: F.embedding(x.flatten(0, 1), m.w).view(len(x), -1), tokens(B, 2, 5), w=(11, 4)
    ),
    "padding": (lambda: nn.Embedding(11, 4, padding_idx=1), (REPEATED,)),
    "padding-negative": (lambda: nn.Embedding(11, 4, padding_idx=-1), (REPEATED,)),
    "padding-only": (lambda: nn.Embedding(11, 4, padding_idx=7), (REPEATED,)),
    "positions": op(positions((-1,)), tokens(B, 5), w=(11, 4), p=(6, 4)),
    "positions-row": op(positions((1, -1)), tokens(B, 5), w=(11, 4), p=(6, 4)),
    "positions-as-many-as-samples": op(positions((-1,)), tokens(B, B), w=(11, 4), p=(6, 4)),
    "positions-row-as-many": op(positions((1, -1)), tokens(B, B), w=(11, 4), p=(6, 4)),
    "positions-per-sample": op(
        lambda m, x: F.embedding(torch.arange(x.shape[1]).expand_as(x), m.p), tokens(B, 5), p=(6, 4)
    ),
    "positions-concatenated": op(
        lambda m, x: torch.cat([x, F.embedding(torch.arange(5), m.p).expand(len(x), -1, -1)], 2),
        draw(B, 5, 2),
        p=(6, 4),
    ),
    "positions-padding": op(
        lambda m, x: x + F.embedding(torch.arange(5), m.p, padding_idx=2), draw(B, 5, 4), p=(6, 4)
    ),
    "indexed": op(lambda m, x: m.w[x], tokens(B, 5), w=(11, 4)),
    "index-select": op(lambda m, x: m.w.index_select(0, x), torch.tensor([4, 4, 0]), w=(11, 4)),
    "one-hot": op(lambda m, x: F.one_hot(x, 11).to(m.w.dtype) @ m.w, tokens(B, 5), w=(11, 4)),
    "rows-of-a-table": op(lambda m, x: F.embedding(x, m.w[2:13]), tokens(B, 5), w=(15, 4)),
    **{f"bag-{mode}": (bag(mode=mode), (REPEATED,)) for mode in ("sum", "mean", "max")},
    **{
        f"bag-padding-{mode}": (bag(mode=mode, padding_idx=4), (REPEATED,))
        for mode in ("sum", "mean", "max")
    },
    "bag-padding-only": (bag(mode="mean", padding_idx=-4), (REPEATED,)),
    "bag-weights": op(
        lambda m, x, s: F.embedding_bag(x, m.w, mode="sum", per_sample_weights=s),
        REPEATED,
        draw(B, 5),
        w=(11, 4),
    ),
}

NORM: dict[str, Case] = {
    **{
        f"layer-{name}": (lambda a=affine, s=size: nn.LayerNorm(s, **a), (draw(B, *shape),))
        for name, affine, size, shape in (
            ("2d", {}, 6, (6,)),
            ("3d", {}, 6, (4, 6)),
            ("4d", {}, (4, 6), (2, 4, 6)),
            ("5d", {}, (3, 4), (2, 2, 3, 4)),
            ("all-dims", {}, (4, 6), (4, 6)),
            ("no-bias", {"bias": False}, 6, (4, 6)),
        )
    },
    "rms-2d": (lambda: nn.RMSNorm(6), (draw(B, 6),)),
    "rms-eps": (lambda: nn.RMSNorm((4, 6), eps=0.1), (draw(B, 2, 4, 6),)),
    "group-2d": (lambda: nn.GroupNorm(2, 6), (draw(B, 6),)),
    "group-3d": (lambda: nn.GroupNorm(3, 6), (draw(B, 6, 4),)),
    "group-4d": (lambda: nn.GroupNorm(1, 6), (draw(B, 6, 2, 4),)),
    "group-channels-last": (
        lambda: nn.GroupNorm(2, 6),
        (draw(B, 6, 3, 4).to(memory_format=torch.channels_last),),
    ),
    "group-5d": (lambda: nn.GroupNorm(6, 6), (draw(B, 6, 2, 2, 3),)),
    "instance-1d": (lambda: nn.InstanceNorm1d(6, affine=True), (draw(B, 6, 4),)),
    "instance-2d": (lambda: nn.InstanceNorm2d(6, affine=True), (draw(B, 6, 2, 4),)),
    "instance-3d": (lambda: nn.InstanceNorm3d(6, affine=True), (draw(B, 6, 2, 2, 3),)),
    "layer-functional": op(
        lambda m, x: F.layer_norm(x, [6], m.w, torch.ones_like(x[0, 0])), draw(B, 4, 6), w=(6,)
    ),
    "layer-shift-alone": op(lambda m, x: F.layer_norm(x, [6], bias=m.b), draw(B, 4, 6), b=(6,)),
    "layer-folded": op(
        lambda m, x: F.layer_norm(x.flatten(0, 1), [6], m.w, m.b).view(len(x), -1),
        draw(B, 4, 6),
        w=(6,),
        b=(6,),
    ),
    "rms-one-plus-weight": op(lambda m, x: F.rms_norm(x, [6]) * (1 + m.w), draw(B, 4, 6), w=(6,)),
}


FAMILIES = {"linear": LINEAR, "conv": CONV, "embedding": EMBEDDING, "norm": NORM}
CASES = {
    f"{family}-{name}": case for family, cases in FAMILIES.items() for name, case in cases.items()
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_norms_and_sums(case: Case, dtype: torch.dtype) -> None:
    build, inputs = case
    check(make(build), inputs, dtype=dtype)
