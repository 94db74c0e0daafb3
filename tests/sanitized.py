"""The device kernels, emulated and compiled with sanitizers, under the tests of their edges.

``python -m tests.sanitized MODULE`` runs them on this module. A sanitizer that finds something ends
the process. Python itself is not compiled with them, so their run-time library is loaded first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = ("tests/ops/backends/test_cuda_kernels.py", "tests/ops/backends/test_cuda_coef.py")


def library() -> str:
    """The run-time library of the address sanitizer, which the C++ compiler knows."""
    command = [os.environ.get("CXX", "c++"), "-print-file-name=libasan.so"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(module: Path) -> int:
    """Run the tests on this compiled module; the exit status."""
    if "LD_PRELOAD" not in os.environ:
        environment = {
            "LD_PRELOAD": library(),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it has until the process ends
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.sanitized", str(module)]
        return subprocess.run(command, env=os.environ | environment, check=False).returncode
    import pytest

    from dpkern.ops.backends import cuda

    cuda.EMULATED = module.resolve()
    found = cuda._emulated()
    if isinstance(found, str):  # or every test would be skipped
        print(f"{module} {found}", file=sys.stderr)
        return 1
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *TESTS]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
