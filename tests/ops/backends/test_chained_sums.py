"""Weighted sums of 16-bit gradients whose samples go through one accumulator."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.ops import ghost, testing

pytest.importorskip("triton")

from dpkern.ops.backends._triton import chained, operands, precision
from dpkern.ops.ghost.conv import Geometry

ROUNDING = 2e-6


def drawn(
    batch: int, positions: int, d: int, p: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return layer inputs and output gradients."""
    generator = torch.Generator().manual_seed(batch * positions + d)
    a, g = (torch.randn(batch, positions, n, generator=generator).to(dtype) for n in (d, p))
    return a, g


def summed(a: torch.Tensor, g: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the op's sum, beside ones."""
    out = torch.ones(g.shape[2], a.shape[2])
    with testing.emulated("triton"):
        ghost.linear_sum(a, g, factors, out, backend="triton")
    return out


def exact(a: torch.Tensor, g: torch.Tensor, factors: torch.Tensor) -> tuple[Any, Any]:
    """Return the sum in float64, and the sum of the sizes of all products."""
    each = "b,btp,btd->pd", factors.double(), g.double(), a.double()
    sizes = torch.einsum(each[0], *(x.abs() for x in each[1:]))
    return 1 + torch.einsum(*each), 1 + sizes


CASES = {
    "one tile": (3, 50, 192, 256, torch.bfloat16),
    "edges": (3, 130, 368, 496, torch.float16),
    "a filled vocabulary": (2, 64, 192, 1025, torch.bfloat16),
    "ranges": (66, 43, 192, 256, torch.bfloat16),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the parts that sums were made of; as many samples as there can be share one."""
    found: list[torch.Tensor] = []
    keep = chained.parts

    def parts(given: Any, factors: torch.Tensor) -> torch.Tensor:
        found.append(keep(given, factors))
        return found[-1]

    monkeypatch.setattr(chained, "parts", parts)
    monkeypatch.setattr(chained, "share", lambda _, samples, __: min(samples, precision.SAMPLES))
    return found


@pytest.mark.parametrize("name", CASES)
def test_they_are_the_sums(name: str, taken: list[torch.Tensor]) -> None:
    batch, positions, d, p, dtype = CASES[name]
    a, g = drawn(batch, positions, d, p, dtype)
    factors = torch.linspace(-0.5, 2, batch).roll(1)
    want, sizes = exact(a, g, factors)
    assert ((summed(a, g, factors) - want).abs() <= ROUNDING * sizes).all()
    (parts,) = taken
    assert (len(parts) > 1) == (name == "ranges")


@pytest.mark.parametrize(
    "factors",
    [(0.0, 0.5, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0), (-2.0, 2.0, -2.0, 0.0)],
)
def test_samples_of_factor_zero_are_never_read(
    factors: tuple[float, ...], taken: list[torch.Tensor]
) -> None:
    a, g = drawn(4, 50, 192, 256)
    c = torch.tensor(factors)
    want, sizes = exact(a, g, c)
    a[c == 0], g[c == 0] = torch.nan, torch.inf
    assert ((summed(a, g, c) - want).abs() <= ROUNDING * sizes).all()
    assert taken


def test_factors_may_differ_by_any_power(taken: list[torch.Tensor]) -> None:
    """Gradients that are that much larger: each sample's part of the sum counts as much."""
    powers = torch.tensor([40, -60, 0, 100, -20])
    a, g = drawn(5, 50, 192, 256)
    factors = torch.ones(5).ldexp(-powers)
    g = g.float().ldexp(powers[:, None, None]).bfloat16()
    want, sizes = exact(a, g, factors)
    assert ((summed(a, g, factors) - want).abs() <= ROUNDING * sizes).all()
    # In units of the second factor the first sample's part would be infinite.
    small = torch.tensor([1.0, 2.0**-125, 1.0])
    a, g = drawn(3, 50, 192, 256)
    want, sizes = exact(a, g, small)
    assert ((summed(a, g, small) - want).abs() <= ROUNDING * sizes).all()
    assert len(taken) == 2


def test_a_quotient_that_is_no_normal_number_is_zero(taken: list[torch.Tensor]) -> None:
    """Rounded among denormal numbers it could lift a sample."""
    a, g = drawn(2, 50, 192, 256)
    g[0] *= 2.0**110
    g[1] = 0
    assert (summed(a, g, torch.tensor([3 * 2.0**-130, 1.0])) == 1).all()
    assert (summed(a, g, torch.tensor([3 * 2.0**-126, 1.0])) != 1).any()
    assert len(taken) == 2


def test_what_is_not_finite_shows(taken: list[torch.Tensor]) -> None:
    a, g = drawn(3, 50, 192, 256)
    assert summed(a, g, torch.tensor([1.0, torch.nan, 0.5])).isnan().all()
    a[1, 49, 191] = torch.nan
    found = summed(a, g, torch.tensor([1.0, 0.5, 0.25]))
    assert found[:, 191].isnan().all()
    assert found[:, :191].isfinite().all()
    assert len(taken) == 2


def test_bits_do_not_depend_on_the_order_of_samples(taken: list[torch.Tensor]) -> None:
    a, g = drawn(5, 50, 192, 256)
    factors = torch.tensor([0.3, 0.0, 1.0, 0.25, 0.7])
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.equal(summed(a, g, factors), summed(a[order], g[order], factors[order]))
    assert len(taken) == 2


def linear(batch: int, positions: int, d: int, p: int, **changes: Any) -> operands.Operands:
    """Return operands without numbers."""
    dtype = changes.get("dtype", torch.bfloat16)
    a, g = (torch.empty(batch, positions, n, dtype=dtype) for n in (d, p))
    return operands.Operands.linear(a, g)


def test_others_keep_a_total_beside_each_product() -> None:
    """float32, long samples, chunks that are half empty, widths that no tile fits or loads."""
    assert chained.possible(linear(64, 197, 768, 3072))
    assert chained.here(linear(64, 197, 768, 3072))
    for sizes in ((8, 321, 768, 3072), (8, 66, 768, 3072), (8, 197, 64, 64), (8, 197, 770, 768)):
        assert not chained.possible(linear(*sizes))
    assert not chained.possible(linear(8, 197, 768, 3072, dtype=torch.float32))
    x = torch.empty(2, 768, 14, 14, dtype=torch.bfloat16)  # whose positions lie innermost
    by_channels = operands.Operands.convolution(x, x, Geometry.of(x, x, 1, 1, 0, 1, 1))
    assert by_channels.dense
    assert not chained.possible(by_channels)
    g = torch.empty(2 * 197 * 768 + 1, dtype=torch.bfloat16)[1:].view(2, 197, 768)
    assert not chained.here(operands.Operands.linear(g.clone(), g))  # not aligned


def test_samples_are_shared_out_by_sizes_alone() -> None:
    for tiles in (1, 12, 36, 48, 500):
        for samples in (1, 3, 64, 65, 4096):
            each = chained.share(tiles, samples, 197)
            assert 1 <= each <= min(samples, precision.SAMPLES)
    assert chained.share(36, 64, 197) == 22  # 108 programs at a time
    assert chained.share(12, 64, 197) == 6  # 132


def truncated(x: float) -> float:
    """Return a number cut off to 24 bits, as tensor cores do."""
    near = np.float32(x)
    return float(near if abs(float(near)) <= abs(x) else np.nextafter(near, np.float32(0)))


@pytest.mark.parametrize("positions", [64, 197, 320])
def test_a_sample_loses_no_more_than_its_norm_has_in_addition(positions: int) -> None:
    """One entry on a tensor core at its worst, four products a step, and all that may follow it."""
    rng = np.random.default_rng(positions)
    kind = precision.first(torch.bfloat16)
    bound = precision.lost_in_sums(kind, positions, True)
    assert bound > precision.lost_in_sums(kind, positions, False)
    worst = 0.0
    for signs in ((1,), (-1, 1)):
        products = rng.uniform(0.5, 1, positions) * rng.choice(signs, positions)
        total = 0.0
        for begin in range(0, positions, 4):
            addends = [total, *products[begin : begin + 4]]
            cut = 2.0 ** (np.frexp(np.abs(addends).max())[1] - 24)
            total = truncated(sum(np.trunc(x / cut) * cut for x in addends))
        factors = np.sort(rng.uniform(1e-3, 1, precision.SAMPLES)).astype(np.float32)
        found = np.float32(total)
        for before, now in pairwise(factors):
            found *= np.float32(np.float64(before) / np.float64(now))
        lost = abs(float(found * factors[-1]) - float(factors[0]) * products.sum())
        worst = max(worst, lost / float(factors[0]) / np.abs(products).sum())
    assert bound / 200 < worst < bound


@pytest.mark.parametrize("route", ["gram", "direct"])
def test_norms_hold_for_what_a_sum_may_lose(route: str) -> None:
    """Rows of one length, at right angles: the sizes of all products, which add up to much more."""
    positions, d = 192, 192
    a = torch.eye(positions).bfloat16()[None]
    g = torch.eye(positions, 256).bfloat16()[None]
    assert chained.possible(operands.Operands.linear(a, g))
    lost = precision.lost_in_sums(precision.first(a.dtype), positions, True) * positions
    with testing.emulated("triton"):
        square = ghost.linear_norm(a, g, route=route, backend="triton")  # type: ignore[arg-type]
    assert square.sqrt() >= d**0.5 + lost
    assert square.sqrt() <= d**0.5 + 2 * lost
