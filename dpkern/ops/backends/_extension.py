"""Find the compiled module ``dpkern._C``, and set its instructions and threads."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any

import torch

from ...base.errors import BackendError
from ...base.threads import here

ISAS = ("baseline", "avx2", "avx512", "avx512vnni", "avx512vbmi", "amx")


@cache
def load_extension() -> ModuleType | str:
    """Return the compiled module, or the reason why there is none."""
    try:
        from dpkern import _C as extension  # type: ignore[attr-defined, unused-ignore]
    except ImportError as error:
        return (
            f"has no compiled module ({error}): build with a C++17 compiler and cmake, "
            "pip install . without DPKERN_NATIVE=off"
        )
    return extension  # type: ignore[no-any-return, unused-ignore]


def compiled() -> Any:
    """Return the compiled module.

    Raises:
        BackendError: there is none.
    """
    found = load_extension()
    if isinstance(found, str):
        raise BackendError(
            "backend 'cpu'",
            expected="compiled kernels",
            got=f"it {found}",
            remedy="See `dpkern info` for the backends of this installation.",
        )
    return found


def isa() -> str:
    """Return the instruction set in use, one of ``ISAS``."""
    return ISAS[compiled().isa()]


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def threads() -> int:
    """Return how many threads a kernel may use."""
    # The OpenMP team of the parent does not exist in a forked child, which would wait for it.
    if _forked:
        return 1
    most = here.most
    return torch.get_num_threads() if most is None else most


def on_cpu(*tensors: torch.Tensor) -> str | None:
    """Return why CPU kernels cannot take these tensors, or None."""
    for tensor in tensors:
        if not tensor.is_cpu:
            return f"runs on the CPU, got a tensor on {tensor.device}"
    return None


def refuse_first(first: Any, *_: Any, **__: Any) -> str | None:
    """Return why not, for a call whose first argument is a tensor or a list of them."""
    return on_cpu(first if isinstance(first, torch.Tensor) else first[0])
