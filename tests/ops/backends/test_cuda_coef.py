"""Coefficients by the CUDA kernels without a GPU: where their blocks, windows and packs end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from dpkern.base.errors import BackendError
from dpkern.base.rng import Key, Purpose
from dpkern.ops import coef, noise, testing
from dpkern.ops.backends import _launch_coef, cuda
from tests.ops import descents

KEY = Key.from_unsafe_seed(0, rounds=8)
STREAM, ROUNDING = KEY.stream(Purpose.LAPLACE, 3), KEY.stream(Purpose.ROUNDING, 3)
FLOATS = (torch.float32, torch.float64)
SHAPES = ((3, 3100), (1, 1536), (2, 1537), (110, 14), (1600, 1), (8, 512), (200, 601))
"""Several windows, one exactly, one entry more; rows of two blocks; tiles and packs to the end; and
enough for some coefficients to depend on their rounding bits."""
POSITIONS = {"stream": 511, "aligned": 1024, "odd": 37}


@pytest.fixture(params=[False, True], ids=["forward", "reverse"])
def emulator(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The emulated kernels, with the threads of a block run in this order."""
    module = cuda._emulated()
    if isinstance(module, str):
        pytest.skip(f"cuda {module}")
    with testing.emulated("cuda"):
        module.order(reverse=request.param)
        yield module
    module.order(reverse=False)


def given(shape: tuple[int, int], dtype: torch.dtype, source: str, scaled: bool) -> dict[str, Any]:
    """Arguments of the ops that make their noise in this way."""
    if source == "none":
        return {"form": "printed", "noise": None}
    n, position = shape[0] * shape[1], POSITIONS[source]
    scale = torch.linspace(0.1, 30, shape[0]) if scaled else 0.75
    made = coef.Noise(scale=scale, stream=STREAM, rounding=ROUNDING, position=position)
    if source == "stream":
        return {"form": "printed", "noise": made}
    return {"form": "printed", "noise": ahead(made, n, 1)}


def ahead(made: coef.Noise, linear: int, width: int) -> coef.Noise:
    """The same noise, made before, from a little before it on."""
    first = made.position - (512 if made.position % 512 == 0 else 3)
    count = coef.quadratic_position(made.position, linear) + linear * width - first
    place = {"position": first, "count": count}
    values = noise.lattice_draws(STREAM, distribution="laplace", **place)
    draws = coef.Draws(first, values, noise.rounding_bits(ROUNDING, **place))
    return replace(made, draws=draws)


def same(a: Any, b: Any) -> bool:
    """The same bits, signs of zero included."""
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64}
    return all(
        torch.equal(x.view(kinds[x.dtype]), y.view(kinds[y.dtype]))
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("scaled", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("source", ["none", "stream", "aligned", "odd"])
def test_the_bits_are_the_cpus(emulator: ModuleType, source: str, scaled: bool) -> None:
    for i, shape in enumerate(SHAPES):
        dtype = FLOATS[i % 2]
        generator = torch.Generator().manual_seed(1)
        x = torch.rand(shape, generator=generator, dtype=dtype)
        z = torch.randn(shape, generator=generator, dtype=dtype)
        shift = torch.linspace(-1, 2, shape[0], dtype=dtype) if scaled else None
        what = given(shape, dtype, source, scaled)
        got, want = (coef.perturb(x, backend=b, **what) for b in ("cuda", "cpu"))
        assert same(got, want), shape
        got, want = (coef.quadratic(z, x, shift=shift, backend=b, **what) for b in ("cuda", "cpu"))
        assert same(got, want), shape


@pytest.mark.parametrize("source", ["none", "stream", "odd"])
def test_tensors_may_begin_anywhere(emulator: ModuleType, source: str) -> None:
    for shape, dtype in (((2, 1601), torch.float32), ((9, 512), torch.float64)):
        entries = shape[0] * shape[1] + 1
        x, z, a1, a2 = (torch.rand(entries, dtype=dtype)[1:].view(shape) for _ in range(4))
        what = given(shape, dtype, source, False)
        want = coef.perturb(x.clone(), backend="cpu", **what)
        assert same(
            coef.perturb(x, out=coef.QuadraticCoefficients(a1, a2), backend="cuda", **what), want
        )
        want = coef.quadratic(z.clone(), x.clone(), backend="cpu", **what)
        outs = torch.empty(shape[0] + 1, dtype=torch.float64)[1:], a1
        assert same(coef.quadratic(z, x, out=outs, backend="cuda", **what), want)


@pytest.mark.parametrize("source", ["none", "stream", "aligned"])
def test_hidden_layers_have_the_cpus_bits(emulator: ModuleType, source: str) -> None:
    # More linear coefficients than a block holds at a time; rows that are cut between classes.
    for shape, dtype in (((1, 120, 30), torch.float32), ((18, 3, 61), torch.float64)):
        records, classes, width = shape
        generator = torch.Generator().manual_seed(1)
        h, y = (torch.rand(records, n, generator=generator, dtype=dtype) for n in (width, classes))
        w = torch.randn(classes, width, generator=generator, dtype=dtype)
        made = given((records, classes * width), dtype, source, source == "stream")["noise"]
        if source == "aligned":
            made = ahead(made, records * classes * width, width)
        got, want = (coef.expanded(h, y, w, noise=made, backend=b) for b in ("cuda", "cpu"))
        assert same(got, want), shape


def test_layers_wider_than_a_block_holds_are_refused(emulator: ModuleType) -> None:
    h, y, w = torch.zeros(1, 3585), torch.zeros(1, 1), torch.zeros(1, 3585)
    with pytest.raises(BackendError, match="at most 3584 features"):
        coef.expanded(h, y, w, backend="cuda")


@pytest.mark.parametrize("noise", ["growing", "constant", "none"])
def test_runs_of_autoencoders_have_the_cpus_bits(emulator: ModuleType, noise: str) -> None:
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
        ((3, 2, 14, 7), torch.float32),
        ((2, 5, 14, 7), torch.float64),
        ((2, 16, 9, 8), torch.float32),
        ((2, 3, 30, 13), torch.float32),
        ((1, 2, 16, 16), torch.float64),
        ((1, 1, 1, 1), torch.float64),
    )
    for shape, dtype in shapes:
        what = descents.made(shape, dtype=dtype, noise=noise)
        assert torch.equal(descents.run(what, "cuda"), descents.run(what, "cpu")), shape
    what["stopped"][0] = 1
    assert torch.equal(descents.run(what, "cuda"), descents.run(what, "cpu"))


def test_a_run_stops_with_any_of_its_users(emulator: ModuleType) -> None:
    for seed in (0, 5):
        emulator.shuffle(seed)
        what = descents.made((6, 3, 14, 7), noise="none") | {"lr": 1.0, "limit": 30.0}
        found = descents.run(what, "cuda")
        assert torch.equal(found, descents.run(what, "cpu"))
        assert 0 < found[:, -1].sum() < 6
    emulator.shuffle(0)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 17, 14, 7), torch.float32),
        ((1, 2, 33, 7), torch.float32),
        ((1, 2, 14, 17), torch.float32),
        ((1, 2, 17, 7), torch.float64),
    ],
    ids=["users", "features", "units", "doubles"],
)
def test_autoencoders_without_registers_are_refused(
    emulator: ModuleType, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    with pytest.raises(BackendError, match="has registers for 16 users"):
        descents.run(descents.made(shape, dtype=dtype), "cuda")


def test_packs_only_where_every_array_begins_at_sixteen_bytes() -> None:
    def aligned(source: str, *, skip: int = 0) -> bool:
        x = torch.zeros(4100)[skip:][:4096].view(64, 64)
        what = given((64, 64), torch.float32, source, False)
        packed, _ = _launch_coef.plan(64, 64, x.dtype, what["form"], what["noise"], (x,))
        return bool(packed["aligned16"])

    assert aligned("none")
    assert aligned("aligned")
    assert not aligned("none", skip=1)
    assert not aligned("odd")


@pytest.mark.parametrize("columns", [0, 1, 4096])
def test_one_launch_for_each_call(emulator: ModuleType, columns: int) -> None:
    x = torch.zeros(3, columns)
    what = given((3, columns), torch.float32, "stream", True)
    for call in (
        lambda: coef.perturb(x, backend="cuda", **what),
        lambda: coef.quadratic(x, x, backend="cuda", **what),
    ):
        before = emulator.launches()
        call()
        assert emulator.launches() - before == (columns > 0)
