"""Ghost ops of embeddings: against the dense gradient in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.ops import ghost, testing
from tests.ops.backends.every_backend import every_backend

ROWS = 11
SHAPES = [
    (i % 5, t, d) for i, (t, d) in enumerate(product((0, 1, 2, 3, 7, 64, 129), (1, 3, 16, 17, 130)))
]
EXCESS = {torch.float32: 1e-4, torch.float64: 1e-10}
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}
TYPES = list(EXCESS)
ISAS = [isa for isa in testing.available_isas() if isa in ("baseline", "avx2", "avx512")]


def _operands(
    batch: int, positions: int, d: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch + 10 * positions + 1000 * d)
    ids = torch.randint(0, ROWS, (batch, positions), generator=generator)
    return ids, torch.randn(batch, positions, d, generator=generator, dtype=dtype)


def _dense(ids: torch.Tensor, g: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    """The gradients ``[B, V, D]`` in float64, by a product with one-hot rows."""
    hot = torch.nn.functional.one_hot(ids, ROWS).double()
    if padding_idx is not None:
        hot[..., padding_idx] = 0
    return torch.bmm(hot.transpose(1, 2), g.double())


def _check_norms_and_sums(
    ids: torch.Tensor, g: torch.Tensor, padding_idx: int | None, backend: str
) -> list[torch.Tensor]:
    dtype, where = g.dtype, f"{list(g.shape)}, padding_idx {padding_idx}"
    dense = _dense(ids, g, padding_idx)
    given: dict[str, Any] = {"padding_idx": padding_idx, "backend": backend}
    norms = ghost.embedding_norm(ids, g, **given)
    true = dense.square().sum((1, 2))
    assert (norms >= true * (1 - 1e-14)).all(), where
    assert (norms <= true * (1 + EXCESS[dtype])).all(), where

    factors = torch.rand(ids.shape[0], generator=torch.Generator().manual_seed(1), dtype=dtype)
    out = torch.ones(ROWS, g.shape[2], dtype=dtype)
    ghost.embedding_sum(ids, g, factors, out, **given)
    want = 1 + torch.einsum("b,bvd->vd", factors.double(), dense)
    testing.assert_close(where, out, want, ROUNDING[dtype])
    return [norms, out]


def _check_all(
    ids: torch.Tensor, g: torch.Tensor, padding_idx: int | None, backend: str
) -> list[torch.Tensor]:
    results = _check_norms_and_sums(ids, g, padding_idx, backend)
    dtype, where = g.dtype, f"{list(g.shape)}, padding_idx {padding_idx}"
    given: dict[str, Any] = {"padding_idx": padding_idx, "backend": backend}
    dense = _dense(ids, g, padding_idx)
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(ids.shape[0], 5, g.shape[2], generator=generator, dtype=dtype)
    y = torch.randn(ids.shape[0], 5, ROWS, generator=generator, dtype=dtype)
    products = ghost.tied_cross(ids, g, a, y, **given)
    linear = torch.bmm(y.double().transpose(1, 2), a.double())
    wanted = (dense * linear).sum((1, 2))
    sizes = (_dense(ids, g.abs(), padding_idx) * torch.bmm(y.abs().mT, a.abs()).double()).sum(
        (1, 2)
    )
    slack = 1e-12 * g.shape[2] * sizes
    assert (products >= wanted - 1e-15 * sizes).all(), where
    assert (products <= wanted + slack).all(), where
    return [*results, products]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_kernels_agree_with_float64(isa: str, dtype: torch.dtype, padding_idx: int | None) -> None:
    for shape in SHAPES:
        ids, g = _operands(*shape, dtype)
        results = []
        for threads in (1, 2):
            with testing.isa(isa), testing.threads(threads):
                results.append(_check_all(ids, g, padding_idx, "cpu"))
        for one, two in zip(*results, strict=True):
            assert torch.equal(one, two), f"{shape}: differs between one thread and two"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_reference_agrees_with_float64(dtype: torch.dtype, padding_idx: int | None) -> None:
    for shape in SHAPES:
        _check_all(*_operands(*shape, dtype), padding_idx, "reference")


@every_backend
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_norms_and_sums_agree_with_float64(
    dtype: torch.dtype, padding_idx: int | None, backend: str
) -> None:
    for shape in ((0, 3, 5), (2, 0, 3), (3, 1, 130), (4, 64, 1), (2, 129, 17)):
        _check_norms_and_sums(*_operands(*shape, dtype), padding_idx, backend)


@every_backend
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_tied_products_agree_with_float64(
    dtype: torch.dtype, padding_idx: int | None, backend: str
) -> None:
    for shape in ((0, 3, 5), (2, 0, 3), (3, 5, 7), (2, 40, 33)):
        _check_all(*_operands(*shape, dtype), padding_idx, backend)


@every_backend
@pytest.mark.parametrize("lengths", [(300,), (1, 299), (64, 64, 172), (63, 130, 107)])
def test_runs_of_one_id_of_any_length(lengths: tuple[int, ...], backend: str) -> None:
    # Sorted ids as they come, so that runs begin and end on, before and behind any multiple of 64.
    ids = torch.cat([torch.full((n,), i + 2) for i, n in enumerate(lengths)])[None]
    g = _operands(1, 300, 5, torch.float64)[1]
    _check_norms_and_sums(ids, g, None, backend)
    _check_norms_and_sums(ids, g, 3, backend)


@every_backend
def test_repeated_ids_are_summed_before_squaring(backend: str) -> None:
    ids = torch.tensor([[1, 1, 2], [3, 4, 5]])
    g = torch.tensor([[[1.0], [2.0], [4.0]], [[1.0], [2.0], [4.0]]])
    norms = ghost.embedding_norm(ids, g, backend=backend)
    assert norms.tolist() == pytest.approx([9 + 16, 1 + 4 + 16], rel=1e-12)


@every_backend
def test_norms_are_never_below_the_exact_square(backend: str) -> None:
    generator = torch.Generator().manual_seed(3)
    units = torch.randint(-(2**23), 2**23, (8, 300, 5), generator=generator)
    units[:, -1] = 17 - units[:, :-1].sum(1).remainder(31)
    units[:, 150:299] = -units[:, :149]  # all but two rows cancel
    ids = torch.zeros(8, 300, dtype=torch.int64)
    norms = ghost.embedding_norm(ids, units.float() / 2**23, backend=backend)
    for norm, row in zip(norms.tolist(), units.sum(1).tolist(), strict=True):
        assert Fraction(norm) >= Fraction(sum(x * x for x in row), 2**46)


@every_backend
def test_what_rounding_swallows_is_still_reported(backend: str) -> None:
    g = torch.tensor([2.0**53, 1.0, -(2.0**53)], dtype=torch.float64)[None, :, None]
    norm = ghost.embedding_norm(torch.zeros(1, 3, dtype=torch.int64), g, backend=backend)
    assert float(norm) >= 1  # the plain sum is 0


@every_backend
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", TYPES)
def test_non_finite_samples_show_and_can_be_dropped(
    backend: str, poison: float, dtype: torch.dtype
) -> None:
    ids, g = _operands(4, 7, 20, dtype)
    ids[1] = torch.arange(7)
    factors = torch.tensor([0.5, 0.0, 0.25, 1.0], dtype=dtype)
    keep = [0, 2, 3]
    want, got = torch.zeros(2, ROWS, 20, dtype=dtype)
    ghost.embedding_sum(ids[keep], g[keep], factors[keep], want, backend=backend)
    g[1, 4, 3] = poison
    ghost.embedding_sum(ids, g, factors, got, backend=backend)
    testing.assert_close("sum", got, want, ROUNDING[dtype])
    finite = torch.isfinite(ghost.embedding_norm(ids, g, backend=backend))
    assert finite.tolist() == [True, False, True, True]
    padded = torch.isfinite(ghost.embedding_norm(ids, g, padding_idx=4, backend=backend))
    assert padded.all()
    a, y = torch.ones(4, 2, 20, dtype=dtype), torch.ones(4, 2, ROWS, dtype=dtype)
    crossed = torch.isfinite(ghost.tied_cross(ids, g, a, y, backend=backend))
    assert crossed.tolist() == [True, False, True, True]
    ignored = ghost.tied_cross(ids, g, a, y, padding_idx=4, backend=backend)
    assert torch.isfinite(ignored).all()


IDS, G, A, Y = (
    torch.zeros(2, 3, dtype=torch.int64),
    torch.zeros(2, 3, 4),
    *(
        torch.zeros(2, 5, 4),
        torch.zeros(2, 5, 6),
    ),
)
ONES, OUT = torch.ones(2), torch.zeros(6, 4)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "an id beyond the table": (lambda: ghost.embedding_sum(IDS + 6, G, ONES, OUT), "ids"),
    "a negative id": (lambda: ghost.embedding_sum(IDS - 1, G, ONES, OUT), "ids"),
    "an id beyond the vocabulary": (lambda: ghost.tied_cross(IDS + 6, G, A, Y), "ids"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case: str) -> None:
    call, name = BAD[case]
    with pytest.raises(InvalidInput) as refused:
        call()
    assert refused.value.name == name


@every_backend
def test_a_negative_id_is_no_padding(backend: str) -> None:
    ids, g = torch.tensor([[-1, -1, 3]]), torch.ones(1, 3, 2)
    squares = ghost.embedding_norm(ids, g, backend=backend)
    assert squares.tolist() == pytest.approx([2 * 4 + 2 * 1], rel=1e-4)
