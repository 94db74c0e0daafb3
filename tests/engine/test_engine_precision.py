"""Half precision and autocast: norms near those of float32, and the bound on what is summed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern.engine import layers, merge, per_sample_gradients, routes  # noqa: F401  (layers registers the rules)
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums
from dpkern.ops import clip, ghost
from dpkern.ops.backends import _gram_shares
from dpkern.privacy.mechanisms import Plan
from tests.engine.engine_oracle import (
    Op,
    draw,
    make,
    plan_for,
    reference_gradients,
    squares,
    tokens,
)

B = 4
NORM_ERROR = 2e-2

# Warned about by torch itself, for the same module without the engine.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


def loss_of(output: Tensor) -> Tensor:
    """Mild enough for half precision; the sum is in float32."""
    flat = output.float().flatten(1)
    return (flat * torch.linspace(0.5, 1.5, flat.shape[1])).mean(1).sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=1)
        self.places = nn.Parameter(torch.randn(1, 6, 8))
        self.layer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(self.table(x) + self.places).tanh())
        return h @ self.table.weight.t()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(5, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "rows": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
        draw(B, 5),
    ),
    "sequences": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)),
        draw(B, 6, 5),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 2)
        ),
        draw(B, 3, 6, 6),
    ),
    "conv-up": (
        lambda: nn.Sequential(nn.ConvTranspose1d(3, 8, 3), nn.Tanh(), nn.Conv1d(8, 4, 3, groups=2)),
        draw(B, 3, 6),
    ),
    "tied": (Tied, tokens(B, 6)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        draw(B, 6, 8),
    ),
    "gru": (Recurrent, draw(B, 4, 5)),
    "rms": (lambda: nn.Sequential(nn.Linear(5, 8), nn.RMSNorm(8), nn.Linear(8, 3)), draw(B, 6, 5)),
    "products": (
        lambda: Op(
            lambda m, x: (x @ m.w) * m.s + torch.einsum("bti,io->bto", x, m.v) + (x @ (m.w + m.v)),
            w=(5, 6),
            v=(5, 6),
            s=(6,),
        ),
        draw(B, 6, 5),
    ),
    "bag": (lambda: nn.EmbeddingBag(11, 6), tokens(B, 6)),
    "prelu-bilinear": (lambda: Pairs(), draw(B, 5)),
}


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(5, 5, 4)
        self.act = nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x, x))  # type: ignore[no-any-return]


def close(module: nn.Module, x: Tensor, plan: Plan, context: Callable[[], Any]) -> clip.ClipResult:
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    try:
        with context():
            output = module(x)
            loss = loss_of(output)
        loss.backward()
        result = clipped_sums(capture, plan)
    finally:
        capture.detach()
    assert isinstance(result, clip.ClipResult)
    return result


def norm_of(result: clip.ClipResult) -> float:
    return math.sqrt(sum(float(s.double().square().sum()) for s in result.sums))


@pytest.mark.parametrize("mode", ["bfloat16", "float16", "autocast-bfloat16", "autocast-float16"])
@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_half_precision(case: tuple[Callable[[], nn.Module], Tensor], mode: str) -> None:
    build, x = case
    module = make(build).float()
    dtype = getattr(torch, mode.rpartition("-")[2])
    context: Callable[[], Any] = nullcontext
    x = x.float() if x.is_floating_point() else x
    if "autocast" in mode:
        context = lambda: torch.autocast("cpu", dtype=dtype)  # noqa: E731
    else:
        module = module.to(dtype)
        x = x.to(dtype) if x.is_floating_point() else x
    gradients = reference_gradients(copy.deepcopy(module), (x,), loss_of)
    expected = squares(gradients).sum(0).sqrt()
    plan = plan_for(module, float(expected.median()) * 0.8)
    result = close(module, x, plan, context)
    error = (result.norms - expected).abs() / expected
    assert float(error.max()) < NORM_ERROR
    assert all(s.dtype is torch.float32 for s in result.sums)
    for b in range(B):
        alone = close(module, x[b : b + 1], plan, context)
        assert norm_of(alone) <= plan.blocks[0].bound * (1 + 1e-6)


def test_layers_of_one_shape_take_their_norms_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device from 129 positions on; others take them as soon as gradients arrive."""
    calls: list[int] = []
    original = ghost.linear_norms

    def noted(a: list[Tensor], g: list[Tensor]) -> Tensor:
        calls.append(len(a))
        return original(a, g)

    monkeypatch.setattr(per_sample_gradients, "KEPT_IN_16_BITS", {"cpu"})
    monkeypatch.setattr(routes, "worth_keeping", lambda *_: False)
    monkeypatch.setattr(ghost, "linear_norms", noted)
    widths = (8, 8, 6, 8, 8)
    parts = [nn.Linear(d, p) for d, p in pairwise(widths)]
    module = make(lambda: nn.Sequential(*parts)).bfloat16()
    plan = plan_for(module, 0.01)
    results = {}
    for positions in (128, 130):
        x = draw(B, positions, 8).bfloat16()
        results[positions] = close(module, x, plan, nullcontext)
    assert calls == [2, 1, 1]
    monkeypatch.setattr(_gram_shares, "fits", lambda *_: False)
    apart = close(module, x, plan, nullcontext)
    assert calls == [2, 1, 1]
    torch.testing.assert_close(results[130].norms, apart.norms, rtol=1e-9, atol=0)
    for one, other in zip(results[130].sums, apart.sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_parameters_of_several_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 6)
            self.second = nn.Linear(6, 6).double()
            self.third = nn.Linear(6, 3).bfloat16()
            self.gain = nn.Parameter(torch.randn(3).half())

        def forward(self, x: Tensor) -> Tensor:
            h = self.second(self.first(x).double().tanh())
            return self.third(h.bfloat16()).float() * self.gain

    module, x = make(Mixed), draw(B, 6, 5).float()
    plain = copy.deepcopy(module)
    norms = []
    for b in range(B):
        plain.zero_grad()
        loss_of(plain(x[b : b + 1])).backward()
        total = sum(float(p.grad.double().square().sum()) for p in plain.parameters())  # type: ignore[union-attr]
        norms.append(math.sqrt(total))
    plan = plan_for(module, sorted(norms)[1])
    result = close(module, x, plan, nullcontext)
    torch.testing.assert_close(
        result.norms.cpu(), torch.tensor(norms, dtype=torch.float64), rtol=NORM_ERROR, atol=0
    )
    for parameter, total_sum in zip(module.parameters(), result.sums, strict=True):
        wanted = torch.float64 if parameter.dtype is torch.float64 else torch.float32
        assert total_sum.dtype is wanted
    for b in range(B):
        alone = close(module, x[b : b + 1], plan, nullcontext)
        assert norm_of(alone) <= plan.blocks[0].bound * (1 + 1e-6)


def test_the_dtype_of_inputs_and_their_gradients() -> None:
    module = make(lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        module = module.to(dtype)
        x = draw(B, 5).to(dtype).requires_grad_()
        expected = module(x)
        capture = Capture(module)
        capture.attach()
        output = module(x)
        assert output.dtype is dtype
        torch.testing.assert_close(output, expected)
        output.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is dtype
        capture.detach()


@pytest.mark.parametrize("size", [1e-25, 1e18])
def test_gradients_far_from_one(size: float) -> None:
    """Squares would leave the range of float32."""
    module, x = make(lambda: nn.Linear(5, 3)).float(), draw(B, 6, 5).float()
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    output = module(x)
    plain = F.linear(x, module.weight.detach(), module.bias.detach())
    torch.testing.assert_close(output, plain)
    (loss_of(output) * size).backward()
    plan = plan_for(module, size * 1e-3)
    result = clipped_sums(capture, plan)
    capture.detach()
    assert isinstance(result, clip.ClipResult)
    gradients = reference_gradients(module, (x,), loss_of)
    expected = squares(gradients).sum(0).sqrt() * size
    torch.testing.assert_close(result.norms, expected, rtol=1e-4, atol=0)
    assert 0 < norm_of(result) <= B * size * 1e-3 * (1 + 1e-6)


@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_autocast_keeps_what_the_product_read(layer: str) -> None:
    x = draw(B, 5, 5).float()
    module = nn.Sequential(nn.Linear(5, 4) if layer == "linear" else nn.Conv1d(5, 4, 2))
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    capture.norms_on_arrival = False
    x.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(module(x))
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    record = capture.slots[0].arrivals[0].record
    held = record.a if isinstance(record, per_sample_gradients.LinearGradients) else record.x  # type: ignore[attr-defined]
    assert held.dtype is record.g.dtype is torch.bfloat16  # type: ignore[attr-defined]
    plain = held.detach().flatten().sort().values
    assert torch.equal(plain, x.detach().bfloat16().flatten().sort().values)


def test_operands_stay_in_16_bits_where_products_take_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, g = draw(B, 6, 5).bfloat16(), draw(B, 6, 4).bfloat16()
    assert [t.dtype for t in per_sample_gradients.operands(a, g)] == [torch.float32] * 2
    monkeypatch.setattr(per_sample_gradients, "KEPT_IN_16_BITS", {"cpu"})
    assert [t.dtype for t in per_sample_gradients.operands(a, g)] == [torch.bfloat16] * 2
    assert [t.dtype for t in per_sample_gradients.operands(a, g.half())] == [torch.float32] * 2
    assert per_sample_gradients.operands(a.transpose(1, 2), g)[0].is_contiguous()
    merged = merge.merge(
        [
            per_sample_gradients.LinearGradients(a, g),
            per_sample_gradients.LinearGradients(a.float(), g.float()),
        ]
    )
    assert isinstance(merged, per_sample_gradients.LinearGradients)
    assert merged.a.dtype is merged.g.dtype is torch.float32


@pytest.mark.parametrize("mode", ["bfloat16", "autocast-bfloat16"])
@pytest.mark.parametrize("name", ["sequences", "conv", "conv-up", "tied", "attention", "gru"])
def test_the_bound_holds_with_16_bit_operands(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, where the operands stay as they are."""
    seen = []
    original = per_sample_gradients.operands

    def noted(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        pair = original(x, g)
        seen.append(pair[0].dtype)
        return pair

    monkeypatch.setattr(per_sample_gradients, "KEPT_IN_16_BITS", {"cpu"})
    monkeypatch.setattr(per_sample_gradients, "operands", noted)
    test_half_precision(MODELS[name], mode)
    assert torch.bfloat16 in seen
