"""Set up a script's surroundings anew for each of its runs."""

from __future__ import annotations

import io
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch

from .loop_records import SEED, generators_restored, seed_everything
from .loop_state import is_own


@contextmanager
def printed(silent: bool) -> Iterator[None]:
    """Pass on what a script prints, or discard it."""
    if not silent:
        yield
        return
    with redirect_stdout(io.StringIO()):
        yield


@contextmanager
def as_script(path: Path) -> Iterator[None]:
    """Set arguments, module path, generators and settings as a script finds them, for one run."""
    before = sys.argv, list(sys.path), set(sys.modules), Path.cwd()
    dtype, threads, grads = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )
    sys.argv, sys.path[:0] = [str(path)], [str(path.parent)]
    try:
        with generators_restored():
            seed_everything(SEED)
            yield
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        os.chdir(before[3])
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grads)
        for name in set(sys.modules) - before[2]:  # each run reads the script's own files anew
            if is_own(getattr(sys.modules[name], "__file__", None), path.parent):
                del sys.modules[name]


def read(path: Path) -> types.ModuleType:
    """Return the file as a fresh module."""
    name = f"dpkern_loop_{path.stem}"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and workers look themselves up there
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module
