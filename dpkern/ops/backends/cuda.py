"""The compiled CUDA kernels: find a device, or say why not."""

from __future__ import annotations

import importlib.util
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...base import dispatch
from ...base.errors import BackendError
from . import _device, cpu
from ._launch import Launch


def load() -> tuple[bool, str]:
    """Find a device and register the kernels; or say why not."""
    extension = cpu._extension()
    if isinstance(extension, str):
        return False, extension
    reason = _unavailable(extension)
    if reason is not None:
        return False, reason
    for name, run, refuse in kernels(extension.cuda).kernels():
        dispatch.register(name, "cuda", run, refuse)
    return True, ""


def kernels(launchers: Any) -> Launch:
    """The ops on these launchers."""
    return Launch(launchers, "cuda", "cuda", _device.refusal)


def prepare_update(*arguments: Any, **named: Any) -> Any:
    """``Launch.prepare_update`` of the compiled kernels.

    Raises:
        BackendError: they cannot run here.
    """
    ok, reason = dispatch.availability("cuda")
    if not ok:
        raise BackendError(
            "backend 'cuda'",
            expected="CUDA kernels and a device",
            got=f"it {reason}",
            remedy="Use DPStep.finish, which needs no recording.",
        )
    extension: Any = cpu._extension()
    return kernels(extension.cuda).prepare_update(*arguments, **named)


def _unavailable(extension: Any) -> str | None:
    """Why no call can run, or None."""
    config = extension.build_config()
    if not config["cuda"]:
        return (
            f"has no CUDA kernels ({config['cuda_reason']}): install nvcc and reinstall with "
            "DPKERN_CUDA=on, or pip install triton"
        )
    if torch.version.cuda is None:
        return f"needs a CUDA build of torch, found {torch.__version__}"
    count, error = extension.cuda.device_count()
    if not count:
        return f"finds no device: {extension.cuda.error_text(error)}"
    return None


def emulate() -> dispatch.Kernels | str:
    """The kernels compiled as C++ (``make test`` builds them in a checkout), on CPU tensors."""
    module = _emulated()
    if isinstance(module, str):
        return module
    return Launch(module, "cuda", "cpu", cpu._on_cpu).kernels()


@cache
def _emulated() -> ModuleType | str:
    folder = Path(__file__).resolve().parents[3] / "build" / "emulated"
    path = folder / f"_emulated{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.is_file():
        return "is not built for the emulator: make emulated"
    spec = importlib.util.spec_from_file_location("_emulated", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
