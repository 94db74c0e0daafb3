"""Norms and noise that differ coordinate by coordinate, and draws made ahead, on device kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpkern.base.rng import Purpose
from dpkern.ops import _cdt, clip, noise, testing
from dpkern.ops._draws import CdtDraws, Draws, SampleReads
from tests.ops.backends.every_backend import EMULATED, PARAMETERS, running

STREAM = testing.KEY.stream(Purpose.NOISE, 1)
ROUNDING = testing.KEY.stream(Purpose.ROUNDING, 1)
FLOATS = (torch.float32, torch.float64)
on_devices = pytest.mark.parametrize("name", [p for p in PARAMETERS if p.values[0] in EMULATED])


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def scales(n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """From the smallest to the largest scale that there may be."""
    powers = torch.linspace(-103.9, 115.9, n, dtype=torch.float64)
    return torch.exp2(powers).to(dtype)


@on_devices
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scales_of_their_own_give_the_bits_of_the_reference(
    name: str, law: str, dtype: torch.dtype
) -> None:
    n, position = 2000, 2**33 - 700
    given: dict[str, Any] = {
        "stream": STREAM, "rounding": ROUNDING, "distribution": law, "position": position,
        "scale": scales(n),
    }  # fmt: skip
    x = (random(n) * given["scale"]).to(dtype)
    x[::97] = float("nan")
    x[5] = float("inf")
    with running(name):
        got = noise.add_noise(x.clone(), backend=name, **given)
    want = noise.add_noise(x.clone(), backend="reference", **given)
    assert torch.equal(got, want)
    assert torch.isfinite(got).all()
    assert len(set(got.tolist())) > n / 4


@on_devices
def test_one_scale_for_all_coordinates_is_the_same_as_each_its_own(name: str) -> None:
    given: dict[str, Any] = {"stream": STREAM, "rounding": ROUNDING}
    x = random(3, 300, dtype=torch.float32)
    with running(name):
        one = noise.add_noise(x.clone(), scale=1.7, backend=name, **given)
        each = torch.full_like(x, 1.7, dtype=torch.float64)
        all_of_them = noise.add_noise(x.clone(), scale=each, backend=name, **given)
    assert torch.equal(one, all_of_them)


def sources(n: int) -> dict[str, Draws]:
    values = noise.lattice_draws(STREAM, position=40, count=n)
    bits = noise.rounding_bits(ROUNDING, position=40, count=n)
    table = _cdt.packed([1 << 31, 3 << 30], word_bits=32)
    samples = torch.arange(-50, 51, dtype=torch.int16)
    return {
        "prefetched": Draws(40, values),
        "with bits": Draws(40, values, bits),
        "samples": SampleReads(40, samples, cursor=3, shift=16),
        "cumulative": CdtDraws(40, table, stream=testing.KEY.stream(Purpose.NOISE, 7)),
    }


@pytest.mark.parametrize("source", sources(1))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, *FLOATS], ids=str)
def test_draws_made_ahead_are_added_on_the_device(source: str, dtype: torch.dtype) -> None:
    """Without them a mapped release would be made in the reference."""
    found = testing.emulation("cuda")
    if isinstance(found, str):
        pytest.skip(f"cuda {found}")
    n = 900
    draws = sources(n)[source]
    given: dict[str, Any] = {"stream": STREAM, "position": 60, "draws": draws}
    if dtype in FLOATS:
        given |= {"scale": 1.5, "rounding": ROUNDING}
    x = (300 * random(n - 100)).to(dtype)
    with testing.emulated("cuda"):
        got = noise.add_noise(x.clone(), backend="cuda", **given)
    assert torch.equal(got, noise.add_noise(x.clone(), backend="reference", **given))
    assert not torch.equal(got, x)


SHAPES = [(3, 5000), (3,), (3, 4, 5), (3, 0), (3, 4096)]


@on_devices
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("given", ["scale", "center", "both"])
def test_whitened_norms_are_those_of_float64(
    name: str, given: str, dtype: torch.dtype, p: clip.Power
) -> None:
    grads = [random(*shape).to(dtype) for shape in SHAPES]
    center = [random(*shape[1:]) + 0.5 for shape in SHAPES]
    scale = [random(*shape[1:]).abs() + 0.5 for shape in SHAPES]
    maps: dict[str, Any] = {"scale": scale, "center": center}
    chosen = maps if given == "both" else {given: maps[given]}
    want = []
    for g, c, s in zip(grads, center, scale, strict=True):
        wide = g.double() - (c if "center" in chosen else 0)
        want.append((wide / (s if "scale" in chosen else 1)).reshape(3, -1))
    with running(name):
        got = clip.sample_norm(grads, p=p, backend=name, **chosen)
    rows = torch.cat(want, 1)
    testing.assert_close("norms", got, torch.linalg.vector_norm(rows, ord=p, dim=1), 1e-12)


@on_devices
def test_a_sample_that_is_not_finite_has_no_finite_whitened_norm(name: str) -> None:
    grads = random(3, 70, dtype=torch.float32)
    grads[1, 69] = float("nan")
    with running(name):
        got = clip.sample_norm(grads, scale=torch.full((70,), 2.0), backend=name)
        none = clip.sample_norm(grads[:0], scale=torch.full((70,), 2.0), backend=name)
    assert torch.isfinite(got).tolist() == [True, False, True]
    assert none.shape == (0,)
