"""Compile the CUDA sources at run time, and give them to CuPy as binaries.

CuPy's own ``RawModule`` adds options to those that it is given, ``-ftz=true`` among them: denormal
numbers would become zero, and the noise would have other bits than everywhere else.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ...base.errors import BackendError
from ._cupy_sources import expression, options, sources
from ._generated import headers


class Compiler:
    """A cache of kernels, each compiled for each device on first use: up to one second each."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self._cached = cache(self._kernel)

    def kernel(self, source: str, name: str) -> Any:
        """Load a kernel of ``csrc/cuda`` into the current device.

        Raises:
            BackendError: the compiler refuses the source, or the driver refuses the binary.
        """
        return self._cached(self.cupy.cuda.Device().id, source, name)

    def _kernel(self, device: int, source: str, name: str) -> Any:
        capability = int(self.cupy.cuda.Device(device).compute_capability)
        binary, symbol = self._compiled(source, name, capability)
        module = self.cupy.cuda.Module()
        try:
            module.load(binary)
            return module.get_function(symbol)
        except self.cupy.cuda.driver.CUDADriverError as error:
            raise BackendError(
                f"{name} of csrc/cuda/{source}.cu",
                expected="a driver that takes what CuPy's run-time compiler makes",
                got=str(error),
                remedy="Update the driver, use a CuPy of the driver's CUDA, or another backend.",
            ) from error

    def _compiled(self, source: str, name: str, capability: int) -> tuple[bytes, str]:
        """Return machine code and the name in it; PTX for a device unknown to the compiler."""
        nvrtc, folder = self.cupy.cuda.nvrtc, sources()
        code = (folder / "cuda" / f"{source}.cu").read_text()
        known = nvrtc.getSupportedArchs()
        native = capability in known
        target = max((arch for arch in known if arch <= capability), default=capability)
        architecture = f"--gpu-architecture={'sm' if native else 'compute'}_{target}"
        made = headers()
        program = nvrtc.createProgram(
            code, f"{source}.cu", tuple(made.values()), tuple(made.keys())
        )
        try:
            nvrtc.addNameExpression(program, expression(name))
            nvrtc.compileProgram(program, (*options(folder), architecture))
            binary = nvrtc.getCUBIN(program) if native else nvrtc.getPTX(program)
            return binary, nvrtc.getLoweredName(program, expression(name))
        except nvrtc.NVRTCError as error:
            raise BackendError(
                f"csrc/cuda/{source}.cu",
                expected="a source that the CUDA run-time compiler accepts",
                got=nvrtc.getProgramLog(program).strip() or str(error),
                remedy="Use a CuPy of CUDA 13, or another backend.",
            ) from error
        finally:
            nvrtc.destroyProgram(program)
