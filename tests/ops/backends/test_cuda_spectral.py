"""Norms and sums in the frequency domain by the CUDA kernels without a GPU: same numbers as plain
sums in float64, norms from above for operands that were made to deceive, whatever order blocks and
threads run in. Not yet run on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkern.base import layouts
from dpkern.ops import spectral, testing
from dpkern.ops.backends import _launch_spectral, _spectral_blocks, cuda
from dpkern.ops.backends._kernels import KERNELS
from dpkern.ops.spectral import Band
from dpkern.ops.spectral._lines import FrequencyLine
from dpkern.ops.spectral._plan import NormTables, Places
from dpkern.ops.spectral._spectra import on
from dpkern.ops.spectral._whitened_plan import whitened_plan
from tests.ops import test_spectral_bound, test_whitened_bins
from tests.ops.backends import emulated_memory
from tests.ops.spectral_cases import CASES, Case, correlation_map, taps, through
from tests.ops.test_spectral_bound import DRAWS, GRIDS, Draw, apart, constants, diagonals
from tests.ops.test_whitened_bins import matrices
from tests.step.no_wait import NoWait

SAMPLES = 6
LARGE = [
    Case(3, 2, (32, 32), (3, 3), 1, 1, 1, 1, "padded"),
    Case(1, 2, (32, 30), (3, 3), 1, 1, 1, 1, "linear"),
    Case(2, 1, (64,), (3,), 1, 0, 1, 1, "padded"),
    Case(70, 40, (4, 4), (3, 3), 1, 1, 1, 2, "padded"),
]
"""Several blocks of frequencies, the largest grid, long lines, channels of several splits."""


@pytest.fixture(autouse=True)
def emulator() -> Iterator[ModuleType]:
    """The emulated kernels."""
    module = cuda._emulated()
    if isinstance(module, str):
        pytest.skip(f"cuda {module}")
    with testing.emulated("cuda"):
        yield module


def squared(maps: Tensor) -> Tensor:
    return maps.flatten(1).square().sum(1)


def differ(case: Case, dtype: torch.dtype, backend: str = "cuda") -> dict[str, float]:
    """Return relative distances to plain sums in float64; of norms the least and the largest."""
    x, g = case.operands(3, dtype)
    exact = x.double(), g.double()
    band, maps = case.band(), correlation_map(case, *exact)
    filtered = through(band, maps)
    found: dict[str, float] = {}

    def norms(name: str, got: Tensor, want: Tensor) -> None:
        ratios = got.sqrt() / want - 1
        found[f"{name} least"], found[f"{name} most"] = float(ratios.min()), float(ratios.max())

    def values(name: str, got: Tensor, want: Tensor) -> None:
        found[name] = float((got.double() - want).abs().max() / want.abs().max())

    sizes = case.sizes | {"backend": backend}
    for name, chosen, want in (("whole", None, maps), ("kept", band, filtered)):
        squares = spectral.conv_norm(x, g, **sizes, size=case.size, band=chosen)
        norms(name, squares, squared(want).sqrt())
    x_bins, g_bins, squares = spectral.conv_bins(x, g, **sizes, band=band)
    norms("of bins", squares, squared(maps).sqrt())
    want_bins = spectral.conv_bins(*exact, **case.sizes, band=band, backend="reference")
    values("bins of x", x_bins, want_bins[0])
    values("bins of g", g_bins, want_bins[1])
    kind = x_bins.dtype
    factors = torch.tensor([0.7, 0.0, -0.3], dtype=kind)
    total = torch.einsum("b,b...->...", factors.double(), taps(case, filtered))
    out = torch.ones_like(total, dtype=kind)
    own = {"dilation": case.dilation, "groups": case.groups, "band": band, "backend": backend}
    x_bins[:, 1], g_bins[:, 1] = math.nan, math.inf  # factor 0: nothing of it
    spectral.bins_sum(x_bins, g_bins, factors, out, **own)
    values("sum", out, 1 + total)
    for i, matrix in enumerate(matrices(case, band)):
        *both, squares = spectral.whitened_bins(x, g, matrix, **sizes, band=band)
        want = test_whitened_bins.exact(case, *exact, matrix, band)
        norms(f"whitened {i}", squares, want)
        values("bins alone", both[0], want_bins[0])
    return found


def check(found: dict[str, float], dtype: torch.dtype) -> None:
    narrow = dtype is not torch.float64
    for name, distance in found.items():
        if name.endswith("least"):
            assert distance >= -1e-14, name
        elif name.startswith("whitened"):
            assert distance <= (5e-3 if narrow else 1e-7), name
        elif name.endswith("most"):
            assert distance <= (3e-4 if narrow else 1e-12), name
        else:
            assert distance <= (1e-6 if narrow else 1e-12), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_norms_bins_and_sums_are_those_of_the_correlation_map(case: Case) -> None:
    check(differ(case, torch.float32), torch.float32)


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(case: Case, dtype: torch.dtype) -> None:
    check(differ(case, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_maps_that_fill_a_block(case: Case, dtype: torch.dtype) -> None:
    x, g = case.operands(2, dtype)
    sizes = case.sizes | {"size": case.size}
    for band in (None, case.band()):
        want = test_spectral_bound.exact(case, x, g, band)
        got = spectral.conv_norm(x, g, **sizes, band=band, backend="cuda")
        assert bool((got >= want * (1 - 1e-14)).all())
        assert bool((got <= want * (1 + (1e-3 if dtype is torch.float32 else 1e-11))).all())


def poisoned_and_shuffled(module: ModuleType, seed: int, run: Callable[[], Any]) -> Any:
    module.shuffle(seed)
    module.poison(emulated_memory.regions(module))
    try:
        return run()
    finally:
        module.shuffle(0)
        module.poison([])


@pytest.mark.parametrize("case", [CASES[0], CASES[10], CASES[-4], LARGE[0]], ids=lambda c: c.name)
def test_no_order_of_threads_or_blocks_changes_a_bit(emulator: ModuleType, case: Case) -> None:
    x, g = case.operands(3, torch.float32)
    band = case.band()
    matrix, sizes = matrices(case, band)[0], case.sizes | {"backend": "cuda", "band": band}
    factors = torch.tensor([0.7, 0.0, -0.3])

    def run() -> list[Tensor]:
        x_bins, g_bins, squares = spectral.conv_bins(x, g, **sizes)
        out = torch.zeros(case.layer.geometry.weight_shape)
        own = {"dilation": case.dilation, "groups": case.groups, "band": band}
        spectral.bins_sum(x_bins, g_bins, factors, out, **own, backend="cuda")
        return [x_bins, g_bins, squares, out, *spectral.whitened_bins(x, g, matrix, **sizes)]

    want = run()
    for seed in (1, 2):
        found = poisoned_and_shuffled(emulator, seed, run)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    emulator.order(reverse=True)
    found = run()
    emulator.order(reverse=False)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def drawn(case: Case, draw: Draw, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(case.name))
    x, g = (t[:SAMPLES].to(dtype).contiguous() for t in draw(case, generator))
    return x, g


def shares(case: Case, draw: Draw, backend: str = "cuda") -> float:
    """Return the least of computed over exact norms, over bands."""
    x, g = drawn(case, draw, torch.float32)
    least = 1.0
    for band in test_spectral_bound.bands(case):
        want = test_spectral_bound.exact(case, x, g, band)
        got = spectral.conv_norm(x, g, **case.sizes, size=case.size, band=band, backend=backend)
        assert bool(torch.isfinite(got).all())
        least = min(least, float(torch.where(want > 0, got / want.clamp(min=1e-300), 1.0).min()))
    return least


def whitened_shares(case: Case, draw: Draw, backend: str = "cuda") -> float:
    """Return the same of whitened norms, over bands and matrices."""
    x, g = drawn(case, draw, torch.float32)
    least = 1.0
    for kind in case.kinds:
        band = Band(case.size, kind, 0.4)
        for matrix in matrices(case, band):
            want = test_whitened_bins.exact(case, x, g, matrix, band)
            sizes = case.sizes | {"band": band, "backend": backend}
            got = spectral.whitened_bins(x, g, matrix, **sizes)[2].sqrt()
            assert bool(torch.isfinite(got).all())
            ratios = torch.where(want > 0, got / want.clamp(min=1e-300), 1.0)
            least = min(least, float(ratios.min()))
    return least


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_no_norm_is_under_reported(draw: Draw) -> None:
    """Eight kinds of operands on ten grids, six samples each: 1,920 norms and 2,592 whitened."""
    assert min(shares(case, draw) for case in GRIDS) >= 1 - 1e-15
    assert min(whitened_shares(case, draw) for case in GRIDS[:6]) >= 1 - 1e-12


@pytest.mark.parametrize(("draw", "transforms", "sums"), [(apart, 1e5, 1), (diagonals, 1, 1e5)])
def test_smaller_bounds_fail(
    draw: Draw, transforms: float, sums: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: both parts of the bound are needed."""
    tables_of, error = _launch_spectral.tables_of, _launch_spectral.sums_error

    def tables(*args: Any, **options: Any) -> NormTables:
        made = tables_of(*args, **options)
        return replace(made, errors=made.errors / transforms)

    monkeypatch.setattr(_launch_spectral, "tables_of", tables)
    monkeypatch.setattr(_launch_spectral, "sums_error", lambda *args: error(*args) / sums)
    assert min(shares(case, draw) for case in GRIDS if len(case.input) == 2) < 1 - 1e-9


def test_smaller_bounds_of_whitened_norms_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: bins of spectra that hardly meet hide more than the coordinates hold."""
    plan = _launch_spectral.whitened_plan

    def weaker(*args: Any) -> Any:
        made = plan(*args)
        errors = {f"{name}_error": getattr(made, f"{name}_error") / 1e5 for name in ("x", "g")}
        return replace(made, **errors, product_error=made.product_error / 1e5)

    monkeypatch.setattr(_launch_spectral, "whitened_plan", weaker)
    worst = [whitened_shares(case, draw) for draw in (apart, constants) for case in GRIDS[:5]]
    assert min(worst) < 1 - 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_of_a_line_without_shared_products_cover_its_sums(dtype: torch.dtype) -> None:
    for n, count, step in ((8, 8, 1), (34, 32, 1), (9, 4, 2), (64, 60, 1)):
        line = FrequencyLine(n, count, step, shared=False)
        assert not line.split
        assert line.terms == count // 2 + 1
        test_spectral_bound.test_errors_of_a_line_cover_its_sums(line, dtype)


def test_a_sample_has_the_same_bits_alone_and_odd_samples_their_own_results() -> None:
    for case in (CASES[1], CASES[10], GRIDS[2]):
        x, g = case.operands(7, torch.float32)
        x[1], g[2], x[3] = 0, 2.0**-140, 2.0**120 * x[3]
        x[4, 0].view(-1)[0], g[5].view(-1)[0] = math.nan, math.inf
        band, sizes = case.band(), case.sizes | {"backend": "cuda"}
        whole = spectral.conv_bins(x, g, band=band, **sizes)
        assert whole[2][1] == 0
        assert torch.isfinite(whole[2]).tolist() == [True] * 4 + [False, False, True]
        exact = test_spectral_bound.exact(case, x, g, None)
        assert bool((whole[2] >= exact)[[0, 2, 3, 6]].all())
        assert bool((whole[2] <= 1.001 * exact)[[0, 2, 3, 6]].all())
        for one in (0, 2, 6):
            at = slice(one, one + 1)
            alone = spectral.conv_bins(x[at], g[at], band=band, **sizes)
            assert torch.equal(alone[2], whole[2][at])
            assert torch.equal(alone[0], whole[0][:, at])
        matrix = matrices(case, band)[0]
        squares = spectral.whitened_bins(x, g, matrix, band=band, **sizes)[2]
        assert squares[1] == 0
        assert torch.isfinite(squares).tolist() == [True] * 4 + [False, False, True]


def test_an_empty_batch_has_no_norms() -> None:
    case = CASES[0]
    x, g = (t[:0] for t in case.operands(1, torch.float32))
    band, sizes = case.band(), case.sizes | {"backend": "cuda"}
    assert spectral.conv_norm(x, g, size=case.size, **sizes).shape == (0,)
    x_bins, g_bins, squares = spectral.conv_bins(x, g, band=band, **sizes)
    assert squares.shape == (0,)
    out = torch.ones(case.layer.geometry.weight_shape)
    spectral.bins_sum(x_bins, g_bins, x.new_zeros(0), out, band=band, backend="cuda")
    assert bool((out == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_hold_every_map_that_they_take(dtype: torch.dtype) -> None:
    """All grids of up to 64 values on an axis: room, threads, and a team at least."""
    wide = dtype is torch.float64
    lines = layouts.SPECTRAL_LINES_WIDE if wide else layouts.SPECTRAL_LINES
    folded = layouts.SPECTRAL_FOLDED_WIDE if wide else layouts.SPECTRAL_FOLDED
    ends = (1, 2, 3, 5, 8, 13, 16, 31, 33, 47, 63, 64)
    for height, width in [(a, b) for a in ends for b in ends]:
        for rows, columns in ((height, width), (1, width), (height, 1), (height // 2 + 1, 1)):
            side = Places(
                FrequencyLine(height, rows, 1, False), FrequencyLine(width, columns, 1, False)
            )
            shape = _spectral_blocks.block_shape(side, dtype)
            used = shape["teams"] * shape["together"]
            assert shape["teams"] >= 1
            assert used * shape["lanes"] <= layouts.SPECTRAL_THREADS
            assert shape["lanes"] * layouts.SPECTRAL_EACH >= shape["down"]
            padded = [_spectral_blocks._padded(n, dtype) for n in (rows, columns)]
            assert used * 4 * padded[0] <= lines
            assert shape["teams"] * 4 * (rows // 2 + 1) * padded[1] <= folded
            assert 2 * layouts.SPECTRAL_EACH * layouts.SPECTRAL_THREADS <= folded


def test_nothing_waits_for_the_device() -> None:
    case = CASES[3]
    x, g = case.operands(3, torch.float32)
    band, sizes = case.band(), case.sizes | {"backend": "cuda"}
    matrix, factors = matrices(case, band)[0], torch.tensor([1.0, 0.0, 2.0])

    def run() -> None:
        spectral.conv_norm(x, g, size=case.size, band=band, **sizes)
        x_bins, g_bins, _ = spectral.conv_bins(x, g, band=band, **sizes)
        spectral.whitened_bins(x, g, matrix, band=band, **sizes)
        out = torch.zeros(case.layer.geometry.weight_shape)
        spectral.bins_sum(x_bins, g_bins, factors, out, band=band, backend="cuda")

    run()  # constants are made once
    with NoWait():
        run()


def test_no_table_depends_on_the_size_of_the_batch() -> None:
    """Poisson batches have a new size at every step: nothing is made or copied again."""
    case = CASES[3]
    band, sizes = case.band(), case.sizes | {"backend": "cuda"}
    matrix = matrices(case, band)[0]

    def run(batch: int) -> None:
        x, g = case.operands(batch, torch.float32)
        spectral.conv_bins(x, g, band=band, **sizes)
        spectral.whitened_bins(x, g, matrix, band=band, **sizes)

    run(1)
    made = on.cache_info().misses, whitened_plan.cache_info().misses
    run(2)
    run(3)
    assert (on.cache_info().misses, whitened_plan.cache_info().misses) == made


def test_the_kernels_are_in_the_launch_table() -> None:
    names = {kernel.name for kernel in KERNELS if kernel.source.startswith("spectral")}
    assert names == {
        f"spectral_{name}_kernel"
        for name in (
            *("sizes", "powers", "long", "volume", "product"),
            *("pairs", "whitened", "bins_sum", "add"),
        )
    }
