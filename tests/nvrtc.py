"""The run-time compiler of CUDA, called without a GPU: what CuPy would do with our sources."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Compiled:
    """What came out: ``names`` maps every kernel asked for to its name in the binary."""

    ok: bool
    log: str
    names: dict[str, str]


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


def compile_source(source: str, options: Sequence[str], kernels: Sequence[str] = ()) -> Compiled:
    """Compile for a device; ``kernels`` are instantiations such as ``f<float>``.

    Raises:
        RuntimeError: the compiler itself could not be used.
    """
    nvrtc = library()
    if nvrtc is None:
        raise RuntimeError("libnvrtc is not installed")
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"source.cu", 0, None, None
    )
    if created != 0:
        raise RuntimeError(f"nvrtcCreateProgram: error {created}")
    try:
        for kernel in kernels:
            nvrtc.nvrtcAddNameExpression(program, kernel.encode())
        packed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        ok = nvrtc.nvrtcCompileProgram(program, len(options), packed) == 0
        return Compiled(ok, _log(nvrtc, program), _names(nvrtc, program, kernels) if ok else {})
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode().strip()


def _names(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, kernels: Sequence[str]) -> dict[str, str]:
    names = {}
    for kernel in kernels:
        name = ctypes.c_char_p()
        found = nvrtc.nvrtcGetLoweredName(program, kernel.encode(), ctypes.byref(name))
        if found != 0 or name.value is None:
            raise RuntimeError(f"nvrtcGetLoweredName({kernel}): error {found}")
        names[kernel] = name.value.decode()
    return names
