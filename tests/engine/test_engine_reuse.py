"""Parameters used several times, checkpoints, in-place activations, copies and memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dpkern.engine import layers  # noqa: F401  (registers the rules)
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums
from dpkern.engine.parameter import PrivateParameter
from tests.engine.engine_oracle import (
    Language,
    Op,
    check,
    draw,
    make,
    mlp,
    plan_for,
    tokens,
    total,
)

B = 4


SHARED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "head": (Language, tokens(B, 7)),
    "head-padding": (lambda: Language(padding_idx=3), tokens(B, 7)),
    "head-square": (
        lambda: Op(lambda m, x: torch.tanh(F.embedding(x, m.w)) @ m.w.t(), w=(11, 11)),
        tokens(B, 7),
    ),
    "head-and-other-use": (
        lambda: Op(
            lambda m, x: F.linear(F.embedding(x, m.w, padding_idx=2).tanh(), m.w) * m.w[:, 0],
            w=(11, 6),
        ),
        tokens(B, 7),
    ),
    "two-tables-of-one": (
        lambda: Op(
            lambda m, x: F.embedding(x, m.w) * F.embedding(10 - x, m.w, padding_idx=0), w=(11, 6)
        ),
        tokens(B, 7),
    ),
    "called-twice": (
        lambda: Op(lambda m, x: F.linear(F.linear(x, m.w, m.b).tanh(), m.w, m.b), w=(5, 5), b=(5,)),
        draw(B, 6, 5),
    ),
    "other-lengths": (
        lambda: Op(lambda m, x: F.linear(x, m.w) + F.linear(x[:, :1], m.w), w=(5, 5)),
        draw(B, 6, 5),
    ),
    "both-ways": (lambda: Op(lambda m, x: (x @ m.w).tanh() @ m.w.t(), w=(5, 5)), draw(B, 6, 5)),
    "conv-and-linear": (
        lambda: Op(
            lambda m, x: (
                F.conv1d(x, m.w).flatten(1)[:, :6] + F.linear(x[..., :3].flatten(1), m.w.flatten(1))
            ),
            w=(6, 2, 3),
        ),
        draw(B, 2, 5),
    ),
    "conv-twice": (
        lambda: Op(lambda m, x: F.conv1d(F.conv1d(x, m.w).tanh(), m.w, dilation=2), w=(2, 2, 3)),
        draw(B, 2, 9),
    ),
    "conv-up-and-down": (
        lambda: Op(lambda m, x: F.conv_transpose1d(F.conv1d(x, m.w).tanh(), m.w), w=(3, 2, 3)),
        draw(B, 2, 9),
    ),
    "norm-twice": (
        lambda: Op(lambda m, x: F.layer_norm(F.layer_norm(x, [5], m.w) * m.w, [5], m.w), w=(5,)),
        draw(B, 6, 5),
    ),
    "scalar-everywhere": (lambda: Op(lambda m, x: (x * m.t + m.t).tanh() * m.t, t=()), draw(B, 6)),
    "weight-and-expression": (
        lambda: Op(lambda m, x: F.linear(x, m.w).tanh() @ (m.w * 0.5 + m.w.exp()), w=(5, 5)),
        draw(B, 6, 5),
    ),
    "weight-as-bias": (lambda: Op(lambda m, x: F.linear(x, m.w, m.w[2]), w=(5, 5)), draw(B, 6, 5)),
    "generic-and-rule": (
        lambda: Op(lambda m, x: torch.einsum("bi,io->bo", x, m.w).tanh() @ m.w, w=(5, 5)),
        draw(B, 5),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED)
def test_parameters_used_several_times(
    case: tuple[Callable[[], nn.Module], Tensor], dtype: torch.dtype
) -> None:
    build, x = case
    check(make(build), (x,), dtype=dtype)


class Checkpointed(nn.Module):
    """Blocks under checkpoints, one nested in another, with one layer shared by all."""

    def __init__(self, reentrant: bool, *, outside: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.shared = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.reentrant = reentrant
        self.outside = outside

    def again(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        return checkpoint(function, *args, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def block(self, x: Tensor) -> Tensor:
        x = self.again(lambda h: torch.tanh(self.blocks[0](h)), x)
        return self.norm(self.shared(torch.tanh(self.blocks[1](x))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x) if self.outside else x.detach().requires_grad_()
        x = self.again(self.block, x)
        x = self.again(self.block, x)
        return self.blocks[2](x) if self.outside else self.again(self.blocks[2], x)


@pytest.mark.parametrize("outside", [True, False], ids=["some-outside", "all-inside"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensors", "reentrant"])
@pytest.mark.parametrize("passes", [1, 2])
def test_checkpoints(reentrant: bool, outside: bool, passes: int) -> None:
    module = make(lambda: Checkpointed(reentrant, outside=outside))
    check(module, (draw(B, 6, 5),), passes=passes)


IN_PLACE: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear-rows": (lambda: nn.Linear(5, 6), draw(B, 5)),
    "linear-positions": (lambda: nn.Linear(5, 6), draw(B, 6, 5)),
    "linear-positions-no-bias": (lambda: nn.Linear(5, 6, bias=False), draw(B, 2, 3, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), draw(B, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), draw(B, 4, 5, 5)),
    "conv-transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3), draw(B, 4, 7)),
    "embedding": (lambda: nn.Embedding(11, 6), tokens(B, 7)),
    "layer-norm": (lambda: nn.LayerNorm(5), draw(B, 6, 5)),
    "rms-norm": (lambda: nn.RMSNorm(5), draw(B, 6, 5)),
    "group-norm": (lambda: nn.GroupNorm(2, 6), draw(B, 6, 5)),
    "scale": (lambda: Op(lambda m, x: x * m.w, w=(5,)), draw(B, 6, 5)),
    "matmul": (lambda: Op(lambda m, x: x @ m.w, w=(5, 5)), draw(B, 6, 5)),
    "matmul-left": (lambda: Op(lambda m, x: m.w @ x, w=(5, 6)), draw(B, 6, 5)),
    "einsum": (lambda: Op(lambda m, x: torch.einsum("bi,io->bo", x, m.w), w=(5, 5)), draw(B, 5)),
}


@pytest.mark.parametrize("case", IN_PLACE.values(), ids=IN_PLACE)
def test_activations_in_place(case: tuple[Callable[[], nn.Module], Tensor]) -> None:
    build, x = case
    check(make(lambda: nn.Sequential(build(), nn.LeakyReLU(0.3, inplace=True))), (x,))


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("time", [1, 3])
def test_gradients_per_sample_are_never_written_out(time: int) -> None:
    width, batch = 96, 8
    module = make(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))).float()
    capture = Capture(module, loss_reduction="sum", keep_budget=0)
    capture.attach()
    loss = total(module(draw(batch, time, width).float()))
    with Largest() as largest:
        loss.backward()
        result = clipped_sums(capture, plan_for(module))
    capture.detach()
    assert result is not None
    sums = sum(p.numel() for p in module.parameters())
    assert sums < batch * width * width  # one layer's per-sample gradients
    assert largest.numbers <= sums
    assert capture.budget.peak == 0


class Branches(nn.Module):
    """Strided convolutions whose per-sample gradients are larger than their operands."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(64, 64, 3, stride=2, padding=1, bias=False) for _ in range(3))
        self.convolutions = nn.ModuleList(convolutions)

    def forward(self, x: Tensor) -> Tensor:
        return sum(conv(x) for conv in self.convolutions)  # type: ignore[return-value]


@pytest.mark.parametrize(("limit", "kept"), [(0, 0), (300_000, 1), (600_000, 2), (1 << 30, 3)])
def test_the_keep_budget_bounds_what_is_kept(limit: int, kept: int) -> None:
    batch = 4
    extra = 4 * batch * (64 * 64 * 9 - 64 * 16 * 16 - 64 * 8 * 8)
    module = make(Branches).float()
    capture = Capture(module, keep_budget=limit)
    capture.attach()
    total(module(draw(batch, 64, 16, 16).float())).backward()
    assert capture.budget.peak == kept * extra <= limit
    assert clipped_sums(capture, plan_for(module)) is not None
    assert capture.budget.used == 0
    capture.detach()


def test_copies_are_ordinary() -> None:
    module, x = make(Language), tokens(B, 7)
    keys = [*module.state_dict()]
    capture = Capture(module)
    capture.attach()
    assert [*module.state_dict()] == keys
    assert all(type(v) is Tensor for v in module.state_dict().values())
    total(module(x)).backward()
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(saved, weights_only=False),
    ]
    for other in copies:
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            assert type(theirs) is nn.Parameter
            assert type(mine) is PrivateParameter
            assert torch.equal(mine.detach(), theirs.detach())
        total(other(x)).backward()
        assert all(p.grad is not None for p in other.parameters())
        assert other.head.weight is other.table.weight
    state = io.BytesIO()
    torch.save(module.state_dict(), state)
    state.seek(0)
    loaded = torch.load(state, weights_only=True)
    module.load_state_dict(loaded)
    capture.detach()


def test_detach_restores_everything() -> None:
    module, x = make(mlp), draw(B, 5).float()
    before = {name: id(p) for name, p in module.named_parameters()}
    capture = Capture(module)
    capture.attach()
    capture.attach()
    total(module(x)).backward()
    assert all(p.grad is None for p in module.parameters())
    capture.detach()
    assert {name: id(p) for name, p in module.named_parameters()} == before
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert not any("_private" in vars(p) for p in module.parameters())
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    total(module(x)).backward()
    assert all(p.grad is not None for p in module.parameters())
