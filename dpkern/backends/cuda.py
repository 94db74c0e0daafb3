"""CUDA kernels for NVIDIA devices."""

from __future__ import annotations

from typing import Any

from ..errors import BackendError


def load() -> tuple[bool, str]:
    """Not built yet."""
    return False, "is not part of this version"


def prepare_update(*_: Any, **__: Any) -> Any:
    """Tables and kernels of an update, on the current stream, so that it may be recorded.

    Raises:
        BackendError: no kernels for CUDA devices here.
    """
    raise BackendError(
        "backend 'cuda'",
        expected="kernels for CUDA devices",
        got=f"it {load()[1]}",
        remedy="Use DPStep.finish, which needs no recording.",
    )
