"""Kernels neither read what another block left in shared memory nor depend on any order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from dpkern.base.rng import Purpose
from dpkern.ops import noise, symbols, testing
from dpkern.ops.backends import cuda
from dpkern.privacy.mechanisms import RandomizedResponse
from tests.ops.backends import emulated_memory
from tests.ops.small_cases import SMALL_CASES, ClipCase

STREAM = testing.KEY.stream(Purpose.NOISE, 1)


@pytest.fixture(scope="module")
def emulator() -> Iterator[ModuleType]:
    module = cuda._emulated()
    if isinstance(module, str):
        pytest.skip(f"cuda {module}")
    with testing.emulated("cuda"):
        yield module
    module.poison([])
    module.shuffle(0)


def test_every_shared_variable_is_found(emulator: ModuleType) -> None:
    """Of kernels: one for each instance."""
    assert emulated_memory.names() >= {"room", "rounded", "numbers"}
    found = emulated_memory.regions(emulator)
    assert len(found) > 80
    assert {25600 - 8192, 8192} <= {size for _, size in found}


def test_a_block_sees_what_was_filled_in(emulator: ModuleType) -> None:
    """The regions are those of the kernels: filled ones are overwritten by a launch."""
    regions = emulated_memory.regions(emulator)
    emulator.poison(regions)
    noise.lattice_draws(STREAM, position=0, count=600, backend="cuda")
    changed = [place for place, size in regions if set(ctypes.string_at(place, size)) != {0xFF}]
    assert len(changed) == 1
    emulator.poison([])


def noise_of_all_laws() -> list[torch.Tensor]:
    """Draws, rounding bits, symbols and noise, on positions within and beyond a tile."""
    place: dict[str, Any] = {"position": 77, "count": 9001, "backend": "cuda"}
    made = [
        noise.lattice_draws(STREAM, distribution=law, **place) for law in ("gaussian", "laplace")
    ]
    made.append(noise.rounding_bits(STREAM, **place).int())
    keep = RandomizedResponse(epsilon=1.0, categories=10).keep
    stream = testing.KEY.stream(Purpose.SYMBOLS, 1)
    x = torch.zeros(300, dtype=torch.uint8)
    given: dict[str, Any] = {"stream": stream, "keep": keep, "categories": 10}
    made.append(symbols.randomize(x, backend="cuda", **given).int())
    for dtype in (torch.int32, torch.float32):
        x, more = torch.ones(5000, dtype=dtype), {}
        if dtype is torch.float32:
            more = {"scale": 1.5, "rounding": testing.KEY.stream(Purpose.ROUNDING, 1)}
        made.append(noise.add_noise(x, stream=STREAM, backend="cuda", **more))
    return made


@pytest.mark.parametrize("seed", [1, 7])
def test_results_depend_on_neither_order_nor_what_was_left(emulator: ModuleType, seed: int) -> None:
    emulator.poison([])
    emulator.shuffle(0)
    want = noise_of_all_laws()
    emulator.poison(emulated_memory.regions(emulator))
    emulator.shuffle(seed)
    for got, wanted in zip(noise_of_all_laws(), want, strict=True):
        assert torch.equal(got, wanted)
    several = ClipCase(
        batch=70, columns=(5, 4100), dtype=torch.float32, style="flat", arithmetic="exact"
    )
    for case in (*SMALL_CASES, several):
        case.verify("cuda")
