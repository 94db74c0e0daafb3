"""Checkpoints: all that an interrupted run needs to go on, and nothing outside epsilon.

They are readable with ``torch.load(path, weights_only=True)`` and carry a checksum of their own
(``_sealed``). They never hold the key of an unseeded run, training losses, counts of samples or
checksums of the rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..base import sealed
from ..base.errors import InvalidInput
from ..base.outputs import make_folder

FORMAT = "dpkern training checkpoint"
VERSION = 3
_KEYS = frozenset(
    {
        "format",
        "version",
        "options",
        "noise_multiplier",
        "public",
        "ranges",
        "responses",
        "model",
        "step",
        "batches",
        "history",
        "seconds",
    }
)

OBJECTIVE_FORMAT = "dpkern objective checkpoint"
OBJECTIVE_VERSION = 1
_OBJECTIVE_KEYS = frozenset(
    {"format", "version", "options", "public", "training", "history", "seconds"}
)
"""Keys of runs that perturb their loss: ``training`` is the trainer's own state."""

_KNOWN = {
    FORMAT: (VERSION, _KEYS),
    OBJECTIVE_FORMAT: (OBJECTIVE_VERSION, _OBJECTIVE_KEYS),
}

_ABSENT = "Name the directory of an interrupted run with --out."
_UNSEALED = (
    "dpkern wrote such files before it had checksums: resume with the version that wrote this one, "
    "or start a new run."
)


def write(path: Path, content: dict[str, Any], *, kind: str = FORMAT) -> None:
    """Save ``content`` under the name of its format, atomically."""
    whole = {"format": kind, "version": _KNOWN[kind][0], **content}
    make_folder(path)
    sealed.write(path, whole, name="out")


def read(path: Path, *, kind: str | None = FORMAT) -> dict[str, Any]:
    """Return the content of a checkpoint of this format; None accepts any of ours.

    Raises:
        InvalidInput: no such file, not readable, damaged, or not such a checkpoint of this version.
    """
    content: Any = sealed.read(path, name="resume", unsealed=_UNSEALED, absent=_ABSENT)
    found = str(content.get("format")) if isinstance(content, dict) else ""
    known = found in _KNOWN and kind in (None, found)
    version, keys = _KNOWN[found if known else kind or FORMAT]
    if not known or content.get("version") != version or set(content) != keys:
        raise InvalidInput(
            "resume",
            expected=f"a {kind or FORMAT} of version {version}",
            got=str(path),
            remedy="Start a new run, or use the version of dpkern that wrote the file.",
        )
    result: dict[str, Any] = content
    return result
