"""Clip norms of scaled and centred gradients, and of raw and L1-bounded ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from dpkern.engine.clip_norms import ScaledNormed
from dpkern.engine.per_sample_gradients import (
    ConvolutionGradients,
    ExplicitGradients,
    LinearGradients,
    PerSampleGradients,
)
from dpkern.engine.scaled import scaled_square
from dpkern.nn import BlockCirculantLinear
from dpkern.ops import clip
from dpkern.privacy.mechanisms.plan import Importance
from dpkern.privacy.mechanisms.release import DiagonalMap
from dpkern.privacy.mechanisms.site import Site
from tests.engine.engine_oracle import Op, cast, draw, make, reference_gradients
from tests.engine.released_oracle import B, compare, lenet, plan_of, released, strided

pytestmark = pytest.mark.usefixtures("one_thread")


class Mixed(nn.Module):
    """Layers of many kinds, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.line = nn.Conv1d(6, 4, 2)
        self.norm = nn.LayerNorm(4)
        self.blocks = BlockCirculantLinear(4, 4, 4)
        self.head = nn.Linear(12, 3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.line(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.blocks(self.norm(y)).flatten(1))


TOKENS = torch.tensor([[0, 1, 1, 2], [3, 3, 3, 3], [4, 5, 6, 0], [2, 2, 1, 0], [6, 1, 6, 1]])


def diagonal(shape: Sequence[int], number: int, *parts: str, norm: str = "release") -> DiagonalMap:
    scale = draw(*shape, seed=number).abs() + 0.2 if "scale" in parts else None
    centre = 0.3 * draw(*shape, seed=number + 50) if "centre" in parts else None
    return DiagonalMap(scale=scale, centre=centre, restore="scale" in parts, norm=norm)


DIAGONALS = [
    pytest.param(("scale",), "release", id="scale"),
    pytest.param(("centre",), "release", id="centre"),
    pytest.param(("scale", "centre"), "release", id="scale and centre"),
    pytest.param(("scale", "centre"), "gradient", id="scale after the clip"),
]


@pytest.mark.parametrize(("parts", "norm"), DIAGONALS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_scaled_and_centred_gradients(parts: tuple[str, ...], norm: str, reduction: str) -> None:
    model = make(Mixed)
    sites = [Site(kind="other", shape=tuple(p.shape)) for p in model.parameters()]
    releases = [diagonal(p.shape, i, *parts, norm=norm) for i, p in enumerate(model.parameters())]
    for dtype in (torch.float64, torch.float32):
        for per_layer in (False, True):
            compare(
                model, [TOKENS], releases, sites,
                dtype=dtype, per_layer=per_layer, reduction=reduction,
            )  # fmt: skip
    model = model.double()
    found = released(model, [TOKENS], plan_of(model, releases, arithmetic="exact"))
    for mine, release, g in zip(found, releases, reference_gradients(model, [TOKENS]), strict=True):
        wanted = release.forward(g if release.centre is None else g - release.centre)
        assert (mine - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize("per_layer", [False, True])
def test_clipping_by_the_l1_norm(per_layer: bool) -> None:
    for model, inputs in (
        (make(Mixed), [TOKENS]),
        (make(lenet), [draw(B, 1, 12, 12)]),
        (make(strided), [draw(B, 2, 9, 8)]),
        (make(lambda: Op(lambda m, x: x @ m.w[:3].T + (x @ m.w[3:].T).sum(1, keepdim=True),
                         w=(5, 4))), [draw(B, 4)]),
    ):  # fmt: skip
        model = model.double()
        grads = reference_gradients(model, inputs)
        each = torch.stack([g.flatten(1).abs().sum(1) for g in grads])
        totals = each if per_layer else each.sum(0, keepdim=True)
        bound = float(totals.median())
        plan = plan_of(model, [None] * len(grads), bound=bound, per_layer=per_layer, p=1)
        result = released(model, cast(inputs, torch.float64), plan)
        assert result.p == 1
        assert result.norm_bound == pytest.approx(bound * (len(grads) if per_layer else 1))
        assert torch.allclose(result.norms, each.sum(0), rtol=1e-10)
        assert (result.norms >= each.sum(0)).all()
        factors = (bound * clip.SLACK / totals).clamp(max=1).expand(len(grads), -1)
        for mine, g, c in zip(result.sums, grads, factors, strict=True):
            assert torch.allclose(mine, torch.einsum("b,b...->...", c, g), atol=1e-10)


def test_raw_sums_stand_beside_the_clipped_ones() -> None:
    model = make(Mixed).double()
    releases = [
        diagonal(p.shape, i, "centre", norm="gradient") for i, p in enumerate(model.parameters())
    ]
    importance = Importance(bound=1.0, noise_scale=1.0)
    plan = plan_of(model, releases, bound=0.1, importance=importance)
    result = released(model, [TOKENS], plan, reduction="mean")
    for raw, g in zip(result.raw, reference_gradients(model, [TOKENS]), strict=True):
        assert torch.allclose(raw, g.sum(0), atol=1e-12)
    assert released(model, [TOKENS], plan_of(model, releases)).raw is None


# norms alone


def convolution(positions: int, seed: int = 0) -> ConvolutionGradients:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, positions + 1, generator=generator)
    g = torch.randn(3, 4, positions, generator=generator)
    geometry = {"stride": (1,), "padding": (0,), "dilation": (1,), "groups": 1}
    return ConvolutionGradients(x, g, (2,), geometry)


def exact_square(grads: Tensor, scale: Tensor, centre: Tensor | None) -> list[Fraction]:
    """``||(grad_b - m) / s||^2`` in rational numbers."""
    scales = [Fraction(x) for x in scale.flatten().tolist()]
    centres = [Fraction(0)] * len(scales)
    if centre is not None:
        centres = [Fraction(x) for x in centre.flatten().tolist()]
    return [
        sum(
            (((Fraction(g) - m) / s) ** 2 for g, m, s in zip(row, centres, scales, strict=True)),
            Fraction(0),
        )
        for row in grads.double().flatten(1).tolist()
    ]


def exact_gradients(record: ConvolutionGradients) -> list[list[Fraction]]:
    """Entry by entry, samples outermost, in the order of the shape."""
    x, g = record.x.tolist(), record.g.tolist()
    outs, ins, width = record.shape
    return [
        [
            sum((Fraction(d) * Fraction(xs[i][t + u]) for t, d in enumerate(gs[o])), Fraction(0))
            for o in range(outs)
            for i in range(ins)
            for u in range(width)
        ]
        for xs, gs in zip(x, g, strict=True)
    ]


def scaled(record: PerSampleGradients, scale: Tensor, centre: Tensor | None = None) -> Tensor:
    return ScaledNormed(record, DiagonalMap(scale=scale, centre=centre)).squared_norms()


@pytest.mark.parametrize("centred", [False, True])
def test_kept_gradients_are_normed_from_above_as_they_are(centred: bool) -> None:
    """Also where the centre is the gradient, but for its last bits."""
    generator = torch.Generator().manual_seed(1)
    for trial in range(20):
        grads = torch.randn(3, 5, 4, generator=generator)
        if trial % 2:
            grads = grads.transpose(1, 2).contiguous().transpose(1, 2)
        near = grads[0].double() * (1 + 2.0**-23 * torch.randn(5, 4, generator=generator).double())
        centre = near if centred else None
        scale = torch.rand(5, 4, generator=generator).double() + 2.0 ** -(trial % 7)
        got = scaled(ExplicitGradients(grads), scale, centre)
        want = exact_square(grads, scale, centre)
        assert all(Fraction(a) >= b for a, b in zip(got.tolist(), want, strict=True))
        size = 1 if centre is None else float((centre / scale).norm())
        slack = [1e-6 * (math.sqrt(b) + size) for b in want]
        for a, b, more in zip(got.sqrt().tolist(), want, slack, strict=True):
            assert a <= math.sqrt(b) + more


@pytest.mark.parametrize("centred", [False, True])
def test_sums_that_cancel_are_not_under_reported(centred: bool) -> None:
    """Adversary: positions that take each other's place; float32 sums keep rounding alone."""
    hidden = 0
    for seed in range(10):
        record = convolution(8, seed)
        x, g = record.x, record.g
        g[:, :, 4:] = -g[:, :, :4] * (1 + 2.0**-22)
        x[:, :, 4:8] = x[:, :, :4]
        x[:, :, 8] = x[:, :, 4]
        exact = exact_gradients(record)
        scale = 0.1 + torch.rand(record.shape, dtype=torch.float64)
        centre = torch.full(record.shape, 2.0**-26, dtype=torch.float64) if centred else None
        weights = [1 / Fraction(s) for s in scale.flatten().tolist()]
        shift = Fraction(2.0**-26) if centred else Fraction(0)
        got = scaled(record, scale, centre)
        narrow = exact_square(record.per_sample(), scale, centre)
        for square, row, written in zip(got.tolist(), exact, narrow, strict=True):
            true = sum(((v - shift) * w) ** 2 for v, w in zip(row, weights, strict=True))
            assert Fraction(square) >= true
            hidden += written < true
    assert hidden > 0  # what float32 writes out is below some


def test_kept_and_unkept_gradients_have_nearly_the_same_norm() -> None:
    for record in (convolution(9), LinearGradients(torch.randn(3, 6, 4), torch.randn(3, 6, 5))):
        scale = 0.1 + torch.rand(record.shape, dtype=torch.float64)
        for centre in (None, torch.randn(record.shape, dtype=torch.float64)):
            kept, written = (
                scaled(record.materialize(), scale, centre),
                scaled(record, scale, centre),
            )
            assert ((kept / written - 1).abs() < 1e-5).all()


def test_a_scale_beyond_the_gradients_range_hides_nothing() -> None:
    grads = torch.full((1, 2), 1e38)
    each = torch.tensor([1e-39, 1.0], dtype=torch.float64)
    assert not scaled_square(ExplicitGradients(grads), each, None).isfinite().any()
    assert scaled_square(ExplicitGradients(grads.double()), each, None).isfinite().all()


def test_a_bad_sample_stays_alone() -> None:
    grads = torch.ones(3, 4)
    grads[1, 2] = math.nan
    found = scaled(ExplicitGradients(grads), torch.ones(4, dtype=torch.float64))
    assert found.isfinite().tolist() == [True, False, True]
    empty = scaled(ExplicitGradients(grads[:0]), torch.ones(4, dtype=torch.float64))
    assert empty.shape == (0,)
