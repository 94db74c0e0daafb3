"""Norms and bins on grids with more than 64 values on an axis by the CUDA kernels without a GPU:
the same numbers as plain sums in float64, and norms from above for operands that were made to
deceive. Not yet run on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base import layouts
from dpkern.ops import spectral, testing
from dpkern.ops.backends import _device_spectral, _launch_spectral, _spectral_blocks, cuda
from dpkern.ops.spectral._lines import long_line
from dpkern.ops.spectral._plan import LongPlaces, NormTables
from tests.ops import test_spectral_bound as small
from tests.ops.backends import test_cuda_spectral as short
from tests.ops.spectral_cases import Case
from tests.ops.test_spectral_long import LINES, PLANES, two_levels
from tests.ops.test_whitened_bins import matrices

TALL = Case(1, 2, (510, 6), (3, 3), 1, 1, 1, 1, "padded")
"""A block holds a part of the frequencies of one k1."""
CASES = [*LINES, *PLANES, TALL]


@pytest.fixture(autouse=True)
def emulator() -> Iterator[ModuleType]:
    """The emulated kernels."""
    module = cuda._emulated()
    if isinstance(module, str):
        pytest.skip(f"cuda {module}")
    with testing.emulated("cuda"):
        yield module


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform's transforms are an error."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("the platform's transforms were taken")

    for name in ("conv_norm", "conv_bins", "whitened_bins"):
        monkeypatch.setattr(_device_spectral, name, refused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_norms_and_bins_are_those_of_transforms(case: Case, dtype: torch.dtype) -> None:
    small.agree(case, *case.operands(3, dtype), [None, case.band()], "cuda")


@pytest.mark.parametrize("draw", small.DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_norm_is_under_reported(case: Case, draw: small.Draw) -> None:
    """Eight kinds of operands and four bands each, on twelve grids, six samples: 2,304 norms."""
    assert short.shares(case, draw) >= 1 - 1e-15


@pytest.mark.slow  # the emulator takes minutes
@pytest.mark.parametrize("draw", small.DRAWS, ids=lambda draw: draw.__name__)
def test_no_whitened_norm_is_under_reported(draw: small.Draw) -> None:
    """Three kinds of bands and their matrices on four grids."""
    for case in (LINES[0], LINES[3], PLANES[1], PLANES[3]):
        assert short.whitened_shares(case, draw) >= 1 - 1e-12


@pytest.mark.parametrize("divided", [1e5, 1], ids=["divided", "whole"])
def test_the_bound_of_transforms_is_needed(divided: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a bound that is divided fails where spectra hardly meet."""
    tables_of = _launch_spectral.tables_of

    def weaker(*args: Any, **options: Any) -> NormTables:
        made = tables_of(*args, **options)
        return replace(made, errors=made.errors / divided)

    monkeypatch.setattr(_launch_spectral, "tables_of", weaker)
    worst = min(short.shares(case, small.apart) for case in (*LINES[:2], PLANES[0], TALL))
    assert (worst < 1 - 1e-9) == (divided > 1)


@pytest.mark.parametrize("case", [LINES[3], LINES[5], PLANES[2], TALL], ids=lambda c: c.name)
def test_no_order_of_threads_or_blocks_changes_a_bit(emulator: ModuleType, case: Case) -> None:
    x, g = case.operands(2, torch.float32)
    band = case.band()
    matrix, sizes = matrices(case, band)[0], case.sizes | {"backend": "cuda", "band": band}

    def run() -> list[torch.Tensor]:
        found = [
            *spectral.conv_bins(x, g, **sizes),
            spectral.conv_norm(x, g, size=case.size, **sizes),
        ]
        return [*found, *spectral.whitened_bins(x, g, matrix, **sizes)]

    want = run()
    for seed in (1, 2):
        found = short.poisoned_and_shuffled(emulator, seed, run)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_sample_has_the_same_bits_alone_and_odd_samples_their_own_results() -> None:
    for case in (LINES[0], LINES[3], PLANES[1]):
        x, g = case.operands(7, torch.float32)
        x[1], g[2], x[3] = 0, 2.0**-140, 2.0**120 * x[3]
        x[4, 0].view(-1)[0], g[5].view(-1)[0] = math.nan, math.inf
        band, sizes = case.band(), case.sizes | {"backend": "cuda"}
        whole = spectral.conv_bins(x, g, band=band, **sizes)
        assert whole[2][1] == 0
        assert torch.isfinite(whole[2]).tolist() == [True] * 4 + [False, False, True]
        exact = small.exact(case, x, g, None)
        assert bool((whole[2] >= exact)[[0, 2, 3, 6]].all())
        assert bool((whole[2] <= 1.002 * exact)[[0, 2, 3, 6]].all())
        for one in (0, 2, 6):
            at = slice(one, one + 1)
            alone = spectral.conv_bins(x[at], g[at], band=band, **sizes)
            assert torch.equal(alone[2], whole[2][at])
            assert torch.equal(alone[0], whole[0][:, at])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_hold_every_line_of_up_to_256_values_and_more(dtype: torch.dtype) -> None:
    """The last entry of each array that a block writes lies in its room."""
    wide = dtype is torch.float64
    tile = int(layouts.SPECTRAL_TILE_WIDE if wide else layouts.SPECTRAL_TILE)
    threads = int(layouts.SPECTRAL_LONG_THREADS)
    ends = (*range(65, 257, 7), 251, 256, 384, 450, 512, 900, 1024)
    sizes = [(n, m) for n in ends for m in (1, 7, 96, 251, 512)]
    for height, width in [*sizes, *((m, n) for n, m in sizes), (1, 4096), (1, 32768)]:
        for rows, channels in ((height, 1), (height // 2 + 1, 32)):
            down, across = long_line(height, rows, 1, False), long_line(width, width, 1, False)
            assert down is not None
            assert across is not None
            shape = _spectral_blocks.long_shape(LongPlaces((down, across)), channels, dtype)
            assert shape is not None, (height, width)
            each = -(-across.second // shape["parts"])
            slots, room = shape["lines"] * each, tile * threads
            assert shape["maps"] * slots * (rows | 1) <= room
            steps = [line.second + (line.second % 4 == 0) for line in (across, down)]
            assert shape["rows"] % tile == 0
            assert 0 < shape["rows"] * shape["lines"] * steps[0] <= room
            tiles = -(-slots * down.first // tile)
            assert tiles * down.second <= threads
            last = (shape["maps"] - 1) * slots * down.first + tiles * tile
            assert last * steps[1] <= room
            assert (shape["parts"] - 1) * each < across.second
            assert shape["lines"] == 1 or shape["parts"] == 1


@pytest.mark.parametrize("size", [(132, 132), (140, 70), (143, 143), (226, 224), (512, 300)])
def test_errors_of_a_line_cover_two_levels(size: tuple[int, int]) -> None:
    """The order of frequencies is that of the spectrum, and float32 stays within the error."""
    line = long_line(*size, 1, False)
    assert line is not None
    rng = np.random.default_rng(line.n)
    for x in (rng.normal(size=line.count), np.ones(line.count)):
        x = x.astype(np.float32)
        angle = np.outer(line.frequencies, np.arange(line.count))
        want = np.exp(-2j * np.pi * (angle % line.n) / line.n) @ x.astype(float)
        p, q = two_levels(line, x, np.float32).astype(float)
        error = np.linalg.norm(p - 1j * q - want) / np.linalg.norm(x) / line.n**0.5
        assert 0 < error <= line.error(torch.float32)
    assert sorted(line.frequencies) == list(range(line.n))
    assert line.stands.sum() == line.n
    both = np.stack([line.halves, -line.halves % line.n])
    assert set(both.ravel().tolist()) == set(range(line.n))


def test_grids_that_no_block_holds_take_the_platforms_transforms() -> None:
    case = Case(1, 1, (512, 6), (3, 3), 1, 1, 1, 1, "padded")  # 514 = 2 * 257
    x, g = case.operands(1, torch.float32)
    with pytest.raises(AssertionError, match="platform"):
        spectral.conv_norm(x, g, size=case.size, **case.sizes, band=case.band(), backend="cuda")
