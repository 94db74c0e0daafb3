"""Write the C++ that is made from Python's declarations into a folder; CMake runs this.

Usage: ``python csrc/generate.py FOLDER``. Files that would not change are left alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]

# The packages without their __init__: neither torch nor dpkern itself need be installed.
for package in ("dpkern", "dpkern.base", "dpkern.ops", "dpkern.ops.backends"):
    sys.modules[package] = module = ModuleType(package)
    module.__path__ = [str(ROOT.joinpath(*package.split(".")))]

from dpkern.ops.backends import _bindings, _generated  # noqa: E402


def main(folder: Path) -> None:
    """Write the files that CMakeLists.txt compiles or includes."""
    for name, text in {**_generated.headers(), **_generated.units(), **_bindings.files()}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
