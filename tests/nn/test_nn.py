"""Layers of the frequency domain: equal to dense layers and convolutions, in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern.base.errors import InvalidInput
from dpkern.engine.capture import Capture
from dpkern.nn import BlockCirculantLinear, SpectralConv2d, functional
from tests.engine.engine_oracle import check, draw, make

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

CIRCULANT = [
    pytest.param(16, 8, 8, id="whole blocks"),
    pytest.param(13, 7, 4, id="padded"),
    pytest.param(5, 3, 1, id="blocks of one number"),
    pytest.param(300, 280, 8, id="by transforms"),
    pytest.param(265, 290, 7, id="by transforms, odd and padded"),
]

CONVOLUTION: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": (2, 1)},
    {"stride": (3, 2), "dilation": 2, "padding": 2, "groups": 2},
    {"dilation": (3, 2), "padding": 1, "bias": False},
    {"padding": "same", "dilation": 2},
    {"padding": (2, 1), "padding_mode": "reflect"},
]


def gradients(y: Tensor, *of: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad(y, of, weights)]


def agree(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= TOLERANCE[a.dtype] * b.abs().max()


def by_hand(weight: Tensor, convention: str) -> Tensor:
    p, q, d = weight.shape
    whole = torch.empty(p * d, q * d, dtype=weight.dtype)
    for row in range(p * d):
        for column in range(q * d):
            (i, r), (j, s) = divmod(row, d), divmod(column, d)
            lag = s - r if convention == "row" else r - s
            whole[row, column] = weight[i, j, lag % d]
    return whole


@pytest.mark.parametrize("convention", functional.CONVENTIONS)
def test_a_block_is_given_by_its_first_row_or_column(convention: str) -> None:
    weight = draw(2, 3, 4)
    whole = functional.circulant_matrix(weight, convention)
    assert torch.equal(whole, by_hand(weight, convention))
    first = whole[0, :4] if convention == "row" else whole[:4, 0]
    assert torch.equal(first, weight[0, 0])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("convention", functional.CONVENTIONS)
@pytest.mark.parametrize(("n", "m", "block"), CIRCULANT)
def test_block_circulant_layers_are_linear_layers_with_that_matrix(
    n: int, m: int, block: int, convention: str, dtype: torch.dtype
) -> None:
    layer = make(lambda: BlockCirculantLinear(n, m, block, convention=convention)).to(dtype)
    x = draw(3, 2, n).to(dtype).requires_grad_()
    weight, bias = layer.weight, layer.bias
    whole = functional.circulant_matrix(weight, convention)[:m, :n]
    agree(gradients(layer(x), x, weight, bias), gradients(x @ whole.T + bias, x, weight, bias))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", CONVOLUTION, ids=lambda o: " ".join(o) or "plain")
@pytest.mark.parametrize("transforms", [True, False])
def test_spectral_convolutions_are_convolutions(
    options: dict[str, Any], dtype: torch.dtype, transforms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "TRANSFORMS_FROM", 0 if transforms else 1 << 60)
    mine = make(lambda: SpectralConv2d(4, 6, (3, 5), **options)).to(dtype)
    theirs = nn.Conv2d(4, 6, (3, 5), **options).to(dtype)
    theirs.load_state_dict(mine.state_dict())
    x = draw(2, 4, 12, 11).to(dtype).requires_grad_()
    mine_y, y = mine(x), theirs(x)
    agree(gradients(mine_y, x, *mine.parameters()), gradients(y, x, *theirs.parameters()))


@pytest.mark.parametrize(("kernel", "transforms"), [(3, False), (7, False), (17, True)])
def test_convolutions_take_the_cheaper_way(
    kernel: int, transforms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, ...]] = []
    transform = torch.fft.rfft2

    def noted(x: Tensor, **options: Any) -> Tensor:
        taken.append(tuple(x.shape))
        return transform(x, **options)

    monkeypatch.setattr(torch.fft, "rfft2", noted)
    SpectralConv2d(2, 3, kernel, padding=kernel // 2)(torch.randn(1, 2, 40, 40))
    assert bool(taken) is transforms


def test_one_image_needs_no_batch() -> None:
    for kernel in (3, 17):  # directly, and by transforms
        mine, x = SpectralConv2d(2, 3, kernel, padding=kernel // 2), torch.randn(2, 40, 40)
        assert torch.equal(mine(x), mine(x[None])[0])


def test_an_empty_batch_gives_an_empty_result() -> None:
    for block in (4, 1):
        assert BlockCirculantLinear(300, 290, block)(torch.empty(0, 300)).shape == (0, 290)
    assert SpectralConv2d(2, 3, 3)(torch.empty(0, 2, 6, 6)).shape == (0, 3, 4, 4)


def test_operands_of_two_dtypes_are_promoted() -> None:
    x, weight = draw(2, 3, 8, 8).bfloat16(), draw(4, 3, 3, 3).float()
    assert functional.spectral_conv2d(x, weight).dtype is torch.float32


def test_what_does_not_fit_is_refused() -> None:
    layer = BlockCirculantLinear(8, 8, 4)
    with pytest.raises(InvalidInput, match="at most 8 features"):
        layer(torch.zeros(2, 9))
    with pytest.raises(InvalidInput, match="convention"):
        BlockCirculantLinear(8, 8, convention="diagonal")
    with pytest.raises(InvalidInput, match="block"):
        BlockCirculantLinear(8, 8, 0)
    with pytest.raises(InvalidInput, match="Cut the features"):
        functional.circulant_product(torch.zeros(2, 8), layer.weight)
    for x in (torch.zeros(1, 3, 8, 8), torch.zeros(1, 2, 4, 8), torch.zeros(8, 8)):
        with pytest.raises(InvalidInput, match="no smaller than the kernel"):
            SpectralConv2d(2, 3, 5)(x)


PRIVATE = {
    "circulant": (lambda: BlockCirculantLinear(20, 18, 4), (3, 20)),
    "circulant column": (lambda: BlockCirculantLinear(20, 18, 4, convention="column"), (3, 20)),
    "circulant positions": (lambda: BlockCirculantLinear(20, 18, 4), (3, 2, 20)),
    "circulant transforms": (lambda: BlockCirculantLinear(264, 264, 8), (3, 264)),
    "conv": (lambda: SpectralConv2d(4, 6, 3, padding=1, groups=2), (3, 4, 7, 6)),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", PRIVATE)
def test_they_train_privately(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "TRANSFORMS_FROM", 0)
    build, shape = PRIVATE[name]
    check(make(build), [draw(*shape)], dtype=dtype)


def test_they_train_privately_in_bfloat16() -> None:
    model = nn.Sequential(BlockCirculantLinear(20, 18, 4), nn.Tanh(), nn.Linear(18, 3))
    capture = Capture(model)
    capture.attach()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 20)).float().square().mean()
    loss.backward()
    assert capture.captured
    capture.detach()
