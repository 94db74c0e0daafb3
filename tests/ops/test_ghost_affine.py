"""Backward of normalisation layers: against autograd of the layer itself, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from dpkern.base.errors import InvalidInput
from dpkern.ops import ghost, testing
from tests.ops.backends.every_backend import every_backend

EPS = 1e-5
ROUNDING = {torch.float32: 5e-5, torch.float64: 1e-11}
TYPES = list(ROUNDING)
ISAS = [isa for isa in testing.available_isas() if isa in ("baseline", "avx2", "avx512")]
ROWS = [(0, 3, 4), (1, 0, 4), (1, 1, 1), (2, 1, 3), (3, 7, 16), (4, 64, 17), (2, 129, 130)]
CHANNELS = [
    (0, 4, 3, 2),
    (2, 4, 0, 2),
    (1, 2, 1, 1),
    (2, 6, 3, 3),
    (3, 16, 64, 4),
    (2, 12, 129, 12),
    (1, 10, 5000, 1),
]


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def _autograd(
    layer: Callable[..., torch.Tensor],
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx and the per-sample gradients in float64: each sample has parameters of its own."""
    dx, dweight, dbias = [], [], []
    for sample, grad in zip(x.double(), g.double(), strict=True):
        leaves = [t.clone().requires_grad_() for t in (sample, weight.double(), bias.double())]
        found = torch.autograd.grad(layer(leaves[0][None], *leaves[1:]), leaves, grad[None])
        for into, value in zip((dx, dweight, dbias), found, strict=True):
            into.append(value)
    return torch.stack(dx), torch.stack(dweight), torch.stack(dbias)


def _compare(
    name: str, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> None:
    for part, mine, theirs in zip(("dx", "dweight", "dbias"), got, want, strict=False):
        assert mine.dtype is dtype
        testing.assert_close(f"{name}: {part}", mine, theirs, ROUNDING[dtype])


def _settings(backend: str) -> list[tuple[str | None, int]]:
    """Instruction sets and threads to sweep."""
    if backend != "cpu":
        return [(None, 1)]
    return [(isa, threads) for isa in ISAS for threads in (1, 2)]


def _sweep(backend: str, run: Callable[[], tuple[torch.Tensor, ...]]) -> Any:
    for isa, threads in _settings(backend):
        with testing.threads(threads):
            if isa is None:
                yield run()
            else:
                with testing.isa(isa):
                    yield run()


@every_backend
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("scaled", [True, False])
def test_layer_norm(
    backend: str, dtype: torch.dtype, shape: tuple[int, int, int], scaled: bool
) -> None:
    g, x = _random(dtype, *shape), _random(dtype, 1, *shape)[0] * 3 + 1
    features = shape[2]
    weight = _random(dtype, features, 1)[:, 0] if scaled else torch.ones(features, dtype=dtype)
    mean = x.mean(2)
    rstd = ((x - mean[..., None]).square().mean(2) + EPS).rsqrt()
    if 0 in shape:
        want = x, *torch.zeros(2, shape[0], features, dtype=dtype)
    else:
        want = _autograd(
            lambda x, w, b: functional.layer_norm(x, [features], w, b, EPS), g, x, weight, weight
        )
    passed = weight if scaled else None
    for got in _sweep(
        backend, lambda: ghost.layer_norm_backward(g, x, mean, rstd, passed, backend=backend)
    ):
        _compare(f"layer norm {shape}", got, want, dtype)


@every_backend
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("scaled", [True, False])
def test_rms_norm(
    backend: str, dtype: torch.dtype, shape: tuple[int, int, int], scaled: bool
) -> None:
    g, x = _random(dtype, *shape), _random(dtype, 1, *shape)[0] * 3 + 1
    features = shape[2]
    weight = _random(dtype, features, 1)[:, 0] if scaled else torch.ones(features, dtype=dtype)
    rstd = (x.square().mean(2) + EPS).rsqrt()
    if 0 in shape:
        want = x, *torch.zeros(2, shape[0], features, dtype=dtype)
    else:
        want = _autograd(
            lambda x, w, b: functional.rms_norm(x, [features], w, EPS) + 0 * b, g, x, weight, weight
        )
    passed = weight if scaled else None
    for got in _sweep(
        backend, lambda: ghost.rms_norm_backward(g, x, rstd, passed, backend=backend)
    ):
        _compare(f"rms norm {shape}", got, want[:2], dtype)


@every_backend
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", CHANNELS)
@pytest.mark.parametrize("scaled", [True, False])
def test_group_norm(
    backend: str, dtype: torch.dtype, shape: tuple[int, int, int, int], scaled: bool
) -> None:
    batch, channels, places, groups = shape
    g = _random(dtype, batch, channels, places)
    x = _random(dtype, 1, batch, channels, places)[0] * 3 + 1
    weight = _random(dtype, channels, 1)[:, 0] if scaled else torch.ones(channels, dtype=dtype)
    grouped = x.reshape(batch, groups, channels // groups * places)
    empty = 0 in shape
    mean = torch.zeros(batch, groups, dtype=dtype) if empty else grouped.mean(2)
    rstd = (
        torch.ones(batch, groups, dtype=dtype)
        if empty
        else (grouped.var(2, unbiased=False) + EPS).rsqrt()
    )
    if empty:
        want = x, *torch.zeros(2, batch, channels, dtype=dtype)
    else:
        want = _autograd(
            lambda x, w, b: functional.group_norm(x, groups, w, b, EPS), g, x, weight, weight
        )
    passed = weight if scaled else None
    for got in _sweep(
        backend, lambda: ghost.group_norm_backward(g, x, mean, rstd, passed, backend=backend)
    ):
        _compare(f"group norm {shape}", got, want, dtype)


@every_backend
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_sample_stays_alone(backend: str, poison: float) -> None:
    g, x = _random(torch.float32, 3, 8, 20), _random(torch.float32, 1, 3, 8, 20)[0]
    g[1, 2, 5] = poison
    row, group = torch.ones(3, 8), torch.ones(3, 2)
    for result in (
        ghost.layer_norm_backward(g, x, 0 * row, row, None, backend=backend),
        ghost.rms_norm_backward(g, x, row, None, backend=backend),
        ghost.group_norm_backward(g, x, 0 * group, group, None, backend=backend),
    ):
        for tensor in result:
            finite = torch.isfinite(tensor).flatten(1).all(1)
            assert finite.tolist() == [True, False, True]


X, STATS, WEIGHT = torch.zeros(2, 6, 4), torch.zeros(2, 6), torch.zeros(4)
GROUPS = torch.zeros(2, 3)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "groups that do not divide": (
        lambda: ghost.group_norm_backward(X, X, WEIGHT.expand(2, 4).clone(), GROUPS, None),
        "rstd",
    ),
    "four groups of six channels": (
        lambda: ghost.group_norm_backward(X, X, X[:, 0].clone(), X[:, 0].clone(), None),
        "mean",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case: str) -> None:
    call, name = BAD[case]
    with pytest.raises(InvalidInput) as refused:
        call()
    assert refused.value.name == name
