"""Triton kernels for GPUs: the path without a compiler."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...base import dispatch
from . import _library

MODULES = (
    "noise",
    "clip",
    "update_mapped",
    "explicit",
    "affine",
    "embedding",
    "tied",
    "integers",
    "linear",
    "conv",
    "symbols",
    "coef",
    "coef_features",
    "circulant",
    "circulant_norm",
    "spectral",
)
"""Those of ``_triton`` that have kernels."""
OLDEST = (3, 6)

Refuse = Callable[..., str | None]


def load() -> tuple[bool, str]:
    """Import Triton and register its kernels; or say why not."""
    reason = _without_triton() or _without_device()
    if reason is None and _interpreted():
        reason = "is interpreted here: unset TRITON_INTERPRET to run on the device"
    if reason is not None:
        return False, reason
    for name, run, refuse in kernels("cuda"):
        dispatch.register(name, "triton", run, refuse)
    return True, ""


def emulate() -> dispatch.Kernels | str:
    """Return the same kernels in Triton's interpreter, on CPU tensors; or why not."""
    reason = _without_triton()
    if reason is None and not _interpreted():
        reason = "is compiled: set TRITON_INTERPRET=1 before dpkern's first call to interpret it"
    return kernels("cpu") if reason is None else reason


def modules() -> Iterator[Any]:
    """Import the modules with kernels."""
    for name in MODULES:
        yield importlib.import_module(f"{__package__}._triton.{name}")


def _without_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "is not installed: pip install triton"
    found = importlib.import_module("triton").__version__
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        return f"needs Triton {'.'.join(map(str, OLDEST))} or later, found {found}"
    return None


def _without_device() -> str | None:
    if torch.version.cuda is None:
        return f"needs a CUDA build of torch, found {torch.__version__}"
    if not torch.cuda.is_available():
        return "needs a CUDA device, found none"
    return None


def _interpreted() -> bool:
    from ._triton import launch

    return launch.INTERPRETED


def kernels(device: str) -> tuple[tuple[str, Callable[..., Any], Refuse], ...]:
    kernels = [(name, run, _never) for name, run in _library.KERNELS]
    kernels += [kernel for module in modules() for kernel in module.KERNELS]
    return tuple((name, run, _on(device, refuse)) for name, run, refuse in kernels)


def _never(*_: Any, **__: Any) -> None:
    return None


def _on(device: str, refuse: Refuse) -> Refuse:
    """Return ``refuse``, after tensors elsewhere than on this kind of device."""

    def first(*args: Any, **kwargs: Any) -> str | None:
        tensor = _first_tensor(args)
        if tensor is not None and tensor.device.type != device:
            return f"runs on {device.upper()} devices, got a tensor on {tensor.device}"
        return refuse(*args, **kwargs)

    return first


def _first_tensor(args: tuple[Any, ...]) -> torch.Tensor | None:
    # Validated already: all tensors of a call are on one device.
    for value in args:
        found = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(found, torch.Tensor):
            return found
    return None
