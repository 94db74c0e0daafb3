"""The CUDA sources compiled by CuPy at run time: for GPUs without our compiled module."""

from __future__ import annotations


def load() -> tuple[bool, str]:
    """Import CuPy and register its kernels; or say why not."""
    return False, "is not part of this version"
