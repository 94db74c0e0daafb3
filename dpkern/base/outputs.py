"""Check output files before training, and write them whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from . import files
from .errors import InvalidInput

REPORT = "report.json"
CHECKPOINT = "checkpoint.pt"
FIGURE = "training.png"
VECTOR_FIGURE = "training.svg"
CONFIG = "config.toml"
PAGE = "report.html"
RESULTS = (REPORT, CHECKPOINT, FIGURE, VECTOR_FIGURE, CONFIG, PAGE)
"""The files of a complete run of the command line."""


def new_directory(root: Path = Path("runs")) -> Path:
    """Return a name that no run has taken: ``runs/<date>-<time>``, with a number if that exists."""
    stem = time.strftime("%Y%m%d-%H%M%S")
    path, number = root / stem, 2
    while path.exists():
        path, number = root / f"{stem}-{number}", number + 1
    return path


def check_output(directory: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse a directory that cannot be written, or whose results would be lost.

    Creates nothing, so that a run refused later leaves no trace.

    Raises:
        InvalidInput: a file in the way, no permission, or results of another run.
    """
    try:
        existing = directory
        while not existing.exists():
            existing = existing.parent
        writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
        found = f"{existing}, which is {'read-only' if existing.is_dir() else 'a file'}"
    except OSError as error:
        writable, found = False, f"{directory}: {error.strerror}"
    if not writable:
        raise InvalidInput(
            "out",
            expected="a directory that can be created and written",
            got=found,
            remedy="Choose another --out.",
        )
    if overwrite or resume:
        return
    taken = [name for name in RESULTS if (directory / name).exists()]
    if taken:
        raise InvalidInput(
            "out",
            expected="a directory without results",
            got=f"{directory} with {', '.join(taken)}",
            remedy="Choose another --out, continue with --resume, or pass --overwrite.",
        )


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Make the folder if need be, and let ``write`` fill the file (``files.write_atomically``).

    Raises:
        InvalidInput: the file system refuses; a file that was there stands.
    """
    make_folder(path)
    files.write_atomically(path, write, name="out")


def make_folder(path: Path) -> None:
    """Make the folder that the file stands in.

    Raises:
        InvalidInput: the file system refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.unusable("out", path.parent, error) from error
