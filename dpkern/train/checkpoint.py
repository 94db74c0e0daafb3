"""Checkpoints: what an interrupted run needs to go on, and nothing that epsilon does not cover.

Readable with ``torch.load(path, weights_only=True)``. Never in it: the key of an unseeded run,
training losses, counts of samples, checksums of the rows.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidInput
from .files import write_atomically

FORMAT = "dpkern training checkpoint"
VERSION = 2
_KEYS = frozenset(
    {
        "format",
        "version",
        "options",
        "noise_multiplier",
        "public",
        "responses",
        "model",
        "step",
        "batches",
        "history",
        "seconds",
    }
)


def write(path: Path, content: dict[str, Any]) -> None:
    """Save ``content`` under the format's name, atomically."""
    whole = {"format": FORMAT, "version": VERSION, **content}
    write_atomically(path, lambda file: torch.save(whole, file))


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint.

    Raises:
        InvalidInput: no such file, not readable, or not a checkpoint of this version.
    """
    if not path.is_file():
        raise InvalidInput(
            "resume",
            expected=f"a checkpoint {path}",
            got="no such file",
            remedy="Name the directory of an interrupted run with --out.",
        )
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise InvalidInput(
            "resume",
            expected="a checkpoint written by dpkern train",
            got=f"{path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            remedy="The file is damaged or of another program; start a new run.",
        ) from error
    ours = isinstance(content, dict) and content.get("format") == FORMAT
    if not ours or content.get("version") != VERSION or set(content) != _KEYS:
        raise InvalidInput(
            "resume",
            expected=f"a {FORMAT} of version {VERSION}",
            got=str(path),
            remedy="Start a new run, or use the version of dpkern that wrote the file.",
        )
    return content
