"""Just-in-time kernels for CPUs: for installations without the compiled module."""

from __future__ import annotations

import importlib

from ...base import dispatch

_MODULES = ("clip", "explicit", "noise", "update")


def load() -> tuple[bool, str]:
    """Import numba and register its kernels; or say why not."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return False, f"needs numba ({error}): pip install numba"
    for name in _MODULES:
        for op, run, refuse in importlib.import_module(f"{__package__}._numba.{name}").KERNELS:
            dispatch.register(op, "numba", run, refuse)
    return True, ""
