"""Every backend as a test parameter: here, emulated on the CPU, or skipped with the reason.

CUDA kernels run through the emulation header and Triton kernels in its interpreter where there is
no device, and on a device with the tests' tensors moved there and back, so that the same tests hold
everywhere. A test that asks a backend for an op without a kernel is skipped as well
(``conftest.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from dpkern.base import dispatch
from dpkern.ops import testing
from tests.ops.moved import moved

EMULATED = ("cuda", "triton")
DEVICES = (*EMULATED, "cupy")


def _parameter(name: str) -> Any:
    available, reason = dispatch.availability(name)
    if available:
        return pytest.param(name, marks=[pytest.mark.gpu] if name in DEVICES else [])
    if name in EMULATED:
        found = testing.emulation(name)
        if not isinstance(found, str):
            return pytest.param(name, id=f"{name}-emulated")
        reason = found
    return pytest.param(name, marks=pytest.mark.skip(reason=f"{name} {reason}"))


def examples(count: int, name: str) -> int:
    """How many examples of hypothesis a backend is worth: the interpreter takes half a second for
    one operation on noise, whatever its size."""
    return max(2, count // 25) if name in INTERPRETED else count


def running(name: str) -> AbstractContextManager[None]:
    """The backend made available for tensors on the CPU."""
    if name not in DEVICES:
        return nullcontext()
    return moved(name) if dispatch.availability(name)[0] else testing.emulated(name)


PARAMETERS = [_parameter(name) for name in dispatch.BACKENDS]
INTERPRETED = [p.values[0] for p in PARAMETERS if p.id == "triton-emulated"]
every_backend = pytest.mark.parametrize("backend", PARAMETERS)
"""Runs a test with the argument ``backend`` on each of them."""
