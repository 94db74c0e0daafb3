"""Start kernels of the launch table on a device, whichever compiler made them.

The two starters are ``cuda.ModuleLauncher``, which runs binaries built ahead, and
``_cupy_launch.Compiling``, which compiles the same sources at run time. Both take the grid and the
arguments that this file makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from ...base.errors import BackendError
from ...base.struct_types import Struct, Type
from ._kernels import CudaKernel, Instance

Refusal = Callable[..., "str | None"]
Run = Callable[..., Any]
Rows = Sequence[tuple[str, Run, Refusal]]
"""``(op, run, refuse)``, both with the ``Device`` in front of the op's arguments."""


class Starter(Protocol):
    """The owner of kernels, which loads and starts them."""

    def start(
        self,
        kernel: CudaKernel,
        instance: Instance,
        grid: tuple[int, int],
        arguments: list[Any],
        stream: int,
    ) -> int:
        """Start a kernel; the error's number, or 0. Arguments are numpy's, single values."""

    def error_text(self, error: int) -> str:
        """Return what an error of ``start`` means."""

    def preload(self) -> int:
        """Load every kernel into the current device; the error's number, or 0."""


@dataclass(frozen=True)
class Device:
    """A device with its kernels.

    Attributes:
        starter: the owner of the kernels.
        name: the backend, for messages.
        type: the type of device that it runs on.
        refusal: why tensors cannot be taken, or None.
    """

    starter: Starter
    name: str
    type: str
    refusal: Refusal

    def start(
        self, kernel: CudaKernel, instance: Instance, stream: int, /, **arguments: Any
    ) -> None:
        """Start a kernel, unless its grid has no blocks.

        Args:
            arguments: by the names of its parameters: numbers, structs, and for pointers tensors,
                addresses or None.

        Raises:
            BackendError: the launch failed.
        """
        assert arguments.keys() == kernel.parameters.keys(), kernel.name
        grid = kernel.grid(**arguments)
        columns, rows = grid if isinstance(grid, tuple) else (grid, 1)
        if not columns:
            return
        packed = [convert(arguments[name]) for name, convert in _converters(kernel, instance)]
        self.check(self.starter.start(kernel, instance, (columns, rows), packed, stream))

    def check(self, error: int) -> None:
        """Raise a ``BackendError`` unless the error's number is 0."""
        if error:
            raise BackendError(
                f"{self.name} kernel",
                expected="a successful launch",
                got=f"error {error}, {self.starter.error_text(error)}",
                remedy="Run again with CUDA_LAUNCH_BLOCKING=1 to find the first call that fails.",
            )

    def place(self, device: torch.device | str) -> torch.device:
        """Return where a result for ``device`` is made: there, if the kernels run there."""
        wanted = torch.device(device)
        return wanted if wanted.type == self.type else torch.device(self.type)


@cache
def _converters(kernel: CudaKernel, instance: Instance) -> list[tuple[str, Callable[[Any], Any]]]:
    """Return converters of a kernel's arguments to numpy's values, by parameter name."""
    types = zip(kernel.parameters, kernel.types(instance), strict=True)
    return [(name, _converter(type_)) for name, type_ in types]


def _converter(type_: Type | Struct) -> Callable[[Any], Any]:
    if isinstance(type_, Struct):
        return lambda value: value.reshape(1)  # CuPy passes arrays of one element by value
    number = np.dtype(type_.format).type
    if not type_.cpp.endswith("*"):
        return number

    def address(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return number(value.data_ptr())
        return number(0 if value is None else value)

    return address


def refuse_nothing(on: Device, *_: Any, **__: Any) -> str | None:
    """Refuse only where no call can run."""
    return on.refusal()


def refuse_first(
    on: Device, first: torch.Tensor | Sequence[torch.Tensor], *_: Any, **__: Any
) -> str | None:
    """Refuse by the device of the first operand, a tensor or a list of them."""
    return on.refusal(*((first,) if isinstance(first, torch.Tensor) else first))
