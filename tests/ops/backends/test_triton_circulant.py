"""Block-circulant layers by Triton's kernels in its interpreter: products and sums are those of
float64, norms from above for operands that were made to deceive. Not yet run on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.nn import functional
from dpkern.ops import spectral
from dpkern.ops.spectral import Band, circulant
from tests.ops.backends.test_cuda_circulant import POSITIONS, cancelling
from tests.ops.test_spectral_circulant_bound import SIZES as ONE_POSITION
from tests.ops.test_spectral_circulant_bound import deceptive, exact
from tests.ops.test_spectral_circulant_product import assert_close, draw
from tests.step.no_wait import NoWait

Modules = Callable[[str], Any]
SIZES = ((1, 1, 1), (33, 17, 9))
"""Samples, blocks of the input, blocks of the output."""
QUICK = ((9, 3, 16), (2, 3, 2, 5), (2, 9, 8, 4))
"""Positions, if several, and sizes: each way to a norm."""
FLOATS = (torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow))
EITHER = {"backend": "triton"}
pytestmark = pytest.mark.usefixtures("interpreted")


def quick_and_slow(quick: Sequence[Any], slow: Sequence[Any]) -> list[Any]:
    """Blocks or sizes, the second ones marked as slow: a program takes the interpreter 10 ms."""
    return [*quick, *(pytest.param(each, marks=pytest.mark.slow) for each in slow)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block", quick_and_slow((8,), (1, 2, 3, 20, 128)))
def test_products_are_those_of_the_whole_matrix(block: int, dtype: torch.dtype) -> None:
    for (batch, ins, outs), convention in itertools.product(SIZES, functional.CONVENTIONS):
        x, weight = draw(batch, ins, block, dtype=dtype), draw(outs, ins, block, dtype=dtype)
        got = spectral.circulant_product(x, weight, convention=convention, **EITHER)
        whole = functional.circulant_matrix(weight.double(), convention)
        assert_close(got.flatten(1), x.double().flatten(1) @ whole.T)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block", quick_and_slow((8,), (1, 2, 3, 20, 128)))
def test_sums_are_those_of_transforms_in_float64(block: int, dtype: torch.dtype) -> None:
    bands = (None, Band((block,), "shells", 0.5))
    for (batch, ins, outs), positions, band in zip(SIZES, (1, 3), bands, strict=True):
        x = draw(batch, positions, ins, block, dtype=dtype)
        g = draw(batch, positions, outs, block, dtype=dtype)
        factors = draw(batch, dtype=dtype).abs()
        if batch > 1:
            factors[::3] = 0
            x[0], g[0] = float("nan"), float("inf")  # a sample of factor 0
        out = draw(outs, ins, block, dtype=dtype)
        want = out.double()
        spectral.circulant_sum(x, g, factors, out, band=band, **EITHER)
        wide = x.double(), g.double(), factors.double()
        spectral.circulant_sum(*wide, want, band=band, backend="reference")
        assert_close(out, want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_are_those_of_transforms_in_float64(dtype: torch.dtype) -> None:
    for block, positions in ((2, 1), (5, 3)):
        x, g = (draw(4, positions, n, block, dtype=dtype) for n in (5, 18))
        grads, squares = spectral.circulant_gradient(x, g, **EITHER)
        want, _ = spectral.circulant_gradient(x.double(), g.double(), backend="reference")
        assert_close(grads, want)
        torch.testing.assert_close(
            squares, grads.double().square().flatten(1).sum(1), rtol=1e-13, atol=0
        )


def test_samples_in_chunks_and_shared_out_to_programs(
    interpreted: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    frequencies = interpreted("frequencies")
    monkeypatch.setattr(frequencies, "_CHUNK", 1 << 12)
    monkeypatch.setattr(frequencies, "_LEAST", 16)
    x, g = (draw(9, 2, n, 2, dtype=torch.float32) for n in (3, 2))
    assert len(frequencies.parts_of(x, 32, torch.float32)) > 2
    out, factors = torch.zeros(2, 3, 2), torch.linspace(0, 1, 9)
    want, wide = out.double(), (x.double(), g.double())
    spectral.circulant_sum(x, g, factors, out, **EITHER)
    spectral.circulant_sum(*wide, factors.double(), want, backend="reference")
    assert_close(out, want)
    assert_close(
        spectral.circulant_product(x[:, 0].clone(), out, **EITHER),
        spectral.circulant_product(wide[0][:, 0].clone(), out.double(), backend="reference"),
    )
    want, _ = spectral.circulant_gradient(*wide, backend="reference")
    assert_close(spectral.circulant_gradient(x, g, **EITHER)[0], want)
    squares = spectral.circulant_norm(x, g, **EITHER)
    assert bool((squares >= want.square().sum((1, 2, 3))).all())
    monkeypatch.undo()
    assert torch.equal(spectral.circulant_norm(x, g, **EITHER), squares)


def norms(x: torch.Tensor, g: torch.Tensor, band: Band | None = None) -> np.ndarray:
    """In 64-bit mantissas."""
    return spectral.circulant_norm(x, g, band=band, **EITHER).numpy().astype(np.longdouble)


def largest(x: torch.Tensor, g: torch.Tensor) -> np.ndarray:
    """The product of the operands' squares."""
    parts = [np.square(t.double().numpy().astype(np.longdouble)).sum((1, 2, 3)) for t in (x, g)]
    found: np.ndarray = parts[0] * parts[1]
    return found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("sizes", "samples"),
    [
        *((sizes, 4) for sizes in QUICK),
        *(
            pytest.param(sizes, 24, marks=pytest.mark.slow)
            for sizes in (*ONE_POSITION, (2, 1, 300), *POSITIONS)
        ),
    ],
    ids=str,
)
def test_norms_are_never_below(sizes: tuple[int, ...], samples: int, dtype: torch.dtype) -> None:
    """At one position and at several, denormals and cancellation included."""
    make: Callable[..., Any] = deceptive if len(sizes) == 3 else cancelling
    x, g = (t[:samples].contiguous() for t in make(sizes, dtype))
    for band in (None, Band(sizes[-1:], "shells", 0.4)) if sizes[-1] > 2 else (None,):
        got, true = norms(x, g, band), exact(x, g, band)
        above = 1e-17 * true if band is not None else 0.0  # the response itself is rounded
        assert np.all(got >= true - above)
        gram = circulant.norm_route(x, g) == "positions"  # the square itself is what is rounded
        excess = np.sqrt(got) - np.sqrt(true)
        if len(sizes) == 3:
            assert np.all(got - true <= 4e-9 * largest(x, g) + 2.0**-1070)
        else:
            assert np.all(excess <= (2e-5 if gram else 1e-11) * np.sqrt(largest(x, g)))


@pytest.mark.parametrize(("sizes", "part"), list(zip(QUICK, (0, 1, 0), strict=True)), ids=str)
def test_without_their_slack_they_are_below(
    sizes: tuple[int, ...], part: int, interpreted: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: each route without its own part of the slack."""
    norm = interpreted("circulant_norm")
    errors = norm._errors

    def without(*args: Any) -> tuple[float, ...]:
        found = list(errors(*args))
        found[part] = found[2] = 0.0
        return tuple(found)

    monkeypatch.setattr(norm, "_errors", without)
    make: Callable[..., Any] = deceptive if len(sizes) == 3 else cancelling
    x, g = (t[:8].contiguous() for t in make(sizes, torch.float64))
    assert np.any(norms(x, g) < exact(x, g, None))


def test_squares_that_leave_the_range_do_not_matter() -> None:
    for positions in (1, 2):
        x, g = (draw(1, positions, n, 2, dtype=torch.float64) for n in (2, 3))
        plain = spectral.circulant_norm(x, g, **EITHER)
        for a, b in ((-600, 560), (-1010, 1000)):
            moved = spectral.circulant_norm(x * 2.0**a, g * 2.0**b, **EITHER)
            assert torch.equal(moved, plain * 2.0 ** (2 * (a + b)))
        assert bool((spectral.circulant_norm(x * 2.0**-600, g, **EITHER) > 0).all())
        assert bool((spectral.circulant_norm(x * 0, g, **EITHER) == 0).all())
        assert bool(spectral.circulant_norm(x * 2.0**600, g, **EITHER).isinf().all())


@pytest.mark.parametrize("positions", [1, 3])
def test_samples_that_are_not_finite_have_no_finite_norm(positions: int) -> None:
    x, g = (draw(4, positions, n, 3, dtype=torch.float32) for n in (3, 2))
    x[1, 0, 0, 0], g[2, 0, 1, 2] = float("inf"), float("nan")
    squares = spectral.circulant_norm(x, g, **EITHER)
    assert torch.isfinite(squares).tolist() == [True, False, False, True]
    for one in (0, 3):
        at = slice(one, one + 1)
        assert torch.equal(spectral.circulant_norm(x[at], g[at], **EITHER), squares[at])


def test_larger_blocks_take_the_platforms_transforms(
    interpreted: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    products, norm, *others = map(
        interpreted, ("circulant", "circulant_norm", "frequencies", "scaled")
    )
    for module in (products, norm, *others):
        monkeypatch.setattr(
            module, "launch", lambda kernel, *_, **__: launched.append(kernel.__name__)
        )
    x, g = (draw(2, 2, n, products.LARGEST + 1, dtype=torch.float32) for n in (2, 1))
    spectral.circulant_sum(x, g, torch.ones(2), torch.zeros(1, 2, x.shape[3]), **EITHER)
    spectral.circulant_gradient(x, g, **EITHER)
    spectral.circulant_product(x[0], x[1, :, :1].repeat(1, 2, 1), **EITHER)
    assert launched == []
    x, g = (draw(2, 2, n, norm.LARGEST + 1, dtype=torch.float32) for n in (2, 1))
    spectral.circulant_norm(x, g, **EITHER)
    assert launched == []


def test_nothing_to_do_is_nothing_and_nothing_waits() -> None:
    x, g = torch.zeros(0, 1, 2, 8), torch.zeros(0, 1, 3, 8)
    out = torch.ones(3, 2, 8)
    assert spectral.circulant_norm(x, g, **EITHER).shape == (0,)
    assert spectral.circulant_product(x[:, 0], out, **EITHER).shape == (0, 3, 8)
    spectral.circulant_sum(x, g, torch.zeros(0), out, **EITHER)
    assert bool((out == 1).all())
    x, g = (draw(2, 2, n, 2, dtype=torch.float32) for n in (2, 3))
    single, weight = x[:, 0].clone(), torch.zeros(3, 2, 2)

    def run() -> None:
        spectral.circulant_norm(x, g, **EITHER)
        spectral.circulant_product(single, weight, **EITHER)
        spectral.circulant_gradient(x, g, **EITHER)
        spectral.circulant_sum(x, g, torch.ones(2), weight, **EITHER)

    run()  # constants are made once
    with NoWait():
        run()
