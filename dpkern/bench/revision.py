"""Get a revision of dpkern ready to run: its files, and its compiled module."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from ..base.errors import DPKernError, InvalidInput

SOURCE = Path(__file__).parents[2]
"""The folder that holds dpkern: a repository, or where packages are installed."""
HERE = "."
"""The name of the tree that runs, changed or not."""
BUILD_INPUTS = ("csrc", "CMakeLists.txt", "setup.py", "dpkern/base", "dpkern/ops")
"""Paths that a compiled module depends on."""

BUILT = ".built"
"""The file that says that a revision's folder is whole: one whose build broke off is made anew."""


@dataclass(frozen=True)
class Revision:
    """A revision that can run.

    Attributes:
        name: as the user gave it.
        commit: the full name; None for the tree that runs.
        folder: what holds ``dpkern``.
    """

    name: str
    commit: str | None
    folder: Path


def git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None where it fails, or where this folder is no work tree of its own.

    An installed package may lie inside of another project's repository.
    """
    if not (folder / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def ready(name: str, source: Path = SOURCE) -> Revision:
    """Return a revision with its kernels built, in ``build/bench/<commit>`` of the sources.

    A revision whose kernels are those of the tree that runs takes over its compiled module.

    Raises:
        InvalidInput: dpkern does not run from a git repository, or there is no such revision.
        DPKernError: it does not build.
    """
    if name == HERE:
        return Revision(name, None, source)
    commit = git(source, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if not commit:
        repository = (source / ".git").exists()
        raise InvalidInput(
            "revision",
            expected="a commit, branch or tag" if repository else "dpkern run from its repository",
            got=name if repository else f"{source}, without one",
            remedy="`git log` shows revisions; . is the tree as it is."
            if repository
            else "Clone the repository, run pip install -e ., then compare there.",
        )
    folder = source / "build" / "bench" / commit
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{commit}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two comparisons at once build a revision once
        done = folder / BUILT
        if not done.exists():
            _unpack(commit, source, folder)
            _compile(commit, source, folder)
            done.touch()
    return Revision(name, commit, folder)


def _unpack(commit: str, source: Path, folder: Path) -> None:
    archive = subprocess.run(
        ["git", "-C", str(source), "archive", commit], capture_output=True, check=True
    )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def _compile(commit: str, source: Path, folder: Path) -> None:
    """Build the compiled module, or copy that of the tree that runs where nothing differs."""
    modules = list((source / "dpkern").glob("_C*"))
    if modules and git(source, "diff", "--quiet", commit, "--", *BUILD_INPUTS) is not None:
        for module in modules:
            shutil.copy2(module, folder / "dpkern")
        return
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=folder, stdout=sys.stderr, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode != 0:
        raise DPKernError(
            f"revision {commit[:10]}",
            expected="kernels that build here",
            got=f"code {done.returncode} of {' '.join(command)}",
            remedy=f"Read the build's messages above; the sources are in {folder}.",
        )
