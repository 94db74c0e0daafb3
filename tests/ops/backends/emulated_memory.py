"""Shared memory of the emulated kernels: where it lies, so that it can be filled before each block.

Each ``__shared__`` variable is a static one there, which keeps what the last block left in it. The
linker's table of symbols says where; nothing is declared twice.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from types import ModuleType

from tests.ops.backends.cuda_gate import ROOT

_SHARED = re.compile(r"__shared__\s[^;]*?\b(\w+)(?:\[[^;]*\])?;")
_SYMBOL = re.compile(r"^([0-9a-f]+) ([0-9a-f]+) [bBdDuVv] (_ZZN6dpkern4cuda\S*)$", re.MULTILINE)


def names() -> set[str]:
    """Return the names of shared variables in the sources."""
    sources = (ROOT / "csrc" / "cuda").iterdir()
    return {name for source in sources for name in _SHARED.findall(source.read_text())}


def regions(module: ModuleType) -> list[tuple[int, int]]:
    """Return addresses and sizes of all shared variables of a loaded module.

    Raises:
        FileNotFoundError: there is no ``nm``.
    """
    nm = shutil.which("nm")
    if nm is None:
        raise FileNotFoundError("nm: install binutils")
    path = str(module.__file__)
    table = subprocess.run([nm, "-S", path], check=True, capture_output=True, text=True).stdout
    entry = next(line for line in table.splitlines() if line.endswith(" PyInit__emulated"))
    loaded = ctypes.cast(ctypes.CDLL(path).PyInit__emulated, ctypes.c_void_p).value
    assert loaded is not None
    offset = loaded - int(entry.split()[0], 16)
    ends = tuple(f"E{len(name)}{name}" for name in names())
    places = [
        (offset + int(place, 16), int(size, 16))
        for place, size, symbol in _SYMBOL.findall(table)
        if re.sub(r"(_\d+)?$", "", symbol).endswith(ends)
    ]
    return sorted(set(places))
