"""Helpers for tests of kernels: which backends and instruction sets are here, and comparisons."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..base import dispatch
from ..base.errors import BackendError
from ..base.rng import Key
from ..base.threads import torch_threads
from .backends import _extension, cpu

KEY = Key.from_unsafe_seed(0)
"""Reproducible noise: for tests and timings only."""


def available_backends() -> list[str]:
    """Return the backends that can run on this machine."""
    return [name for name in dispatch.BACKENDS if dispatch.availability(name)[0]]


def emulation(backend: str) -> dispatch.Kernels | str:
    """Return the backend's kernels for tensors on the CPU, or why there are none.

    CUDA sources are compiled for the emulator, Triton kernels run in its interpreter.
    """
    module = importlib.import_module(f"{__package__}.backends.{backend}")
    emulate = getattr(module, "emulate", None)
    if emulate is None:
        return "cannot be emulated"
    kernels: dispatch.Kernels | str = emulate()
    return kernels


@contextmanager
def emulated(backend: str) -> Iterator[None]:
    """Run this backend on CPU tensors inside the block.

    Raises:
        BackendError: it cannot be emulated here.
    """
    kernels = emulation(backend)
    if isinstance(kernels, str):
        raise BackendError(
            f"emulated {backend}",
            expected="an emulation on this machine",
            got=f"it {kernels}",
            remedy="See CONTRIBUTING.md for what the tests need.",
        )
    with dispatch.replaced(backend, kernels):
        yield


def available_isas() -> list[str]:
    """Return the instruction sets of the compiled CPU kernels here; empty without them."""
    if not dispatch.availability("cpu")[0]:
        return []
    best = _extension.ISAS.index(cpu.build_config()["detected_isa"])
    return list(_extension.ISAS[: best + 1])


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Run the compiled CPU kernels with this instruction set."""
    before = _extension.isa()
    cpu.use_isa(name)
    try:
        yield
    finally:
        cpu.use_isa(before)


threads = torch_threads
"""Run with this many threads."""


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Check ``max |got - want| <= tolerance max(1, max |want|)``; the error names the tensor."""
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {list(got.shape)}, want {list(want.shape)}")
    if not want.numel():
        return
    difference = float((got.double() - want.double()).abs().max())
    limit = tolerance * max(1.0, float(want.double().abs().max()))
    if not difference <= limit:
        raise AssertionError(f"{name}: differs by {difference:.3g}, allowed {limit:.3g}")
