"""The published pipelines: without noise they are autograd, with it the covariance is exact."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.ops.spectral import Band, literal
from dpkern.ops.spectral._basis import covariance

pytestmark = pytest.mark.usefixtures("one_thread")

S = math.sqrt(0.5)
GENERATOR = torch.Generator()

# channels in, out, groups, input, kernel, stride, padding, dilation
CONVS = [
    (2, 3, 1, (8, 8), (3, 3), (1, 1), (0, 0), (1, 1)),
    (2, 3, 1, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
    (4, 6, 2, (7, 9), (3, 2), (1, 2), (2, 1), (2, 1)),
    (3, 2, 1, (11,), (4,), (3,), (2,), (1,)),
    (2, 2, 2, (4, 5, 3), (2, 3, 2), (1, 2, 1), (1, 1, 0), (1, 1, 2)),
]


def operands(case: Any, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    """Input, output gradient, the layer's numbers, and autograd's per-sample weight gradients."""
    ci, co, groups, size, kernel, stride, padding, dilation = case
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, ci, *size, generator=generator, dtype=torch.float64)
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[len(size) - 1]
    weight = torch.randn(co, ci // groups, *kernel, dtype=torch.float64).requires_grad_()
    grads = []
    out = conv(x, weight, None, stride, padding, dilation, groups)
    g = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for b in range(batch):
        (grad,) = torch.autograd.grad((out[b] * g[b]).sum(), weight, retain_graph=True)
        grads.append(grad)
    padded = tuple(n + 2 * p for n, p in zip(size, padding, strict=True))
    config = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation,
              "groups": groups, "size": padded}  # fmt: skip
    return x, g, config, torch.stack(grads)


def test_axes_of_a_pipeline_agree() -> None:
    volume = literal.Pipeline(kernel=(3, 3, 3), size=(4, 5, 6), bound=1.0)
    assert (volume.stride, volume.padding, volume.dilation) == ((1, 1, 1), (0, 0, 0), (1, 1, 1))
    for changed in ({"size": (5, 6)}, {"band": Band((5, 6), "shells", 0.5)}):
        with pytest.raises(InvalidInput) as refused:
            replace(volume, **changed)
        assert refused.value.name == "size"
    with pytest.raises(InvalidInput, match="3 of them"):
        replace(volume, stride=(1, 2))


@pytest.mark.parametrize("case", CONVS, ids=str)
def test_noise_off_is_autograd(case: Any) -> None:
    x, g, numbers, grads = operands(case)
    config = literal.Pipeline(bound=1e9, **numbers)
    for run in (literal.gredp, literal.batched):
        assert torch.allclose(run(x, g, config, GENERATOR), grads.sum(0), rtol=0, atol=1e-11)
    larger = replace(config, size=tuple(n + 5 for n in config.size))
    assert torch.allclose(literal.gredp(x, g, larger, GENERATOR), grads.sum(0), rtol=0, atol=1e-11)


@pytest.mark.parametrize("case", CONVS, ids=str)
def test_clips_the_whole_correlation_map(case: Any) -> None:
    """Factors by an explicit map: every lag of every pair of a group counts."""
    x, g, numbers, grads = operands(case)
    size, stride = numbers["size"], numbers["stride"]
    axes = zip(g.shape[2:], stride, numbers["dilation"], numbers["kernel"], strict=True)
    least = [s * (n - 1) + t * (k - 1) + 1 for n, s, t, k in axes]
    pads = [p for n in reversed(numbers["padding"]) for p in (n, n)]
    xp = torch.nn.functional.pad(x, pads)[(..., *(slice(n) for n in least))].numpy()
    total = np.zeros(x.shape[0])
    out_each, in_each = g.shape[1] // numbers["groups"], x.shape[1] // numbers["groups"]
    for o in range(g.shape[1]):
        for c in range(in_each):
            channel = xp[:, o // out_each * in_each + c]
            for lag in np.ndindex(*size):
                entry = np.zeros(x.shape[0])
                for a in np.ndindex(*g.shape[2:]):
                    at = [(s * i + u) % n for s, i, u, n in zip(stride, a, lag, size, strict=True)]
                    if all(i < n for i, n in zip(at, channel.shape[1:], strict=True)):
                        entry += g[(slice(None), o, *a)].numpy() * channel[(slice(None), *at)]
                total += entry**2
    bound = float(np.sqrt(total).mean())
    factors = torch.from_numpy(np.minimum(1, bound / np.sqrt(total)))
    assert (factors < 1).any()
    expected = torch.einsum("b,b...->...", factors, grads)
    config = literal.Pipeline(bound=bound, **numbers)
    for run in (literal.gredp, literal.batched):
        assert torch.allclose(run(x, g, config, GENERATOR), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("convention", ["row", "as printed"])
def test_circulant_is_autograd_for_rows(convention: str) -> None:
    p, q, d, batch = 2, 3, 5, 4
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, 2, q, d, generator=generator, dtype=torch.float64)
    g = torch.randn(batch, 2, p, d, generator=generator, dtype=torch.float64)
    w = torch.randn(p, q, d, dtype=torch.float64, requires_grad=True)
    r, s = torch.arange(d)[:, None], torch.arange(d)[None]
    # Each row is the one above it, shifted right; the printed product is true for columns.
    index = (s - r) % d if convention == "row" else (r - s) % d
    out = torch.einsum("pqrs,btqs->btpr", w[..., index], x)
    (expected,) = torch.autograd.grad((out * g).sum(), w)
    config = literal.Pipeline(kernel=(d,), size=(d,), bound=1e9)
    got = literal.circulant(x, g, config, GENERATOR)
    assert torch.allclose(got, expected, rtol=0, atol=1e-11) == (convention == "row")


@pytest.mark.parametrize("size", [(6, 6), (5, 7), (7, 8)], ids=str)
@pytest.mark.parametrize("keep", [0.3, 0.5, 0.9])
def test_stored_slice_is_its_gains(size: Any, keep: float) -> None:
    """What the code's one-sided slice does to a signal is the filter with gains 0, 1/2 and 1."""
    x, g = (torch.randn(1, 1, *n, dtype=torch.float64) for n in (size, (size[0] - 2, size[1] - 2)))
    config = literal.Pipeline(
        kernel=(3, 3), size=size, bound=1e9, band=Band(size, "authors_slice", keep)
    )
    filtered = literal.spectral_dp(x, g, config, GENERATOR)
    stored = literal.spectral_dp(x, g, replace(config, stored=True), GENERATOR)
    assert torch.allclose(filtered, stored, rtol=0, atol=1e-12)


NOISES = [
    ((6, 6), (3, 3), None, False),
    ((5, 5), (5, 5), None, False),
    ((7, 8), (3, 2), Band((7, 8), "shells", 0.5), False),
    ((8, 8), (3, 3), Band((8, 8), "authors_slice", 0.5), False),
    ((8, 8), (3, 3), Band((8, 8), "authors_slice", 0.5), True),
    ((5, 7), (5, 3), Band((5, 7), "authors_slice", 0.5), True),
    ((8,), (8,), Band((8,), "shells", 0.5), False),
    ((8,), (8,), Band((8,), "authors_slice", 0.5), True),
    ((7,), (7,), None, False),
]


@pytest.mark.parametrize("case", NOISES, ids=str)
@pytest.mark.parametrize("noise", [(1.0, 0.0), (S, S), (0.9, math.sqrt(0.19)), (0.0, 1.0)], ids=str)
def test_covariance_is_exact(case: Any, noise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit noise on one real or imaginary part per channel gives the factor of the covariance."""
    size, kernel, band, stored = case
    a, b = noise
    wide = math.prod(size)

    def one_part_each(spectrum: torch.Tensor, *_: object) -> torch.Tensor:
        bins = math.prod(spectrum.shape[2:])
        parts = torch.zeros(2, wide, bins, dtype=torch.complex128)
        index = torch.arange(bins)
        parts[0, index, index] = a
        parts[1, index, index] = 1j * b
        return parts.reshape(spectrum.shape)

    monkeypatch.setattr(literal, "_noise", one_part_each)
    config = literal.Pipeline(
        kernel=kernel, size=size, bound=1.0, noise_multiplier=1.0, band=band, stored=stored
    )
    if len(size) == 2:
        x = torch.zeros(1, 1, *size, dtype=torch.float64)
        out = [n - k + 1 for n, k in zip(size, kernel, strict=True)]
        g = torch.zeros(1, 2 * wide, *out, dtype=torch.float64)
        run = literal.gredp if band is None else literal.spectral_dp
        factor = run(x, g, config, GENERATOR)
    else:
        x, g = (torch.zeros(1, 1, n, *size, dtype=torch.float64) for n in (1, 2 * wide))
        factor = literal.circulant(x, g, config, GENERATOR)
    columns = factor.reshape(2 * wide, -1).T.numpy()
    place = "block" if stored else "mask"
    one = (1,) * len(size)
    expected = covariance(band or Band(size, "all"), kernel, one, a, b, place)
    assert columns @ columns.T == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("run", ["gredp", "batched"])
def test_draws_have_the_covariance(run: str) -> None:
    """20 000 channel pairs of one release; the real law is told from the circular one."""
    band = Band((5, 6), "shells", 0.5)
    x, g = torch.zeros(1, 100, 5, 6), torch.zeros(1, 200, 3, 4)
    config = literal.Pipeline(
        kernel=(3, 3), size=(5, 6), bound=2.0, noise_multiplier=1.5, band=band
    )
    generator = torch.Generator().manual_seed(3)
    function = literal.spectral_dp if run == "gredp" else literal.batched
    draws = function(x, g, config, generator).reshape(-1, 9).double().numpy() / 3.0
    measured = draws.T @ draws / len(draws)
    expected = covariance(band, (3, 3), (1, 1), S, S, "mask")
    other = covariance(band, (3, 3), (1, 1), 1.0, 0.0, "mask")
    assert np.abs(measured - expected).max() < 0.012
    assert np.abs(measured - other).max() > 0.1


def test_noise_per_sample_adds_up() -> None:
    x, g = torch.zeros(9, 20, 4, 4), torch.zeros(9, 20, 2, 2)
    config = literal.Pipeline(kernel=(3, 3), size=(4, 4), bound=1.0, noise_multiplier=1.0)
    generator = torch.Generator().manual_seed(4)
    once = literal.gredp(x, g, config, generator)
    each = literal.gredp(x, g, replace(config, noise_point="per_sample"), generator)
    assert float(each.std() / once.std()) == pytest.approx(3, rel=0.03)


def test_refuses() -> None:
    x, g = torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 2, 2)
    plain = literal.Pipeline(kernel=(3, 3), size=(4, 4), bound=1.0)
    banded = replace(plain, band=Band((4, 4), "shells", 0.5))
    for run, config, name in (
        (literal.gredp, banded, "config.band"),
        (literal.spectral_dp, plain, "config.band"),
        (literal.spectral_dp, replace(banded, stored=True), "config.band"),
        (literal.batched, replace(plain, noise=(1.0, 0.0)), "config"),
    ):
        with pytest.raises(InvalidInput) as raised:
            run(x, g, config, GENERATOR)
        assert raised.value.name == name
    with pytest.raises(InvalidInput, match="at least one sample"):
        literal.gredp(x[:0], g[:0], plain, GENERATOR)
