"""The commit that this code was made from, for reports."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from .version import __version__

PACKAGE = Path(__file__).parents[1]

BUILT = PACKAGE / "base" / "commit.txt"
"""Written by setup.py into packages that it builds; no checkout has it."""


@cache
def commit() -> str | None:
    """Return the commit's hash, with ``-dirty`` after it if files differ; None if it is not known.

    It is that of the checkout that the code runs from, else the one that setup.py or pip recorded
    when the package was built.
    """
    if (PACKAGE.parent / ".git").exists():
        return _described(PACKAGE.parent)
    try:
        if BUILT.is_file():
            return BUILT.read_text().strip() or None
        recorded = metadata.distribution("dpkern").read_text("direct_url.json")
        found = json.loads(recorded or "{}").get("vcs_info", {}).get("commit_id")
    except (OSError, ValueError, AttributeError, metadata.PackageNotFoundError):
        return None
    return found if isinstance(found, str) else None


def _described(root: Path) -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def version_with_commit() -> str:
    """Return the version, and the commit where it is known."""
    found = commit()
    return __version__ if found is None else f"{__version__}, commit {found}"
