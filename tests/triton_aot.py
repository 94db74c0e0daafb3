"""Compile every Triton kernel for devices that are not here: ``python -m tests.triton_aot 90``.

A process that interprets kernels cannot compile them, so this runs in one of its own. It prints a
JSON list, one entry per kernel and form: registers, spilled bytes and shared memory from the
compiled code, and the instructions of the intermediate code that no kernel may have.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dpkern.backends import triton as backend
from dpkern.backends._triton import launch, noise

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
INEXACT = re.compile(r"\.approx|(?<!cvt\.rmi)\.ftz|\bfma\.rn\.f\d+|\.full\.")
"""In the intermediate code: arithmetic that another backend would round otherwise. Rounding down
(``cvt.rmi``) may flush: ``release_floats`` in ``_triton/lattice.py`` says why."""


def forms(only: list[str], first: bool = False) -> Iterator[tuple[str, Any]]:
    """Each module's kernels in the forms it lists, or in the first one of each."""
    for module in backend.modules():
        name = module.__name__.rsplit(".", 1)[1]
        seen: set[Any] = set()
        for form in module.AOT if not only or name in only else ():
            if not first or form.kernel not in seen:
                yield name, form
            seen.add(form.kernel)


@triton.jit
def _inexact_kernel(x):
    value = tl.load(x)
    tl.store(x, value / (value * value + value))


def controls() -> Iterator[tuple[str, Any]]:
    """Kernels at fault: the checks must find them."""
    yield "control", launch.Aot(_inexact_kernel, {"x": "*fp32"}, {}, fused=False)
    spilling = next(form for form in noise.AOT if form.kernel is noise.draws_kernel)
    yield "control", spilling._replace(registers=32)


def path(names: list[str], name: Any) -> tuple[int, ...]:
    """Where an argument is, or ``(name, i)`` of a tuple."""
    member = name if isinstance(name, tuple) else (name,)
    return (names.index(member[0]), *member[1:])


def compile_form(form: Any, capability: int) -> Any:
    """Triton's compiled kernel."""
    names = form.kernel.arg_names
    if set(form.signature) != set(names):
        raise ValueError(f"{form.kernel.__name__}: signature {[*form.signature]}, takes {names}")
    pointers = [name for name in names if str(form.signature[name]).startswith("*")]
    aligned = [*pointers, *form.aligned]
    source = ASTSource(
        fn=form.kernel,
        signature={name: form.signature[name] for name in names},
        constexprs={path(names, name): value for name, value in form.constants.items()},
        attrs={path(names, name): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {
        "num_warps": form.warps,
        "num_stages": form.stages,
        "enable_fp_fusion": form.fused,
    }
    if form.registers is not None:
        options["maxnreg"] = form.registers
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and bytes of stack (spills) and shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text))
    return {name.lower(): int(found[name]) for name in ("REG", "STACK", "SHARED", "LOCAL")}


def starts(ttir: str) -> list[str]:
    """What the sums of each product begin with: a constant, unless a total was merged into it."""
    return re.findall(r"tt\.dot %[\w#]+, %[\w#]+, %(\w+)", ttir)


def report(name: str, form: Any, capability: int) -> dict[str, Any]:
    """What became of one form."""
    started = time.perf_counter()
    kernel = compile_form(form, capability)
    ptx, begins = kernel.asm["ptx"], starts(kernel.asm["ttir"])
    return {
        "module": name,
        "kernel": form.kernel.__name__,
        "form": {str(name): value for name, value in {**form.signature, **form.constants}.items()},
        "capability": capability,
        "seconds": round(time.perf_counter() - started, 2),
        "inexact": sorted(
            found for found in set(INEXACT.findall(ptx)) if not (form.fused and "fma" in found)
        ),
        "products": len(begins),
        "merged": sum(not start.startswith("cst") for start in begins),
        "tf32": "tf32" in ptx,
        **resources(kernel.asm["cubin"]),
        "dynamic_shared": kernel.metadata.shared,
    }


def main() -> int:
    """Print the reports of the architectures and modules asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capabilities", nargs="+", type=int, help="such as 80 90 100")
    parser.add_argument("--only", nargs="*", default=[], help="modules, such as noise clip")
    parser.add_argument("--first", action="store_true", help="one form of each kernel")
    parser.add_argument("--controls", action="store_true", help="kernels at fault instead")
    arguments = parser.parse_args()
    chosen = [*(controls() if arguments.controls else forms(arguments.only, arguments.first))]
    found = [
        report(name, form, capability)
        for capability in arguments.capabilities
        for name, form in chosen
    ]
    json.dump(found, sys.stdout, indent=1, default=str)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
