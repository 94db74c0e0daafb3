"""Block-circulant layers by the CUDA kernels without a GPU: products and sums of float64, norms
from above for operands that were made to deceive. Not yet run on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base import layouts
from dpkern.nn import functional
from dpkern.ops import spectral, testing
from dpkern.ops.backends import _device_spectral, _launch_circulant, cuda
from dpkern.ops.backends import _kernels as table
from dpkern.ops.spectral import Band, circulant
from tests.ops.test_spectral_circulant_bound import SIZES as BOUND_SIZES
from tests.ops.test_spectral_circulant_bound import deceptive, exact
from tests.ops.test_spectral_circulant_product import assert_close, draw
from tests.step.no_wait import NoWait

BLOCKS = (1, 2, 3, 5, 8, 16, 31, 64, layouts.CIRCULANT_BLOCK)
SIZES = ((1, 1, 1), (5, 3, 2), (33, 17, 9))
"""Samples, blocks of the input, blocks of the output."""


@pytest.fixture(autouse=True)
def emulator() -> Iterator[ModuleType]:
    """The emulated kernels."""
    module = cuda._emulated()
    if isinstance(module, str):
        pytest.skip(f"cuda {module}")
    with testing.emulated("cuda"):
        yield module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", BLOCKS)
def test_products_are_those_of_the_whole_matrix(block: int, dtype: torch.dtype) -> None:
    for (batch, ins, outs), convention in itertools.product(SIZES, functional.CONVENTIONS):
        x, weight = draw(batch, ins, block, dtype=dtype), draw(outs, ins, block, dtype=dtype)
        got = spectral.circulant_product(x, weight, convention=convention, backend="cuda")
        whole = functional.circulant_matrix(weight.double(), convention)
        assert_close(got.flatten(1), x.double().flatten(1) @ whole.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", BLOCKS)
def test_sums_are_those_of_transforms_in_float64(block: int, dtype: torch.dtype) -> None:
    for (batch, ins, outs), positions in itertools.product(SIZES, (1, 3)):
        x = draw(batch, positions, ins, block, dtype=dtype)
        g = draw(batch, positions, outs, block, dtype=dtype)
        factors = draw(batch, dtype=dtype).abs()
        factors[::3] = 0
        x[0], g[0] = float("nan"), float("inf")  # a sample of factor 0
        before = draw(outs, ins, block, dtype=dtype)
        for band in (None, Band((block,), "shells", 0.5)):
            out, want = before.clone(), before.double()
            spectral.circulant_sum(x, g, factors, out, band=band, backend="cuda")
            wide = x.double(), g.double(), factors.double()
            spectral.circulant_sum(*wide, want, band=band, backend="reference")
            assert_close(out, want)


def test_long_sums_are_split() -> None:
    x, g = draw(120, 2, 3, 4, dtype=torch.float32), draw(120, 2, 2, 4, dtype=torch.float32)
    factors, out, want = torch.ones(120), torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).double()
    call = {"rows": 2, "columns": 3, "terms": 240, "split_stride": 24}
    assert table.circulant_splits(call) > 1
    spectral.circulant_sum(x, g, factors, out, backend="cuda")
    spectral.circulant_sum(x.double(), g.double(), factors.double(), want, backend="reference")
    assert_close(out, want)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [*BOUND_SIZES, (2, 1, 300)], ids=str)
def test_norms_are_never_below(
    sizes: tuple[int, int, int], dtype: torch.dtype, filtered: bool
) -> None:
    if filtered and sizes[2] < 3:
        return
    band = Band((sizes[2],), "shells", 0.4) if filtered else None
    x, g = deceptive(sizes, dtype)
    got = spectral.circulant_norm(x, g, band=band, backend="cuda").numpy().astype(np.longdouble)
    true = exact(x, g, band)
    above = 1e-17 * true if filtered else 0.0  # the response itself is rounded
    assert np.all(got >= true - above)
    largest = [np.square(t.double().numpy().astype(np.longdouble)).sum((1, 2, 3)) for t in (x, g)]
    assert np.all(got - true <= 4e-9 * largest[0] * largest[1] + 2.0**-1070)


def test_without_the_slack_they_are_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    make = _launch_circulant._tables.one

    def without(struct: Any, **fields: Any) -> Any:
        return make(struct, **fields | ({"error": 0.0} if "error" in fields else {}))

    monkeypatch.setattr(_launch_circulant._tables, "one", without)
    x, g = deceptive((9, 3, 16), torch.float64)
    got = spectral.circulant_norm(x, g, backend="cuda").numpy().astype(np.longdouble)
    assert np.any(got < exact(x, g, None))


POSITIONS = ((2, 3, 2, 5), (3, 20, 33, 8), (18, 2, 1, 16), (17, 30, 40, 2), (2, 1, 2, 65))
"""Positions and sizes: the second and fourth take Gram matrices over positions."""


def cancelling(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, *, samples: int = 24
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of all magnitudes; in most samples positions cancel but for little."""
    positions, ins, outs, block = sizes
    generator = torch.Generator().manual_seed(block)
    x, g = (
        torch.randn(samples, positions, n, block, generator=generator, dtype=torch.float64)
        for n in (ins, outs)
    )
    x[1:, 1], g[1:, 1] = x[1:, 0], -g[1:, 0]
    small = torch.exp2(-torch.randint(0, 50, (samples - 1,), generator=generator).double())
    x[1:, 2:] *= small.view(-1, 1, 1, 1)
    x[1:, 0, 0, 0] *= 1 + small
    tiny = -149 if dtype is torch.float32 else -220
    powers = torch.randint(tiny, 60, (2, samples), generator=generator).double()
    x, g = (t * torch.exp2(e).view(-1, 1, 1, 1) for t, e in zip((x, g), powers, strict=True))
    return x.to(dtype), g.to(dtype)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", POSITIONS, ids=str)
def test_norms_at_several_positions_are_never_below(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, filtered: bool
) -> None:
    if filtered and sizes[3] < 3:
        return
    band = Band((sizes[3],), "shells", 0.4) if filtered else None
    x, g = cancelling(sizes, dtype)
    got = spectral.circulant_norm(x, g, band=band, backend="cuda").numpy().astype(np.longdouble)
    true = exact(x, g, band)
    above = 1e-17 * true if filtered else 0.0
    assert np.all(got >= true - above)
    largest = [np.square(t.double().numpy().astype(np.longdouble)).sum((1, 2, 3)) for t in (x, g)]
    excess = np.sqrt(got) - np.sqrt(true)
    gram = circulant.norm_route(x, g) == "positions"  # the square itself is what is rounded
    assert np.all(excess <= (2e-5 if gram else 1e-11) * np.sqrt(largest[0] * largest[1]))


@pytest.mark.parametrize(("sizes", "part"), [(POSITIONS[0], "norm"), (POSITIONS[1], "square")])
def test_without_their_slack_they_are_below_at_several_positions(
    sizes: tuple[int, int, int, int], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: each route without its own part of the slack."""
    make = _launch_circulant._tables.one

    def bare(struct: Any, **fields: Any) -> Any:
        without = {f"{part}_error": 0.0} if "norm_error" in fields else {}
        return make(struct, **fields | without)

    monkeypatch.setattr(_launch_circulant._tables, "one", bare)
    x, g = cancelling(sizes, torch.float64)
    got = spectral.circulant_norm(x, g, backend="cuda").numpy().astype(np.longdouble)
    assert np.any(got < exact(x, g, None))


@pytest.mark.parametrize("positions", [1, 3])
def test_samples_that_are_not_finite_have_no_finite_norm(positions: int) -> None:
    x, g = (draw(4, positions, n, 8, dtype=torch.float32) for n in (3, 2))
    x[1, 0, 0, 0], g[2, 0, 1, 3] = float("inf"), float("nan")
    squares = spectral.circulant_norm(x, g, backend="cuda")
    assert torch.isfinite(squares).tolist() == [True, False, False, True]
    for one in (0, 3):
        at = slice(one, one + 1)
        assert torch.equal(spectral.circulant_norm(x[at], g[at], backend="cuda"), squares[at])


def test_larger_blocks_take_the_platforms_transforms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = []
    for name in ("circulant_norm", "circulant_sum"):
        run = getattr(_device_spectral, name)

        def watched(*args: Any, run: Any = run, name: str = name, **options: Any) -> Any:
            called.append(name)
            return run(*args, **options)

        monkeypatch.setattr(_device_spectral, name, watched)

    def run(block: int, positions: int) -> None:
        x, g = (draw(3, positions, n, block, dtype=torch.float32) for n in (2, 1))
        spectral.circulant_norm(x, g, backend="cuda")
        out = torch.zeros(1, 2, block)
        spectral.circulant_sum(x, g, torch.ones(3), out, backend="cuda")

    run(layouts.CIRCULANT_BLOCK, 1)
    run(layouts.CIRCULANT_BLOCK, 2)
    assert called == []
    run(layouts.CIRCULANT_BLOCK + 1, 2)
    assert called == ["circulant_sum"]
    run(layouts.CIRCULANT_NORM_BLOCK + 1, 2)
    assert called == ["circulant_sum", "circulant_norm", "circulant_sum"]


def test_nothing_to_do_is_nothing() -> None:
    x, g = torch.zeros(0, 1, 2, 8), torch.zeros(0, 1, 3, 8)
    out = torch.ones(3, 2, 8)
    assert spectral.circulant_norm(x, g, backend="cuda").shape == (0,)
    assert spectral.circulant_product(x[:, 0], out, backend="cuda").shape == (0, 3, 8)
    spectral.circulant_sum(x, g, torch.zeros(0), out, backend="cuda")
    assert bool((out == 1).all())


def test_nothing_waits_for_the_device() -> None:
    x, g = draw(5, 1, 3, 8, dtype=torch.float32), draw(5, 1, 2, 8, dtype=torch.float32)
    weight, factors, band = (
        draw(2, 3, 8, dtype=torch.float32),
        torch.ones(5),
        Band((8,), "shells", 0.4),
    )

    def run() -> None:
        spectral.circulant_norm(x, g, band=band, backend="cuda")
        spectral.circulant_product(x[:, 0], weight, backend="cuda")
        spectral.circulant_sum(x, g, factors, weight, band=band, backend="cuda")

    run()  # constants are made once
    with NoWait():
        run()
