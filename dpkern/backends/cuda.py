"""The compiled CUDA kernels: marshal checked arguments to ``dpkern._C``."""

from __future__ import annotations


def load() -> tuple[bool, str]:
    """Find a device and register the kernels; or say why not."""
    return False, "is not part of this version"
