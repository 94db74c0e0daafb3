"""Norms and bins of volumes by the CUDA kernels without a GPU: the same numbers as transforms in
float64, and norms from above for operands that were made to deceive. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.ops import spectral, testing
from dpkern.ops.backends import _device_spectral, _launch_spectral, _spectral_blocks, cuda
from dpkern.ops.spectral._lines import circle, whole_line
from dpkern.ops.spectral._plan import NormTables, reaches
from dpkern.ops.spectral._spectra import Grid
from tests.ops import test_spectral_bound as small
from tests.ops.backends import test_cuda_spectral as short
from tests.ops.spectral_cases import Case
from tests.ops.test_spectral_volumes import GRIDS
from tests.ops.test_whitened_bins import matrices

WIDE = Case(1, 1, (12, 34, 9), (3, 3, 3), 1, 1, 1, 1, "padded")
"""A block holds some of the frequencies kx."""
CASES = [*GRIDS, WIDE]


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
    """Eight kinds of operands and three bands each, on eleven grids, six samples: 1,584 norms."""
    assert short.shares(case, draw) >= 1 - 1e-15


@pytest.mark.parametrize("draw", small.DRAWS, ids=lambda draw: draw.__name__)
def test_no_whitened_norm_is_under_reported(draw: small.Draw) -> None:
    for case in GRIDS[:2]:
        assert short.whitened_shares(case, draw) >= 1 - 1e-12


@pytest.mark.parametrize("divided", [1e5, 1], ids=["divided", "whole"])
def test_the_bound_of_transforms_is_needed(divided: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a bound that is divided fails where spectra hardly meet."""
    tables_of = _launch_spectral.tables_of

    def weaker(*args: Any, **options: Any) -> NormTables:
        made = tables_of(*args, **options)
        return replace(made, errors=made.errors / divided)

    monkeypatch.setattr(_launch_spectral, "tables_of", weaker)
    assert (short.shares(GRIDS[-1], small.apart) < 1 - 1e-9) == (divided > 1)


@pytest.mark.parametrize("case", [GRIDS[1], WIDE], ids=lambda case: case.name)
def test_no_order_of_threads_or_blocks_changes_a_bit(emulator: ModuleType, case: Case) -> None:
    x, g = case.operands(2, torch.float32)
    band = case.band()
    matrix, sizes = matrices(case, band)[0], case.sizes | {"backend": "cuda", "band": band}

    def run() -> list[torch.Tensor]:
        norm = spectral.conv_norm(x, g, size=case.size, **sizes)
        bins = spectral.conv_bins(x, g, **sizes)
        return [norm, *bins, *spectral.whitened_bins(x, g, matrix, **sizes)]

    want = run()
    for seed in (1, 2):
        found = short.poisoned_and_shuffled(emulator, seed, run)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_what_no_output_reads_is_not_in_the_norm() -> None:
    """Planes, rows and columns behind the last that is used may hold anything."""
    case = Case(2, 3, (6, 7, 8), (2, 2, 2), 3, 0, 1, 1, "padded")
    rows = Grid(case.layer, case.layer.size, None).rows
    assert rows == (5, 5, 8)
    x, g = case.operands(3, torch.float32)
    other = torch.full_like(x, 2.0**100)
    used = (slice(None), slice(None), *(slice(n) for n in rows))
    other[used] = x[used]
    sizes = {**case.sizes, "size": case.size, "backend": "cuda"}
    norms = [spectral.conv_norm(t, g, **sizes) for t in (x, other)]
    assert torch.equal(*norms)


def test_volumes_that_no_block_holds_take_the_platforms_transforms() -> None:
    for sizes in ((48, 64, 4), (2, 3, 260)):
        case = Case(1, 1, sizes, (1, 1, 1), 1, 0, 1, 1, "padded")
        grid = Grid(case.layer, case.layer.size, None)
        assert reaches(grid)
        assert not _spectral_blocks.reaches(grid, torch.float32)
    x, g = case.operands(1, torch.float32)
    with pytest.raises(AssertionError, match="platform"):
        spectral.conv_norm(x, g, size=case.size, **case.sizes, backend="cuda")


@pytest.mark.parametrize("size", [(18, 16), (34, 32), (63, 63), (112, 56)])
def test_errors_of_a_line_cover_one_level(size: tuple[int, int]) -> None:
    """Complex values, with sums of the kernel's parts in float32."""
    line = whole_line(*size, 1)
    rng = np.random.default_rng(line.n)
    turns = np.outer(np.arange(line.n), np.arange(line.count)) % line.n
    cosine, sine = (t[turns].astype(np.float32) for t in circle(line.n))
    for _ in range(5):
        p, q = rng.normal(size=(2, line.count)).astype(np.float32)
        sums = np.zeros((2, line.n), np.float32)
        for first in range(0, line.count, 8):
            part = np.zeros((2, line.n), np.float32)
            for t in range(first, min(first + 8, line.count)):
                part[0] += cosine[:, t] * p[t] - sine[:, t] * q[t]
                part[1] += cosine[:, t] * q[t] + sine[:, t] * p[t]
            sums += part
        want = np.exp(-2j * np.pi * turns / line.n) @ (p.astype(float) - 1j * q.astype(float))
        got = sums[0].astype(float) - 1j * sums[1].astype(float)
        error = np.linalg.norm(got - want) / np.linalg.norm(np.hypot(p, q)) / line.n**0.5
        assert 0 < error <= line.error(torch.float32)
