"""A stand-in for CuPy: it records what would be compiled, loaded and launched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.ops.backends.nvrtc import NVRTCError

ARCHS = (75, 80, 90, 100)


class CUDADriverError(RuntimeError):
    """CuPy's."""

    status = 2


class CUDARuntimeError(RuntimeError):
    """CuPy's."""


@dataclass
class Program:
    """What the run-time compiler was asked for."""

    code: str
    name: str
    headers: dict[str, str]
    expressions: list[str] = field(default_factory=list)
    options: tuple[str, ...] = ()


class Recorder:
    """The compiler ``cupy.cuda.nvrtc``, whose binaries are the names of their kernels."""

    NVRTCError = NVRTCError

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.alive: set[int] = set()
        self.fails = ""

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def getSupportedArchs(self) -> tuple[int, ...]:
        return ARCHS

    def createProgram(
        self, code: str, name: str, headers: Sequence[str], names: Sequence[str]
    ) -> int:
        self.programs.append(Program(code, name, dict(zip(names, headers, strict=True))))
        self.alive.add(len(self.programs))
        return len(self.programs)

    def addNameExpression(self, program: int, name: str) -> None:
        self.programs[program - 1].expressions.append(name)

    def compileProgram(self, program: int, options: Sequence[str]) -> None:
        self.programs[program - 1].options = tuple(options)
        if self.fails:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getProgramLog(self, program: int) -> str:
        return self.fails

    def getCUBIN(self, program: int) -> bytes:
        return f"cubin {self.programs[program - 1].expressions}".encode()

    def getPTX(self, program: int) -> bytes:
        return f"ptx {self.programs[program - 1].expressions}".encode()

    def getLoweredName(self, program: int, name: str) -> str:
        return name

    def destroyProgram(self, program: int) -> None:
        self.alive.remove(program)


class FakeCupy:
    """The parts of CuPy that the backend uses; launches are recorded."""

    __version__ = "14.0.0"

    def __init__(self, nvrtc: Any = None) -> None:
        self.launches: list[tuple[str, tuple[int, ...], int, list[Any]]] = []
        self.binaries: list[bytes] = []
        self.streams: list[int] = []
        self.fails: Exception | None = None
        self.refuses = ""
        self.devices = 1
        self.device, self.capability = 0, "90"
        self.nvrtc = Recorder() if nvrtc is None else nvrtc
        self.cuda = SimpleNamespace(
            Device=self._device,
            Module=lambda: Module(self),
            Stream=SimpleNamespace(from_external=self._stream),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError, getDeviceCount=lambda: self.devices
            ),
            nvrtc=self.nvrtc,
        )

    def _device(self, index: int | None = None) -> SimpleNamespace:
        index = self.device if index is None else index
        return SimpleNamespace(id=index, compute_capability=self.capability)

    @contextmanager
    def _stream(self, stream: Any) -> Iterator[None]:
        version, address = stream.__cuda_stream__()
        assert version == 0
        self.streams.append(address)
        yield

    def launched(self, name: str, grid: tuple[int, ...], block: tuple[int], args: Any) -> None:
        """One launch.

        Raises:
            whatever ``fails`` says.
        """
        if self.fails is not None:
            raise self.fails
        self.launches.append((plain(name), (*grid, 1, 1)[:3], block[0], list(args)))


class Module:
    """A binary in the memory of the current device."""

    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy, self.binary = cupy, b""

    def load(self, binary: bytes) -> None:
        if self.cupy.refuses:
            raise CUDADriverError(self.cupy.refuses)
        self.binary = binary
        self.cupy.binaries.append(binary)

    def get_function(self, name: str) -> Any:
        assert name.encode() in self.binary
        return lambda grid, block, args: self.cupy.launched(name, grid, block, args)


def plain(name: str) -> str:
    """A kernel's name without namespaces and parameters, integers by their size."""
    name = re.sub(r"\bdpkern::(cuda::)?", "", name.removeprefix("void ")).split("(")[0]
    for type_, sized in (("unsigned char", "uint8"), ("long", "int64"), ("int", "int32")):
        name = re.sub(rf"\b{type_}\b", f"std::{sized}_t", name)
    return name
