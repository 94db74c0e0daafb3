"""Compile kernels, keep their machine code, and pass them tensors."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from llvmlite import ir
from numba import carray, config, njit, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])
Array = Any
Number = Any
"""Anything that numba gives a type of its own at each call: an array, a number of some width."""

log = logging.getLogger("dpkern")
_HERE = Path(__file__).parent
# Never fastmath: it deletes NaN checks, and contraction would change the bits of the noise.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def _sources() -> str:
    """Return a digest of everything that compiled code depends on; numba looks at one file."""
    package = _HERE.parents[2]
    files = [*sorted(_HERE.glob("*.py")), package / "ops" / "clip.py"]
    files += [package / "base" / f"{name}.py" for name in ("codes", "laws", "layouts")]
    files += sorted((package / "ops" / "coef").glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _cache_place() -> Path | None:
    """Return the first writable place for compiled code."""
    own = [_HERE / "__pycache__", Path("~/.cache/dpkern").expanduser()]
    for parent in [Path(config.CACHE_DIR)] if config.CACHE_DIR else own:
        place = parent / f"numba-{_sources()}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                return place
        except OSError:
            continue
    log.info("numba compiles anew in each process: no writable place among %s", own)
    return None


CACHE = _cache_place()


def kernel(function: Function) -> Function:
    """Compile for each combination of argument types at the first call; keep the machine code."""
    before, config.CACHE_DIR = config.CACHE_DIR, str(CACHE or "")
    try:
        compiled: Function = njit(cache=CACHE is not None, **_OPTIONS)(function)
    finally:
        config.CACHE_DIR = before
    return compiled


def inner(function: Function) -> Function:
    """Compile a part of kernels with each of them."""
    compiled: Function = njit(**_OPTIONS)(function)
    return compiled


def inlined(function: Function) -> Function:
    """Compile a part of kernels whose body stands where it is called."""
    compiled: Function = njit(forceinline=True, **_OPTIONS)(function)
    return compiled


def summing(function: Function) -> Function:
    """Compile a part of kernels whose sums may run in any order, which vectors need.

    Nothing else may be rearranged: NaN and infinity keep their meaning, products and sums their
    roundings.
    """
    compiled: Function = njit(fastmath={"reassoc"}, **_OPTIONS)(function)
    return compiled


@intrinsic
def _pointer(context: Any, address: Any, like: Any) -> Any:
    """Return an address as a pointer to entries of the array ``like``."""
    del context, address

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> ir.Value:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.intp, like), generate


@inlined
def entries(address: Number, count: Number, like: Array) -> Array:
    """Return the ``count`` numbers at an address, of the type of ``like``."""
    return carray(_pointer(address, like), (count,))


_NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bfloat16: np.uint16,
}


def like(dtype: torch.dtype) -> Array:
    """Return an empty array with the type of what stands at an address; bfloat16 as its bits."""
    return np.empty(0, _NUMPY[dtype])


def addresses(tensors: Any) -> Array:
    """Return where the tensors' numbers stand."""
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
