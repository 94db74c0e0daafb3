"""The cupy backend without CuPy: a stand-in records what would be launched, the emulator runs it.

Every kernel is started by both, with the same grid, block and arguments; what the emulator computes
is compared with the ops' references.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base import dispatch
from dpkern.base.errors import BackendError
from dpkern.base.rng import Purpose
from dpkern.ops import clip, coef, noise, spectral, symbols, testing, update
from dpkern.ops._draws import CdtDraws, SampleReads
from dpkern.ops.backends import _kernels as table
from dpkern.ops.backends import _launch, _start, cuda, cupy
from dpkern.ops.backends._cupy_launch import Compiling
from dpkern.ops.backends._extension import on_cpu
from dpkern.ops.backends._kernels import CudaKernel
from dpkern.ops.backends._start import Device
from dpkern.ops.ghost import explicit
from dpkern.step.noise_tables._cdt_law import CdtLaw
from tests.ops import descents
from tests.ops.backends.fake_cupy import CUDADriverError, CUDARuntimeError, FakeCupy
from tests.ops.small_cases import SMALL_CASES, ClipCase
from tests.ops.spectral_cases import CASES as CONVOLUTIONS
from tests.ops.spectral_cases import Case, correlation_map, taps
from tests.ops.test_whitened_bins import matrices

STREAM = testing.KEY.stream(Purpose.NOISE, 1)


class Both:
    """Starts every kernel in the emulator, and as the cupy backend does; compares the two."""

    def __init__(self, emulator: ModuleType) -> None:
        self.emulated, self.fake = cuda.ModuleLauncher(emulator), FakeCupy()
        self.other = Compiling(self.fake)
        self.kernels: set[str] = set()

    def error_text(self, error: int) -> str:
        return self.emulated.error_text(error)

    def preload(self) -> int:
        return self.emulated.preload()

    def start(
        self,
        kernel: CudaKernel,
        instance: tuple[str, ...],
        grid: tuple[int, int],
        arguments: list[Any],
        stream: int,
    ) -> int:
        self.fake.launches.clear()
        assert self.other.start(kernel, instance, grid, arguments, stream) == 0
        ((name, blocks, threads, given),) = self.fake.launches
        assert name == kernel.symbol(instance)
        assert (blocks, threads) == ((*grid, 1), kernel.threads)
        assert all(argument.size == 1 for argument in given)  # CuPy passes these by value
        packed = [argument.tobytes() for argument in given]
        assert packed == [argument.tobytes() for argument in arguments]
        self.kernels.add(name)
        return self.emulated.start(kernel, instance, grid, arguments, stream)


@pytest.fixture
def both() -> Iterator[Both]:
    """The cupy backend on both starters."""
    module = cuda._emulated()
    if isinstance(module, str):
        pytest.skip(f"cuda {module}")
    starter = Both(module)
    kernels = _launch.kernels(Device(starter, "cupy", "cpu", on_cpu))
    with dispatch.replaced("cupy", kernels):
        yield starter


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


READS = SampleReads(0, torch.arange(700, dtype=torch.int16), shift=10)


def read_from_tables() -> None:
    """Draws of tables of either kind, and all that adds them."""
    samples = torch.arange(700, dtype=torch.int16)
    made = [SampleReads(0, samples, shift=10), SampleReads(0, samples.int(), shift=10)]
    for law in LAWS:
        table = CdtLaw(law, 32).table
        made.append(CdtDraws(0, table, stream=STREAM, distribution=law))
    for draws in made:
        noise.source_draws(draws, position=7, count=5000, backend="cupy")
    given: dict[str, Any] = {"stream": STREAM, "draws": READS, "backend": "cupy"}
    for dtype in INTEGERS:
        noise.add_noise(torch.ones(600, dtype=dtype), **given)
    rounding = testing.KEY.stream(Purpose.ROUNDING, 1)
    for dtype, scale in product(FLOATS, (1.0, torch.full((600,), 2.0))):
        noise.add_noise(torch.ones(600, dtype=dtype), scale=scale, rounding=rounding, **given)


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
            for draws in (update.Draws(0, values, bits), READS):
                made = replace(drawn, draws=draws)
                update.step(params, sums, rule=rule, state=state, noise=made, backend="cupy")
    update.advance(update.step_counter(rule, 0, "cpu"), rule=rule, backend="cupy")


def update_in_other_coordinates() -> None:
    """Every law with every type of parameters and of sums that are led back."""
    rule, same = update.SGD(lr=0.1), torch.eye(9, dtype=torch.float64)
    rounding = testing.KEY.stream(Purpose.ROUNDING, 1)
    maps = update.PairMaps((update.PairMap(signal=same, back=same),)).only_back
    for dtype, law in product(FLOATS, LAWS):
        for kind in (*INTEGERS, dtype):
            params, sums = [torch.ones(60, 9, dtype=dtype)], [torch.ones(60, 9, dtype=kind)]
            drawn = update.Noise(
                distribution=law, scales=(1.0,), stream=STREAM, positions=(0,), rounding=rounding
            )
            for made in (drawn, replace(drawn, draws=READS)):
                given: dict[str, Any] = {"rule": rule, "state": rule.init(params), "maps": maps}
                update.step(params, sums, noise=made, backend="cupy", **given)


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
    read = replace(drawn, draws=READS)
    for dtype, shape in product(FLOATS, ((0, 7), (3, 0), (700, 7), (2, 9000))):
        x, shift = torch.ones(shape, dtype=dtype), torch.ones(shape[0], dtype=dtype)
        scaled = replace(drawn, scale=torch.ones(shape[0]))
        for given in (None, drawn, ahead, read, scaled):
            coef.perturb(x, form="taylor", noise=given, backend="cupy")
            coef.quadratic(x, x, form="taylor", noise=given, shift=shift, backend="cupy")
    for dtype, width in product(FLOATS, (0, 30)):
        h, y = torch.ones(5, width, dtype=dtype), torch.ones(5, 3, dtype=dtype)
        for given in (None, drawn, ahead, read, replace(drawn, scale=torch.ones(5))):
            coef.expanded(h, y, torch.ones(3, width, dtype=dtype), noise=given, backend="cupy")


def descend_everywhere() -> None:
    """Autoencoders for every room in registers, and steps of none."""
    for dtype, units in product(FLOATS, (7, 9)):
        given = descents.made((2, 2, 14, units), dtype=dtype)
        descents.run(given, "cupy")
        nothing = {k: given[k][:, :0].contiguous() for k in ("order", "draws", "rounding")}
        descents.run(given | nothing, "cupy")


OTHERS = Case(2, 1, (70,), (3,), padding=1), Case(1, 2, (3, 5, 4), (2, 3, 3), padding=1)
"""A grid of more than 64 values, and a volume."""


def release_in_the_frequency_domain() -> None:
    """Norms, bins and sums of a convolution, whitened and filtered."""
    case = CONVOLUTIONS[0]
    band = case.band()
    given: dict[str, Any] = case.sizes | {"backend": "cupy"}
    own = {"dilation": case.dilation, "groups": case.groups, "band": band, "backend": "cupy"}
    for dtype in FLOATS:
        x, g = case.operands(3, dtype)
        spectral.conv_norm(x, g, **given, size=case.size, band=band)
        for other in OTHERS:
            operands = other.operands(1, dtype)
            spectral.conv_norm(*operands, **other.sizes, size=other.size, backend="cupy")
        bins = spectral.conv_bins(x, g, **given, band=band)[:2]
        for matrix in matrices(case, band):
            spectral.whitened_bins(x, g, matrix, **given, band=band)
        out = torch.zeros_like(
            taps(case, correlation_map(case, x.double(), g.double()))[0], dtype=dtype
        )
        spectral.bins_sum(*bins, torch.ones(3, dtype=dtype), out, **own)
    blocks, weight = torch.randn(5, 1, 3, 8), torch.randn(2, 3, 8)
    for kind in (torch.float32, torch.float64):
        x, w = blocks.to(kind), weight.to(kind)
        g = spectral.circulant_product(x[:, 0], w, backend="cupy")[:, None]
        spectral.circulant_norm(x, g, backend="cupy")
        spectral.circulant_norm(x.view(1, 5, 3, 8), g.view(1, 5, 2, 8), backend="cupy")
        spectral.circulant_sum(x, g, x.new_ones(5), w, backend="cupy")


def clip_at_one_read() -> None:
    """Rows of one chunk, and of several."""
    for dtype, p, columns in product((torch.float32, torch.bfloat16), (1, 2), (5, 4097)):
        clip.clip_sum(torch.ones(33, columns, dtype=dtype), 1.0, p=p, backend="cupy")


def release_coordinate_by_coordinate() -> None:
    """A noise scale, and a scale of the norm, for every coordinate."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        grads, each = torch.ones(3, 50, dtype=dtype), torch.full((50,), 2.0)
        clip.sample_norm(grads, scale=each, center=each, backend="cupy")
        if dtype is not torch.bfloat16:
            rounding = testing.KEY.stream(Purpose.ROUNDING, 1)
            given: dict[str, Any] = {"stream": STREAM, "rounding": rounding, "scale": each}
            for law in LAWS:
                noise.add_noise(grads[0], distribution=law, backend="cupy", **given)


def test_every_kernel_is_started_as_in_the_emulator(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in SMALL_CASES:
        case.verify("cupy")
    clip_everything()
    contract_everything()
    update_everything()
    update_in_other_coordinates()
    randomize_everything()
    perturb_everything()
    descend_everywhere()
    noise.keystream(STREAM, first_block=3, blocks=257, backend="cupy")
    for law in LAWS:
        noise.lattice_draws(STREAM, position=7, count=5000, distribution=law, backend="cupy")
    noise.rounding_bits(STREAM, position=7, count=5000, backend="cupy")
    read_from_tables()
    release_coordinate_by_coordinate()
    release_in_the_frequency_domain()
    monkeypatch.setattr(table, "HELD_BATCH", 33)
    clip_at_one_read()
    assert both.kernels == set(table.signatures())


def test_another_grid_is_noticed(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "tile_blocks", lambda first, n: 1)
    given: dict[str, Any] = {"position": 0, "count": 5000}
    got, want = (noise.lattice_draws(STREAM, backend=b, **given) for b in ("cupy", "cpu"))
    assert torch.equal(got[:4096], want[:4096])
    assert not torch.equal(got, want)


def test_another_argument_is_noticed(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(kernel: CudaKernel, _: object) -> list[Any]:
        return [(name, lambda _: np.float32(0)) for name in kernel.parameters]

    monkeypatch.setattr(_start, "_converters", short)
    with pytest.raises(ValueError, match="advance_kernel: an argument of another size"):
        update.advance(
            update.step_counter(update.SGD(lr=0.1), 0, "cpu"),
            rule=update.SGD(lr=0.1),
            backend="cupy",
        )


def test_missing_and_unknown_arguments_are_noticed(both: Both) -> None:
    on = Device(both, "cupy", "cpu", on_cpu)
    for names in (("step_counter", "beta1"), ("step_counter", "beta1", "beta2", "beta3")):
        with pytest.raises(AssertionError, match="advance_kernel"):
            on.start(table.ADVANCE, (), 0, **dict.fromkeys(names, 0))
    with pytest.raises(AssertionError, match="draws_kernel"):
        table.DRAWS.symbol(("Cauchy",))


def test_everything_can_be_compiled_ahead(fake: FakeCupy) -> None:
    assert Compiling(fake).preload() == 0
    assert len(fake.binaries) == len(table.signatures())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """CuPy, a CUDA build of torch and a device, none of which are there."""
    found = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return found


def run(fake: FakeCupy) -> None:
    """A call that fails as the stand-in says."""
    kernels = _launch.kernels(Device(Compiling(fake), "cupy", "cpu", on_cpu))
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
