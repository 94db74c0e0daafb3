"""The CUDA sources compiled by CuPy at run time: for GPUs without our compiled module."""

from __future__ import annotations

from typing import Any

import torch

from ...base import dispatch
from . import _device, _launch
from ._cupy_launch import Compiling
from ._start import Device


def load() -> tuple[bool, str]:
    """Import CuPy and register its kernels; or say why not."""
    try:
        import cupy
    except ImportError as error:
        why = [line.strip() for line in str(error).splitlines() if line.strip("= ")]
        return False, f"needs CuPy ({why[-1]}): pip install cupy-cuda13x"
    reason = _unavailable(cupy)
    if reason is not None:
        return False, reason
    for name, run, refuse in _launch.kernels(device(cupy)):
        dispatch.register(name, "cupy", run, refuse)
    return True, ""


def device(cupy: Any) -> Device:
    """Return the kernels that this CuPy compiles, on CUDA devices."""
    return Device(Compiling(cupy), "cupy", "cuda", _device.refusal)


def _unavailable(cupy: Any) -> str | None:
    """Return why no call can run, or None."""
    if not hasattr(cupy.cuda.Stream, "from_external"):
        return f"needs CuPy 14 or later, found {cupy.__version__}"
    if torch.version.cuda is None:
        return f"needs a CUDA build of torch, found {torch.__version__}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"finds no device: {error}"
    if not count:
        return "finds no device"
    try:
        cupy.cuda.nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        return f"needs the CUDA run-time compiler ({error}): pip install nvidia-cuda-nvrtc"
    return None
