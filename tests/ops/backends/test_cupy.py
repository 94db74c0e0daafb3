"""The cupy backend without CuPy: a stand-in records what would be launched.

The emulator records what the compiled launchers start; both must be the same kernels with the same
grids, blocks and arguments, call by call.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cases import SMALL_CASES, ClipCase
from dpkern.base import dispatch
from dpkern.base.errors import BackendError
from dpkern.base.rng import Purpose
from dpkern.ops import clip, coef, noise, symbols, testing, update
from dpkern.ops.backends import _cupy_sources, cpu, cuda, cupy
from dpkern.ops.backends._cupy_kernels import Launchers
from dpkern.ops.backends._launch import Launch
from dpkern.ops.ghost import explicit
from tests.ops.backends.fake_cupy import CUDADriverError, CUDARuntimeError, FakeCupy, plain

STREAM = testing.KEY.stream(Purpose.NOISE, 1)


@cache
def functions(path: str) -> dict[int, str]:
    """Functions of the emulator by their place in it."""
    listed = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout
    rows = (line.split(" ", 2) for line in listed.splitlines() if "_kernel" in line)
    return {int(place, 16): plain(name) for place, kind, name in rows if kind in "tT"}


class Both:
    """Every call on the emulated launchers and on CuPy's, compared."""

    def __init__(self, emulator: ModuleType) -> None:
        self.emulator, self.fake = emulator, FakeCupy()
        self.other = Launchers(self.fake)
        self.kernels: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.emulator.record(on=True)
            result = getattr(self.emulator, name)(*args)
            started = self.emulator.recorded()
            self.emulator.record(on=False)
            self.fake.launches.clear()
            assert getattr(self.other, name)(*args) == result
            assert len(self.fake.launches) == len(started)
            for (place, *sizes, wanted), (kernel, *mine, given) in zip(
                started, self.fake.launches, strict=True
            ):
                assert kernel == functions(self.emulator.__file__)[place]
                assert mine == sizes
                self.kernels.add(kernel)
                for packed, argument in zip(wanted, given, strict=True):
                    assert len(packed) == argument.nbytes, kernel
                    assert np.frombuffer(packed, argument.dtype) == argument, kernel
            return result

        return call


@pytest.fixture
def both() -> Iterator[Both]:
    """The cupy backend on both launchers."""
    module = cuda._emulated()
    if isinstance(module, str):
        pytest.skip(f"cuda {module}")
    launchers = Both(module)
    kernels = Launch(launchers, "cupy", "cpu", cpu._on_cpu).kernels()
    with dispatch.replaced("cupy", kernels):
        yield launchers
    module.record(on=False)


FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
LAWS = ("gaussian", "laplace")


def clip_everything() -> None:
    """Every kind of clipping, with a batch large enough for several splits of its rows."""
    for dtype, style, arithmetic in product(FLOATS, ("flat", "per_layer"), clip.ARITHMETIC):
        columns = (5, 4100)
        ClipCase(batch=70, columns=columns, dtype=dtype, style=style, arithmetic=arithmetic).verify(
            "cupy"
        )
    for dtype in clip.GRAD_DTYPES:
        given: dict[str, Any] = {"arithmetic": "exact", "unit": 2.0**-20, "backend": "cupy"}
        totals = [torch.zeros(5, dtype=torch.int64)]
        clip.clip_sum(torch.ones(3, 5, dtype=dtype), 1.0, out=totals, **given)


def contract_everything() -> None:
    """Explicit gradients of every type, with and without entries."""
    for batch, dtype in product((0, 3, 70), FLOATS):
        grads = [torch.ones(batch, 5, dtype=dtype), torch.ones(batch, 0, dtype=dtype)]
        squares = [explicit.explicit_norm(grads, backend="cupy")]
        factors, _ = explicit.clip_factors(squares, 1.0, dtype=dtype, backend="cupy")
        outs = [torch.zeros(part.shape[1:], dtype=dtype) for part in grads]
        explicit.contract(grads, factors, outs, backend="cupy")


def update_everything() -> None:
    """Every law with every type of parameters and sums."""
    rule = update.SGD(lr=0.1)
    rounding = testing.KEY.stream(Purpose.ROUNDING, 1)
    for dtype, law in product(FLOATS, LAWS):
        for kind in (*INTEGERS, dtype):
            params, sums = [torch.ones(600, dtype=dtype)], [torch.ones(600, dtype=kind)]
            drawn = update.Noise(
                distribution=law, scales=(1.0,), stream=STREAM, positions=(9,), rounding=rounding
            )
            state = rule.init(params)
            update.step(params, sums, rule=rule, state=state, noise=drawn, backend="cupy")
            if kind is dtype:
                update.step(params, sums, rule=rule, state=state, backend="cupy")
            values, bits = torch.zeros(609, dtype=torch.int32), torch.zeros(609, dtype=torch.int16)
            ahead = replace(drawn, draws=update.Draws(0, values, bits))
            update.step(params, sums, rule=rule, state=state, noise=ahead, backend="cupy")
    update.advance(update.clock(rule, 0, "cpu"), rule=rule, backend="cupy")


def randomize_everything() -> None:
    """Symbols of every type."""
    for dtype in (torch.uint8, *INTEGERS):
        for count, position in ((0, 3), (5000, 3)):
            given: dict[str, Any] = {"keep": 2**63, "categories": 3, "position": position}
            values = torch.ones(count, dtype=dtype)
            symbols.randomize(values, stream=STREAM, backend="cupy", **given)


def perturb_everything() -> None:
    """Coefficients of every type, by every source of noise, with and without entries."""
    rounding = testing.KEY.stream(Purpose.ROUNDING, 1)
    drawn = coef.Noise(scale=1.0, stream=STREAM, rounding=rounding, position=9)
    values, bits = torch.zeros(80000, dtype=torch.int32), torch.zeros(80000, dtype=torch.int16)
    ahead = replace(drawn, draws=coef.Draws(0, values, bits))
    for dtype, shape in product(FLOATS, ((0, 7), (3, 0), (700, 7), (2, 9000))):
        x, shift = torch.ones(shape, dtype=dtype), torch.ones(shape[0], dtype=dtype)
        scaled = replace(drawn, scale=torch.ones(shape[0]))
        for given in (None, drawn, ahead, scaled):
            coef.perturb(x, form="taylor", noise=given, backend="cupy")
            coef.quadratic(x, x, form="taylor", noise=given, shift=shift, backend="cupy")
    for dtype, width in product(FLOATS, (0, 30)):
        h, y = torch.ones(5, width, dtype=dtype), torch.ones(5, 3, dtype=dtype)
        for given in (None, drawn, ahead, replace(drawn, scale=torch.ones(5))):
            coef.expanded(h, y, torch.ones(3, width, dtype=dtype), noise=given, backend="cupy")


def test_every_launch_is_that_of_the_compiled_launchers(both: Both) -> None:
    for case in SMALL_CASES:
        case.verify("cupy")
    clip_everything()
    contract_everything()
    update_everything()
    randomize_everything()
    perturb_everything()
    noise.keystream(STREAM, first_block=3, blocks=257, backend="cupy")
    for law in LAWS:
        noise.lattice_draws(STREAM, position=7, count=5000, distribution=law, backend="cupy")
    noise.rounding_bits(STREAM, position=7, count=5000, backend="cupy")
    listed = {name for names in _cupy_sources.KERNELS.values() for name in names}
    assert both.kernels == listed


def test_another_grid_is_noticed(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpkern.ops.backends._cupy_launch.TILES_PER_BLOCK", 4)
    with pytest.raises(AssertionError):
        noise.lattice_draws(STREAM, position=0, count=5000, backend="cupy")


def test_another_argument_is_noticed(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpkern.ops.backends._cupy_kernels._room", lambda count, size: count * size)
    with pytest.raises(AssertionError):
        ClipCase(batch=3, columns=(5,)).verify("cupy")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """CuPy, a CUDA build of torch and a device, none of which are there."""
    found = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return found


def run(fake: FakeCupy) -> None:
    """A call that fails as the stand-in says."""
    kernels = Launch(Launchers(fake), "cupy", "cpu", cpu._on_cpu).kernels()
    with dispatch.replaced("cupy", kernels):
        noise.add_noise(torch.zeros(3, dtype=torch.int32), stream=STREAM, backend="cupy")


def test_a_failed_launch(fake: FakeCupy) -> None:
    fake.fails = CUDADriverError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")
    with pytest.raises(BackendError, match=r"cupy kernel: .* error 2, CUDA_ERROR_OUT_OF_MEMORY"):
        run(fake)


# why it is missing


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    ok, reason = cupy.load()
    assert not ok
    assert reason.startswith("needs CuPy (")
    assert reason.endswith("pip install cupy-cuda13x")


def test_with_everything(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []
    monkeypatch.setattr(dispatch, "register", lambda name, *_: registered.append(name))
    assert cupy.load() == (True, "")
    assert "noise.add_noise" in registered


def test_an_old_cupy(fake: FakeCupy) -> None:
    fake.cuda.Stream = SimpleNamespace()
    fake.__version__ = "13.6.0"
    assert cupy.load() == (False, "needs CuPy 14 or later, found 13.6.0")


def test_torch_without_cuda(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cupy.load() == (False, f"needs a CUDA build of torch, found {torch.__version__}")


def test_no_device(fake: FakeCupy) -> None:
    fake.devices = 0
    assert cupy.load() == (False, "finds no device")

    def count() -> int:
        raise CUDARuntimeError("cudaErrorInsufficientDriver: too old")

    fake.cuda.runtime.getDeviceCount = count
    assert cupy.load() == (False, "finds no device: cudaErrorInsufficientDriver: too old")


def test_no_compiler(fake: FakeCupy) -> None:
    def version() -> tuple[int, int]:
        raise RuntimeError("libnvrtc.so.13: not found")

    fake.cuda.nvrtc.getVersion = version
    ok, reason = cupy.load()
    assert not ok
    assert reason.startswith("needs the CUDA run-time compiler (libnvrtc.so.13: not found)")
