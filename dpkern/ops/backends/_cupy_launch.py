"""A kernel of the CUDA sources started by CuPy, on the caller's stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _tables
from ._cupy_compile import Compiler

_MOST_BLOCKS = 2**31 - 1
TILE_THREADS, TILES_PER_BLOCK = 128, 8
"""Of a block that makes noise."""


def blocks_of(n: int, per_block: int = 1) -> int:
    """Of a grid for n."""
    # More than a grid may have fail at the launch.
    return min(-(-n // per_block), _MOST_BLOCKS + 1)


def tile_blocks(first: int, n: int) -> int:
    """Of a grid that makes the noise of n positions from ``first`` on."""
    return blocks_of(first % _tables.TILE + n, _tables.TILE * TILES_PER_BLOCK)


def by_value(packed: bytes, layout: np.dtype[Any]) -> _tables.Table:
    """These bytes as a kernel's argument."""
    # CuPy passes arrays of one element by value.
    return np.frombuffer(packed, layout).copy()


class _Stream:
    """A stream of another library, by the protocol of CUDA streams."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, address."""
        return 0, self.address


class Launcher:
    """Compile on first use, launch on the caller's stream."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self._texts: dict[int, str] = {}
        self._kernel = Compiler(cupy).kernel

    def error_text(self, error: int) -> str:
        """What an error of a launch means."""
        return self._texts[error]

    def launch(
        self, source: str, kernel: str, grid: tuple[int, ...], threads: int, cuda: int, *args: Any
    ) -> int:
        run = self._kernel(source, kernel)
        try:
            with self.cupy.cuda.Stream.from_external(_Stream(cuda)):
                run(grid, (threads,), args)
        except self.cupy.cuda.driver.CUDADriverError as error:
            self._texts[error.status] = str(error)
            return int(error.status)
        return 0
