"""Kernels on a CUDA device against the CPU's: equal bits where the contract says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern.base import dispatch
from dpkern.base.errors import BackendError
from dpkern.base.rng import Purpose
from dpkern.ops import clip, coef, ghost, noise, testing, update
from dpkern.ops.ghost import explicit
from dpkern.step.noise_tables import Layout, RingPrefetch

STREAM = testing.KEY.stream(Purpose.NOISE, 1)
ROUNDING = testing.KEY.stream(Purpose.ROUNDING, 1)
FLOATS = (torch.float32, torch.float64)
RULES = (
    update.SGD(lr=0.1, momentum=0.9, nesterov=True),
    update.AdamW(lr=1e-3),
)


def _parameter(name: str) -> Any:
    available, reason = dispatch.availability(name)
    return pytest.param(
        name,
        marks=[pytest.mark.gpu, pytest.mark.skipif(not available, reason=f"{name} {reason}")],
    )


on_devices = pytest.mark.parametrize("name", [_parameter(n) for n in ("cuda", "cupy")])


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Reproducible values of a few hundred."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (300 * values).to(dtype)


@on_devices
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, *FLOATS], ids=str)
def test_noise_has_the_bits_of_the_cpu(name: str, law: str, dtype: torch.dtype) -> None:
    given: dict[str, Any] = {"stream": STREAM, "distribution": law, "position": 2**33 - 5}
    if dtype in FLOATS:
        given |= {"scale": 1.5, "rounding": ROUNDING}
    x = random(100_003, dtype=dtype)
    got = noise.add_noise(x.cuda(), backend=name, **given)
    assert torch.equal(got.cpu(), noise.add_noise(x, backend="cpu", **given))


def smallest(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x`` with the smallest noise there is."""
    given: dict[str, Any] = {"stream": STREAM, "scale": 2.0**-104, "rounding": ROUNDING}
    return noise.add_noise(x, backend=name, **given).cpu()


def test_numbers_that_are_flushed_to_zero_change_bits_of_noise() -> None:
    x = torch.full((1_000_000,), 1.1e-38)
    assert (smallest(x.clone(), "cpu") != smallest(torch.zeros_like(x), "cpu")).sum() > 10


@on_devices
def test_small_numbers_are_not_flushed_to_zero(name: str) -> None:
    x = torch.full((1_000_000,), 1.1e-38)
    assert torch.equal(smallest(x.cuda(), name), smallest(x.clone(), "cpu"))


@on_devices
def test_draws_have_the_bits_of_the_cpu(name: str) -> None:
    for law in ("gaussian", "laplace"):
        place: dict[str, Any] = {"position": 77, "count": 1_000_000, "distribution": law}
        want = noise.lattice_draws(STREAM, backend="cpu", **place)
        got = noise.lattice_draws(STREAM, backend=name, device="cuda", **place)
        assert got.is_cuda
        assert torch.equal(got.cpu(), want)
    place = {"position": 77, "count": 1_000_000}
    want = noise.rounding_bits(ROUNDING, backend="cpu", **place)
    assert torch.equal(noise.rounding_bits(ROUNDING, backend=name, **place), want)


@on_devices
def test_a_ring_on_its_own_stream_changes_no_bit(name: str) -> None:
    rule, sizes, positions = RULES[0], (2_000_003,), (5,)
    results = []
    for ahead in (False, True):
        params, sums = [random(n).cuda() for n in sizes], [random(n).cuda() for n in sizes]
        state = rule.init(params)
        place = Layout.of("gaussian", positions, sizes, "cuda", rounding=True)
        with RingPrefetch() as ring:
            ring.bind(testing.KEY, place, backend=name)
            for step in range(20):
                drawn = update.Noise(
                    distribution="gaussian",
                    scales=(1.0,),
                    stream=testing.KEY.stream(Purpose.NOISE, step),
                    positions=positions,
                    rounding=testing.KEY.stream(Purpose.ROUNDING, step),
                )
                if ahead:
                    drawn = replace(drawn, draws=ring.take(step))
                update.step(params, sums, rule=rule, state=state, noise=drawn, backend=name)
        results.append(params[0].cpu())
    assert torch.equal(*results)


@on_devices
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_coefficients_have_the_bits_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, z, y = (
        torch.rand(*shape, generator=generator, dtype=dtype)
        for shape in ((3000, 30), (3000, 30), (3000, 4))
    )
    results = []
    for device, backend in (("cpu", "cpu"), ("cuda", name)):
        scale = torch.linspace(0.1, 2, len(x)).to(device)
        drawn = coef.Noise(scale=scale, stream=STREAM, rounding=ROUNDING, position=77)
        given: dict[str, Any] = {"noise": drawn, "backend": backend}
        tensors = [part.to(device) for part in (x, z, y, 8 * z[:4].contiguous())]
        made = (
            *coef.perturb(tensors[0], form="printed", **given),
            *coef.quadratic(tensors[1], tensors[0], form="taylor", **given),
            *coef.expanded(tensors[0], tensors[2], tensors[3], **given),
        )
        results.append([tensor.cpu() for tensor in made])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_devices
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("kind", [torch.int32, torch.float32], ids=str)
def test_updates_have_the_bits_of_the_cpu(name: str, rule: Any, kind: torch.dtype) -> None:
    drawn = update.Noise(
        distribution="gaussian",
        scales=(1.0, 2.0),
        stream=STREAM,
        positions=(9, 200_000),
        rounding=ROUNDING,
    )
    results = []
    for device, backend in (("cpu", "cpu"), ("cuda", name)):
        params = [random(n).to(device) for n in (70_001, 512)]
        sums = [random(n, dtype=kind).to(device) for n in (70_001, 512)]
        state = rule.init(params)
        for _ in range(2):
            update.step(params, sums, rule=rule, state=state, noise=drawn, backend=backend)
        kept = [*params, *(buffer for group in state.buffers.values() for buffer in group)]
        results.append([tensor.cpu() for tensor in kept])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_devices
@pytest.mark.parametrize("style", clip.STYLES)
def test_sums_are_those_of_the_cpu(name: str, style: str) -> None:
    grads = [random(130, 5000), random(130, 7)]
    each = style == "per_layer"
    bound: Any = (1.0, 2.0) if each else 1.0
    unit: Any = (2.0**-20, 2.0**-19) if each else 2.0**-20
    for given in ({}, {"arithmetic": "exact", "unit": unit}):
        want = clip.clip_sum(grads, bound, style=style, backend="cpu", **given)
        on_device = [g.cuda() for g in grads]
        got = clip.clip_sum(on_device, bound, style=style, backend=name, **given)
        testing.assert_close("norms", got.norms.cpu(), want.norms, 1e-12)
        for a, b in zip(got.sums, want.sums, strict=True):
            testing.assert_close("sum", a.cpu(), b, 0.0 if given else 1e-5)


@on_devices
def test_explicit_gradients_are_clipped_as_on_the_cpu(name: str) -> None:
    results = []
    for device, backend in (("cpu", "cpu"), ("cuda", name)):
        grads = [random(130, 40, 9).to(device), random(130, 9, 40).to(device).transpose(1, 2)]
        squares = [explicit.explicit_norm(grads, backend=backend)]
        factors, _ = explicit.clip_factors(squares, 1.0, dtype=torch.float32, backend=backend)
        outs = [torch.zeros(40, 9, device=device) for _ in grads]
        explicit.contract(grads, factors, outs, backend=backend)
        results.append([t.cpu() for t in (*squares, *outs)])
    for got, want in zip(*results, strict=True):
        testing.assert_close("result", got, want, 1e-5)


@on_devices
def test_another_stream_waits_for_nothing_else(name: str) -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(100_000, dtype=torch.int32, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        noise.add_noise(x, stream=STREAM, backend=name)
    side.synchronize()
    want = noise.add_noise(torch.zeros(100_000, dtype=torch.int32), stream=STREAM, backend="cpu")
    assert torch.equal(x.cpu(), want)


@on_devices
def test_memory_that_is_not_there(name: str) -> None:
    free, _ = torch.cuda.mem_get_info()
    grads = torch.zeros(1, free // 8, device="cuda").expand(64, -1)
    with pytest.raises(BackendError, match="GPU memory"):
        clip.sample_norm(grads, backend=name)


@pytest.mark.parametrize("name", [_parameter("triton")])
@pytest.mark.parametrize("positions", [129, 192, 197, 200])
@pytest.mark.parametrize("batch", [3, 64, 140])
def test_norms_of_layers_that_share_launches(name: str, positions: int, batch: int) -> None:
    """Five layers, of which the last launch has fewer than the others; one sample is NaN."""
    layers = [
        [random(batch, positions, n).div(30).bfloat16().cuda() for n in (448, 320)]
        for _ in range(5)
    ]
    layers[3][0][1, positions - 1, 5] = torch.nan
    a, g = zip(*layers, strict=True)
    found = ghost.linear_norms(list(a), list(g), backend=name)
    true = sum(
        torch.einsum("btp,btd->bpd", y.double(), x.double()).square().sum((1, 2)) for x, y in layers
    )
    assert torch.isfinite(found).logical_not().nonzero().flatten().tolist() == [1]
    kept = torch.isfinite(found)
    assert (found[kept] >= true[kept]).all()
    assert (found[kept] <= 1.005 * true[kept]).all()


@pytest.mark.parametrize("name", [_parameter("triton")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chained_sums_agree_with_the_reference(name: str, dtype: torch.dtype) -> None:
    """At the edges of tiles and chunks, in several ranges of samples; one of them is NaN."""
    batch, positions, d, p = 70, 197, 368, 496
    a, g = (random(batch, positions, n).div(300).to(dtype).cuda() for n in (d, p))
    factors = torch.linspace(0, 1, batch).roll(5).cuda()
    a[5] = torch.nan
    out = torch.zeros(p, d, device="cuda")
    ghost.linear_sum(a, g, factors, out, backend=name)
    a[5] = 0
    each = "b,btp,btd->pd", factors.double(), g.double(), a.double()
    sizes = torch.einsum(each[0], *(x.abs() for x in each[1:]))
    assert ((out - torch.einsum(*each)).abs() <= 1e-4 * sizes).all()
    a, g = a[:5], g[:5]
    true = torch.einsum("btp,btd->bpd", g.double(), a.double()).square().sum((1, 2))
    for route in ("gram", "direct"):
        found = ghost.linear_norm(a, g, route=route, backend=name)  # type: ignore[arg-type]
        assert (found >= true).all()
        assert (found <= 1.005 * true).all()
