"""What records say of their gradients besides L2 norms and sums: L1 norms, products, parts."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkern.engine.per_sample_gradients import (
    CirculantGradients,
    ConvolutionGradients,
    ExplicitGradients,
    LinearGradients,
    PerSampleGradients,
)
from dpkern.engine.tables import EmbeddingGradients, TiedGradients

B = 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conv(x: Tensor, g: Tensor, *kernel: int, **given: Any) -> ConvolutionGradients:
    axes = len(kernel)
    geometry: dict[str, Any] = {
        "stride": (1,) * axes,
        "padding": (0,) * axes,
        "dilation": (1,) * axes,
        "groups": 1,
    }
    return ConvolutionGradients(x, g, kernel, {**geometry, **given})


IDS = torch.tensor([[0, 1, 1, 4], [2, 2, 2, 2], [3, 0, 4, 0]])
TABLE = EmbeddingGradients(IDS, draw(B, 4, 6), rows=5, padding_idx=0)
RECORDS: dict[str, PerSampleGradients] = {
    "explicit": ExplicitGradients(draw(B, 4, 5)),
    "linear": LinearGradients(draw(B, 1, 5), draw(B, 1, 4, seed=1)),
    "linear over positions": LinearGradients(draw(B, 70, 5), draw(B, 70, 4, seed=1)),
    "convolution": conv(
        draw(B, 4, 9, 8), draw(B, 6, 5, 4, seed=1), 3, 2,
        stride=(2, 2), padding=(2, 1), dilation=(2, 3), groups=2,
    ),
    "convolution of a signal": conv(draw(B, 2, 90), draw(B, 3, 88, seed=1), 3),
    "circulant": CirculantGradients(draw(B, 1, 3, 4), draw(B, 1, 2, 4, seed=1)),
    "circulant over positions": CirculantGradients(draw(B, 9, 3, 4), draw(B, 9, 2, 4, seed=1)),
    "embedding": TABLE,
    "tied": TiedGradients(TABLE, LinearGradients(draw(B, 4, 6, seed=2), draw(B, 4, 5, seed=3))),
}  # fmt: skip


def wider(record: Any) -> Any:
    """The same numbers in float64."""
    if isinstance(record, Tensor):
        return record.double() if record.is_floating_point() else record
    if not is_dataclass(record):
        return record
    return type(record)(**{f.name: wider(getattr(record, f.name)) for f in fields(record)})


@pytest.mark.parametrize("name", RECORDS)
def test_l1_norms_are_bounded_from_above(name: str) -> None:
    record = RECORDS[name]
    exact = wider(record).per_sample().flatten(1).abs().sum(1)
    found = record.l1_norms()
    assert found.dtype is torch.float64
    assert (found >= exact).all()
    assert (found <= exact * (1 + 1e-3)).all()
    assert torch.allclose(wider(record).l1_norms(), exact, rtol=1e-10)


@pytest.mark.parametrize("name", RECORDS)
def test_absolute_products_are_those_of_absolute_operands(name: str) -> None:
    record = RECORDS[name]
    terms, found = record.rounding_terms()
    positive = wider(record)
    for part in (positive, *(getattr(positive, f.name) for f in fields(positive))):
        for field in ("a", "x", "g", "grads"):
            if hasattr(part, field):
                setattr(part, field, getattr(part, field).abs())
    assert terms >= 1
    assert torch.allclose(found, positive.per_sample().flatten(1).sum(1), rtol=1e-10)


@pytest.mark.parametrize("name", RECORDS)
def test_products_with_a_tensor(name: str) -> None:
    record = RECORDS[name]
    t = draw(*record.shape, seed=9)
    exact = (wider(record).per_sample().flatten(1) @ t.double().flatten()).flatten()
    # Gradients that are written out are rounded to their dtype.
    assert torch.allclose(
        record.inner(t), exact, rtol=0, atol=1e-6 * float(record.rounding_terms()[1].max())
    )
    assert torch.allclose(wider(record).inner(t), exact, rtol=1e-9)


@pytest.mark.parametrize("name", RECORDS)
def test_parts_are_samples(name: str) -> None:
    record = RECORDS[name]
    some = record.part(slice(1, 3))
    assert (some.batch, some.shape, some.dtype) == (2, record.shape, torch.float32)
    assert torch.allclose(some.per_sample(), record.per_sample()[1:], atol=1e-6)
    one_by_one = [piece for _, piece in record.pieces(1 << 30)]
    assert [piece.batch for piece in one_by_one] == [1] * B
    nothing = record.part(slice(0, 0))
    assert nothing.l1_norms().shape == nothing.inner(torch.ones(record.shape)).shape == (0,)


def test_a_sample_that_is_not_finite_has_no_finite_norm() -> None:
    for name in ("linear", "linear over positions", "convolution"):
        record = wider(RECORDS[name])
        record.g[1, 0, 0] = float("inf")
        found = record.l1_norms()
        assert torch.isfinite(found).tolist() == [True, False, True]
