"""Float sums of linear gradients by tiles of bfloat16 numbers, where a processor has them."""

from __future__ import annotations

import math

import pytest
import torch

from dpkern.ops import ghost, testing

pytestmark = pytest.mark.skipif(
    "amx" not in testing.available_isas(), reason="the processor has no tiles of bfloat16"
)

SHAPES = [(600, 1, 65, 60), (3, 70, 33, 200), (40, 8, 24, 130), (1, 900, 48, 50), (2, 8, 24, 24)]
WORST = 1 + 2.0**-8 - 2.0**-16 - 2.0**-23
"""Its three bfloat16 parts are all as large as they can be."""


def summed(
    a: torch.Tensor, g: torch.Tensor, factors: torch.Tensor, start: float = 0.0
) -> torch.Tensor:
    out = torch.full((g.shape[2], a.shape[2]), start)
    ghost.linear_sum(a, g, factors, out, backend="cpu")
    return out


def operands(b: int, t: int, d: int, p: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(b + t)
    a = torch.randn(b, t, d, generator=generator)
    return a, torch.randn(b, t, p, generator=generator), torch.rand(b, generator=generator) + 0.1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("numbers", ["usual", "worst", "worst of one sign"])
def test_sums_are_as_exact_as_docs_say(shape: tuple[int, int, int, int], numbers: str) -> None:
    a, g, factors = operands(*shape)
    if numbers != "usual":
        one_sign = numbers == "worst of one sign"
        a, g = (WORST * (x.sign().abs() if one_sign else x.sign()) for x in (a, g))
        factors = factors.log2().round().exp2()
    scaled = (factors.double()[:, None, None] * g).flatten(0, 1).t()
    want = scaled @ a.double().flatten(0, 1) + 1
    sizes = scaled.abs() @ a.double().abs().flatten(0, 1) + 1
    rows = shape[0] * shape[1]
    bound = (20.1 + 6 * (rows // 32 + 1 + rows // 128)) * 2.0**-24
    results = []
    for threads in (1, 2, 3):
        with testing.threads(threads):
            results.append(summed(a, g, factors, start=1.0))
    assert ((results[0] - want).abs() <= bound * sizes).all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("shape", [(600, 1, 65, 60), (9, 70, 40, 100)])
@pytest.mark.parametrize("number", [3.4e38, math.inf, math.nan])
def test_numbers_next_to_the_largest_float_are_added_as_before(
    shape: tuple[int, int, int, int], number: float
) -> None:
    for side in (0, 1):
        pair = operands(*shape)
        pair[side][4, 0, 3] = number
        a, g, factors = pair
        a[1], factors[1] = math.nan, 0.0  # skipped
        with testing.isa("avx512"):
            want = summed(a, g, factors * 0.25)
        for threads in (1, 2):
            with testing.threads(threads):
                got = summed(a, g, factors * 0.25)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)
        lost = (~torch.isfinite(want)).sum()
        assert lost == (0 if number < math.inf else want.shape[side])
    with testing.isa("avx512"):
        usual = summed(*operands(*shape))
    assert not torch.equal(usual, summed(*operands(*shape)))  # else these tests see no tiles


def test_factors_that_take_gradients_beyond() -> None:
    a, g, factors = operands(32, 1, 32, 32)
    a[5], g[5], factors[5] = 0, 1e30, 1e20
    assert torch.isnan(summed(a, g, factors)).all()
