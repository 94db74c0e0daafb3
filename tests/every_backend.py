"""Every backend as a test parameter: here, emulated on the CPU, or skipped with the reason.

CUDA kernels run through the emulation header and Triton kernels in its interpreter where there is
no device, so that the same tests hold everywhere. A test that asks a backend for an op without a
kernel is skipped as well (``conftest.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from dpkern import _dispatch, testing

EMULATED = ("cuda", "triton")


def _parameter(name: str) -> Any:
    available, reason = _dispatch.availability(name)
    if available:
        return pytest.param(name)
    if name in EMULATED:
        found = testing.emulation(name)
        if not isinstance(found, str):
            return pytest.param(name, id=f"{name}-emulated")
        reason = found
    return pytest.param(name, marks=pytest.mark.skip(reason=f"{name} {reason}"))


def examples(count: int, name: str) -> int:
    """How many examples of hypothesis a backend is worth: the interpreter takes half a second for
    one operation on noise, whatever its size."""
    return count if _dispatch.availability(name)[0] or name != "triton" else max(2, count // 25)


def running(name: str) -> AbstractContextManager[None]:
    """The backend made available, emulated where it has no device."""
    needed = name in EMULATED and not _dispatch.availability(name)[0]
    return testing.emulated(name) if needed else nullcontext()


PARAMETERS = [_parameter(name) for name in _dispatch.BACKENDS]
every_backend = pytest.mark.parametrize("backend", PARAMETERS)
"""Runs a test with the argument ``backend`` on each of them."""
