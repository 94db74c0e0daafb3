"""Just-in-time kernels for CPUs: for installations without the compiled module."""

from __future__ import annotations


def load() -> tuple[bool, str]:
    """Import numba and register its kernels; or say why not."""
    return False, "is not part of this version"
