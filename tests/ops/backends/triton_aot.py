"""Compile the Triton kernels that calls of ops would run on a device that is not here.

``python -m tests.ops.backends.triton_aot 90`` calls the ops
(``tests/ops/backends/triton_calls.py``) on CPU tensors, with a
driver that names the device and launches that compile and stop there. So types, constants and what
Triton knows about sizes and addresses are those of a real launch: there is no second statement of
them. It prints JSON: what did not compile, kernels that no call launches, and for each form of a
kernel its registers, spilled bytes and shared memory from the compiled code, and those instructions
of the intermediate code that no kernel may have.

A process that interprets kernels cannot compile them, so this runs in one of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks import machine_code
from dpkern.base import dispatch
from dpkern.base.rng import Purpose
from dpkern.ops import ghost, noise
from dpkern.ops.backends import triton as backend
from dpkern.ops.backends._triton import launch
from dpkern.ops.testing import KEY
from tests.ops.backends.triton_calls import calls

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
INEXACT = re.compile(r"\.approx|(?<!cvt\.rmi)\.ftz|\bfma\.rn\.f\d+|\.full\.")
"""In the intermediate code: arithmetic that another backend would round otherwise. Rounding down
(``cvt.rmi``) may flush: ``release_floats`` in ``_triton/lattice.py`` says why."""
COPIED = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+|\d+)[,;]")
"""Bytes of an asynchronous copy to shared memory."""
JUMP = re.compile(r"/\*([0-9a-f]{4,})\*/ [^;]*\bBRA\S* [^;]*?0x([0-9a-f]+)")
STACK = re.compile(r"/\*([0-9a-f]{4,})\*/ [^;]*\b(?:STL|LDL)\b")
"""Machine instructions and their addresses."""


class Driver:
    """A device of this compute capability, of which Triton asks no more than its name."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled by device

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0


class Compiling:
    """Launches compile and stop there.

    Attributes:
        capability: of the device that is not here.
        often: the calls whose forms are all compiled, as a regular expression; of other calls, a
            kernel's first form. None: everything.
        call: the name of the call at hand.
        found: reports of all forms seen so far; None where there is none.
        kernels: names of those of which a form was compiled.
        failed: kernel, call and message where a form did not compile.
    """

    def __init__(self, capability: int, often: str | None) -> None:
        self.capability, self.often = capability, often
        self.call = ""
        self.found: dict[tuple[str, str], dict[str, Any] | None] = {}
        self.kernels: set[tuple[str, str]] = set()
        self.failed: list[str] = []
        self._form: tuple[str, str] | None = None
        self._about: dict[str, Any] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside the block; ops take CPU tensors for the device's."""
        run, hook, place = JITFunction.run, triton.knobs.runtime.jit_cache_hook, launch.DEVICE

        def compile_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
            self._compile(kernel, lambda: run(kernel, *args, warmup=True, **kwargs))

        driver.set_active(Driver(self.capability))
        triton.knobs.runtime.jit_cache_hook = self._seen_or_skipped
        JITFunction.run, launch.DEVICE = compile_only, "cpu"
        try:
            with dispatch.replaced("triton", backend.kernels("cpu")):
                yield
        finally:
            JITFunction.run, launch.DEVICE = run, place
            triton.knobs.runtime.jit_cache_hook = hook

    def _seen_or_skipped(self, *, key: Any, fn: Any, compile: Any, **_: Any) -> bool:
        """Triton asks before it compiles a form; True: it does not."""
        kernel = fn.module, fn.name
        form = fn.module, f"{fn.name} {key}"
        wanted = self.often is None or re.search(self.often, self.call)
        if form in self.found or not (wanted or kernel not in self.kernels):
            return True
        self._form, self._about = form, compile
        self.found[form] = None
        return False

    def _compile(self, kernel: Any, run: Callable[[], Any]) -> None:
        started = time.perf_counter()
        self._form = None
        try:
            compiled = run()
        except (TritonError, RuntimeError) as error:
            self.failed.append(f"{kernel.__name__} in {self.call}: {error}"[:400])
            return
        if self._form is not None:
            seconds = round(time.perf_counter() - started, 2)
            self.found[self._form] = {"seconds": seconds, **self._report(kernel, compiled)}
            self.kernels.add((kernel.__module__, kernel.__name__))

    def _report(self, kernel: Any, compiled: Any) -> dict[str, Any]:
        ptx, begins = compiled.asm["ptx"], starts(compiled.asm["ttir"])
        fused = self._about["enable_fp_fusion"]
        return {
            "module": kernel.__module__.rsplit(".", 1)[-1],
            "kernel": kernel.__name__,
            "call": self.call,
            "triton": triton.__version__,
            "capability": self.capability,
            "types": self._about["signature"],
            "multiples": multiples(kernel, self._about["configs"][0]),
            "copied": sorted({int(size, 0) for size in COPIED.findall(ptx)}),
            "inexact": sorted(
                found for found in set(INEXACT.findall(ptx)) if not (fused and "fma" in found)
            ),
            "products": len(begins),
            "merged": sum(not start.startswith("cst") for start in begins),
            "tf32": "tf32" in ptx,
            "warps": self._about["num_warps"],
            "constants": {
                kernel.arg_names[path[0]]: value
                for path, value in self._about["constants"].items()
                if len(path) == 1 and isinstance(value, (bool, int))
            },
            "loop": loop(compiled.asm["cubin"]) if begins else None,
            **resources(compiled.asm["cubin"]),
            "dynamic_shared": compiled.metadata.shared,
        }


def loop(cubin: bytes) -> dict[str, Any] | None:
    """Return what the loop of the product consists of; None without one."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        (code,) = machine_code.kernels(_dumped(file.name, "-sass"))
    found = machine_code.product_loop(code)
    if found is None:
        return None
    loads = found.widths("LDG", "LD", "LDGSTS")
    return {
        "instructions": len(found),
        "pipes": dict(found.pipes),
        "loads": {str(width): times for width, times in sorted(loads.items())},
        "local": found.local,
    }


def multiples(kernel: Any, attributes: dict[tuple[int, ...], Any]) -> list[str]:
    """What Triton was told to be multiples of 16: arguments, and members of tuples."""
    told = sorted(path for path, known in attributes.items() if known)
    return [".".join((kernel.arg_names[path[0]], *map(str, path[1:]))) for path in told]


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread, bytes of stack (spills) and shared memory, and how many instructions
    between a loop's ends read or write the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = dict(
            re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", _dumped(file.name, "-res-usage"))
        )
        used = {name.lower(): int(found[name]) for name in ("REG", "STACK", "SHARED", "LOCAL")}
        return used | {"looped": looped(_dumped(file.name, "-sass")) if used["stack"] else 0}


def _dumped(path: str, what: str) -> str:
    command = [str(CUOBJDUMP), what, path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def looped(sass: str) -> int:
    """Of machine instructions; a loop goes from a jump back to where it leads."""
    jumps = [(int(at, 16), int(to, 16)) for at, to in JUMP.findall(sass)]
    places = [int(at, 16) for at in STACK.findall(sass)]
    return sum(any(to <= place < at for at, to in jumps) for place in places)


def starts(ttir: str) -> list[str]:
    """What the sums of each product begin with: a constant, unless a total was merged into it."""
    return re.findall(r"tt\.dot %[\w#]+, %[\w#]+, %(\w+)", ttir)


def defined() -> set[tuple[str, str]]:
    """Module and name of every kernel of the backend."""
    package = launch.__name__.rsplit(".", 1)[0]
    return {
        (value.__module__, value.__name__)
        for name in [name for name in sys.modules if name.startswith(package)]
        for value in vars(sys.modules[name]).values()
        if isinstance(value, JITFunction) and value.__name__.endswith("_kernel")
    }


@triton.jit
def _inexact_kernel(x):
    value = tl.load(x)
    tl.store(x, value / (value * value + value))


@triton.jit
def _refused_kernel(x):
    tl.static_assert(x.dtype.element_ty == tl.float64, "no device compiles this")


def controls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Kernels at fault: the checks must find them."""
    x, stream = torch.ones(1024), KEY.stream(Purpose.NOISE, 1)
    yield "inexact", lambda: launch.launch(_inexact_kernel, 1, x, x)
    yield "refused", lambda: launch.launch(_refused_kernel, 1, x, x)

    def cramped(call: Callable[[], Any]) -> None:
        run = JITFunction.run
        JITFunction.run = lambda *args, **kwargs: run(*args, **{**kwargs, "maxnreg": 32})
        try:
            call()
        finally:
            JITFunction.run = run

    draws = partial(noise.lattice_draws, stream, position=0, count=600, backend="triton")
    a = torch.zeros(2, 128, 128)
    gradient = partial(ghost.linear_gradient, a, a, backend="triton")
    yield "spilling", lambda: cramped(draws)
    yield "spilling in a loop", lambda: cramped(gradient)


def main() -> int:
    """Print what became of the forms on the architectures asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capabilities", nargs="+", type=int, help="such as 80 90 100")
    parser.add_argument("--only", default="", help="calls to make, as a regular expression")
    parser.add_argument("--often", help="calls whose forms are all compiled; else one per kernel")
    parser.add_argument("--controls", action="store_true", help="kernels at fault instead")
    arguments = parser.parse_args()
    result: dict[str, list[Any]] = {"reports": [], "failed": []}
    seen: set[tuple[str, str]] = set()
    for capability in arguments.capabilities:
        compiling = Compiling(capability, arguments.often)
        with compiling.on():
            for name, call in controls() if arguments.controls else calls():
                if re.search(arguments.only, name):
                    compiling.call = name
                    call()
        result["reports"] += filter(None, compiling.found.values())
        result["failed"] += compiling.failed
        seen |= compiling.kernels
    result["missing"] = sorted(".".join(kernel) for kernel in defined() - seen)
    json.dump(result, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
