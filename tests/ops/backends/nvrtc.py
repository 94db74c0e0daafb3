"""The run-time compiler of CUDA without a GPU; functions have the names that CuPy gives them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from dpkern.ops.backends._cupy_sources import expression
from dpkern.ops.backends._generated import headers
from dpkern.ops.backends._kernels import KERNELS


@dataclass(frozen=True)
class Compiled:
    """What came out: ``names`` maps every kernel asked for to its name in the binary."""

    ok: bool
    log: str
    names: dict[str, str]
    ptx: str


@cache
def library() -> ctypes.CDLL | None:
    """libnvrtc of the package ``nvidia-cuda-nvrtc``, or None."""
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).glob("cu*/lib/libnvrtc.so.*")):
            # Found by its plain name only once it is loaded.
            for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    return None


class NVRTCError(RuntimeError):
    """CuPy's."""


class Nvrtc:
    """The library as ``cupy.cuda.nvrtc``, which knows a program by its address.

    Raises:
        RuntimeError: there is no library; NVRTCError: what it was asked for failed.
    """

    NVRTCError = NVRTCError

    def __init__(self) -> None:
        found = library()
        if found is None:
            raise RuntimeError("libnvrtc is not installed")
        self._library = found

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            raise NVRTCError(f"{name}: error {error}")

    def _bytes(self, what: str, program: int) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", ctypes.c_void_p(program), ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", ctypes.c_void_p(program), text)
        return text.raw

    def getSupportedArchs(self) -> tuple[int, ...]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return tuple(found)

    def createProgram(
        self, code: str, name: str, headers: Sequence[str] = (), names: Sequence[str] = ()
    ) -> int:
        program = ctypes.c_void_p()
        texts, under = (
            (ctypes.c_char_p * len(each))(*(text.encode() for text in each))
            for each in (headers, names)
        )
        given = code.encode(), name.encode(), len(headers), texts, under
        self._call("nvrtcCreateProgram", ctypes.byref(program), *given)
        assert program.value is not None
        return program.value

    def addNameExpression(self, program: int, name: str) -> None:
        self._call("nvrtcAddNameExpression", ctypes.c_void_p(program), name.encode())

    def compileProgram(self, program: int, options: Sequence[str]) -> None:
        packed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._call("nvrtcCompileProgram", ctypes.c_void_p(program), len(options), packed)

    def getProgramLog(self, program: int) -> str:
        return self._bytes("ProgramLog", program).rstrip(b"\0").decode()

    def getPTX(self, program: int) -> bytes:
        return self._bytes("PTX", program)

    def getCUBIN(self, program: int) -> bytes:
        return self._bytes("CUBIN", program)

    def getLoweredName(self, program: int, name: str) -> str:
        lowered = ctypes.c_char_p()
        address = ctypes.byref(lowered)
        self._call("nvrtcGetLoweredName", ctypes.c_void_p(program), name.encode(), address)
        assert lowered.value is not None
        return lowered.value.decode()

    def destroyProgram(self, program: int) -> None:
        self._call("nvrtcDestroyProgram", ctypes.byref(ctypes.c_void_p(program)))


def expressions(source: str) -> list[str]:
    """The names of every instance in a source of kernels."""
    return [
        expression(kernel.symbol(instance))
        for kernel in KERNELS
        if kernel.source == source
        for instance in kernel.instances
    ]


def compile_source(source: str, options: Sequence[str], kernels: Sequence[str] = ()) -> Compiled:
    """Compile for a device; ``kernels`` are instantiations such as ``f<float>``. Generated headers
    are given as the cupy backend gives them.

    Raises:
        RuntimeError: the compiler itself could not be used.
    """
    nvrtc = Nvrtc()
    made = headers()
    program = nvrtc.createProgram(source, "source.cu", tuple(made.values()), tuple(made.keys()))
    try:
        for kernel in kernels:
            nvrtc.addNameExpression(program, kernel)
        try:
            nvrtc.compileProgram(program, options)
        except NVRTCError:
            return Compiled(False, nvrtc.getProgramLog(program).strip(), {}, "")
        names = {kernel: nvrtc.getLoweredName(program, kernel) for kernel in kernels}
        ptx = nvrtc.getPTX(program).rstrip(b"\0").decode()
        return Compiled(True, nvrtc.getProgramLog(program).strip(), names, ptx)
    finally:
        nvrtc.destroyProgram(program)
