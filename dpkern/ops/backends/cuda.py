"""The CUDA kernels built ahead: find a device and start them, or say why not."""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...base import dispatch
from ...base.errors import BackendError
from .. import clip
from . import _device, _generated, _launch, _launch_clip, _launch_update
from ._extension import load_extension, on_cpu
from ._kernels import KERNELS, CudaKernel, Instance
from ._start import Device

_NAME = f"_emulated{sysconfig.get_config_var('EXT_SUFFIX')}"
EMULATED = Path(__file__).resolve().parents[3] / "build" / "emulated" / _NAME
"""The kernels compiled as C++, in a checkout."""


def load() -> tuple[bool, str]:
    """Find a device and register the kernels; or say why not."""
    extension = load_extension()
    if isinstance(extension, str):
        return False, extension
    reason = _unavailable(extension)
    if reason is not None:
        return False, reason
    for name, run, refuse in _launch.kernels(device(extension.cuda)):
        dispatch.register(name, "cuda", run, refuse)
    return True, ""


class ModuleLauncher:
    """A starter of the kernels of a compiled module."""

    def __init__(self, module: Any) -> None:
        self.error_text = module.error_text
        self.preload = module.preload
        self._launch = module.launch
        places = {name: place for name, (place, _) in module.kernels().items()}
        self._places = {
            (kernel, instance): places[kernel.symbol(instance)]
            for kernel in KERNELS
            for instance in kernel.instances
        }

    def start(
        self,
        kernel: CudaKernel,
        instance: Instance,
        grid: tuple[int, int],
        arguments: list[Any],
        stream: int,
    ) -> int:
        """Start a kernel: ``Starter.start``."""
        place = self._places[kernel, instance]
        packed = [argument.tobytes() for argument in arguments]
        error: int = self._launch(place, *grid, kernel.threads, packed, stream)
        return error


def device(module: Any) -> Device:
    """Return the kernels of a compiled module on CUDA devices."""
    return Device(ModuleLauncher(module), "cuda", "cuda", _device.refusal)


def outdated(module: Any) -> bool:
    """Whether a compiled module was made from other declarations of structs, codes and kernels."""
    return getattr(module, "digest", "") != _generated.digest()


def prepare_update(*arguments: Any, **named: Any) -> Any:
    """Run ``_launch_update.prepare`` for the compiled kernels.

    Raises:
        BackendError: they cannot run here.
    """
    return _launch_update.prepare(_loaded(), *arguments, **named)


def prepare_clip(
    grads: Sequence[torch.Tensor], out: Sequence[torch.Tensor], **arguments: Any
) -> Any:
    """Run ``_launch_clip.prepare`` for the compiled kernels, with the arguments of ``clip_sum``.

    Raises:
        BackendError: they cannot run here.
    """
    _loaded()
    return _launch_clip.prepare(clip.ClipRequest.of(grads, **arguments), out)


def _loaded() -> Device:
    ok, reason = dispatch.availability("cuda")
    if not ok:
        raise BackendError(
            "backend 'cuda'",
            expected="CUDA kernels and a device",
            got=f"it {reason}",
            remedy="Use DPStep.finish, which needs no recording.",
        )
    extension: Any = load_extension()
    return device(extension.cuda)


def _unavailable(extension: Any) -> str | None:
    """Return why no call can run, or None."""
    config = extension.build_config()
    if not config["cuda"]:
        return (
            f"has no CUDA kernels ({config['cuda_reason']}): install nvcc and reinstall with "
            "DPKERN_CUDA=on, or pip install triton"
        )
    if outdated(extension.cuda):
        return "has kernels of another version of dpkern: reinstall it"
    if torch.version.cuda is None:
        return f"needs a CUDA build of torch, found {torch.__version__}"
    count, error = extension.cuda.device_count()
    if not count:
        return f"finds no device: {extension.cuda.error_text(error)}"
    return None


def emulate() -> dispatch.Kernels | str:
    """Return the kernels as C++ for CPU tensors; ``make test`` builds them in a checkout."""
    module = _emulated()
    if isinstance(module, str):
        return module
    return _launch.kernels(emulated_device(module))


def emulated_device(module: Any) -> Device:
    """Return the kernels of the emulator, on CPU tensors."""
    return Device(ModuleLauncher(module), "cuda", "cpu", on_cpu)


@cache
def _emulated() -> ModuleType | str:
    if not EMULATED.is_file():
        return "is not built for the emulator: make emulated"
    spec = importlib.util.spec_from_file_location("_emulated", EMULATED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if outdated(module):
        return "was built for the emulator of other sources: make emulated"
    return module
