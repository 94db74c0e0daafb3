"""Launch kernels that CuPy compiles at run time, on the caller's stream."""

from __future__ import annotations

from typing import Any

from ._cupy_compile import Compiler
from ._kernels import KERNELS, CudaKernel, Instance


class _Stream:
    """A stream of another library, by the protocol of CUDA streams."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol and the address."""
        return 0, self.address


class Compiling:
    """A starter that compiles a kernel when it is first started."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self._texts: dict[int, str] = {}
        self._kernel = Compiler(cupy).kernel

    def error_text(self, error: int) -> str:
        """Return the text of an error: ``Starter.error_text``."""
        return self._texts[error]

    def preload(self) -> int:
        """Load a kernel: ``Starter.preload``."""
        for kernel in KERNELS:
            for instance in kernel.instances:
                self._kernel(kernel.source, kernel.symbol(instance))
        return 0

    def start(
        self,
        kernel: CudaKernel,
        instance: Instance,
        grid: tuple[int, int],
        arguments: list[Any],
        stream: int,
    ) -> int:
        """Start a kernel: ``Starter.start``."""
        run = self._kernel(kernel.source, kernel.symbol(instance))
        try:
            with self.cupy.cuda.Stream.from_external(_Stream(stream)):
                run(grid, (kernel.threads,), tuple(arguments))
        except self.cupy.cuda.driver.CUDADriverError as error:
            self._texts[error.status] = str(error)
            return int(error.status)
        return 0
