"""Run a long item in pieces: each is computed once, kept in a file, and counted by a progress bar.

A piece is one setting of an experiment, all its seeds together. Its file is named by a digest of
everything that its numbers depend on, so an interrupted item continues where it stopped, and items
that need the same setting share it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..base.errors import InvalidInput
from ..base.json import dumps
from ..base.outputs import write_atomically
from ..base.version import __version__

FOLDER = "settings"
"""The folder below --out with one file for each finished piece."""

LAYOUT = 2
"""Version of the numbers that pieces hold; files of another one are computed again."""

OnStep = Callable[[int], None]
"""A callback that takes the number of steps done."""

_FLOATS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


class ProgressListener(Protocol):
    """An observer of an item's progress."""

    def piece(self, label: str, number: int, count: int) -> None:
        """Note the piece that begins; ``count`` of them in all."""

    def progress(self, share: float) -> None:
        """Note how much of the item is done, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class CachedRun:
    """One setting.

    Attributes:
        label: label of the progress bar.
        key: everything that the numbers depend on, in JSON terms: data, seeds, schedule, ...
        compute: its numbers, in JSON terms; calls back after each step.
        steps: number of steps, on a scale shared by the item's pieces.
    """

    label: str
    key: Mapping[str, Any]
    compute: Callable[[OnStep], Mapping[str, Any]]
    steps: int = 1


@dataclass(kw_only=True)
class ResultCache:
    """Pieces that have been computed: in this process, and with ``resume`` before it.

    Attributes:
        folder: folder of the files. None keeps the pieces in memory only.
        resume: whether files of earlier processes count.
    """

    folder: Path | None = None
    resume: bool = False
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def find(self, piece: CachedRun) -> dict[str, Any] | None:
        """Return the piece's numbers, if it was computed by this version; else None.

        Raises:
            InvalidInput: its file is not one of ours.
        """
        name = _digest(piece)
        if name not in self._known and self.resume and self.folder is not None:
            path = self.folder / f"{name}.json"
            if path.exists():
                self._known[name] = _read(path, piece)
        return self._known.get(name)

    def keep(self, piece: CachedRun, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Write the numbers, and return them as they will be read.

        Raises:
            InvalidInput: the folder cannot be written.
        """
        name = _digest(piece)
        text = dumps({**_identity(piece), "numbers": dict(numbers)}, indent=1) + "\n"
        if self.folder is not None:
            write_atomically(self.folder / f"{name}.json", lambda file: file.write(text.encode()))
        self._known[name] = _floats(json.loads(text)["numbers"])
        return self._known[name]


def through(
    pieces: Sequence[CachedRun], finished: ResultCache, watch: ProgressListener | None
) -> list[dict[str, Any]]:
    """Return the numbers of each piece, in order; finished pieces are not computed again.

    Raises:
        InvalidInput: as the pieces and their files do.
        KeyboardInterrupt: interrupted; the pieces before it are kept.
    """
    total = sum(piece.steps for piece in pieces)
    before, found = 0, []
    for number, piece in enumerate(pieces, start=1):
        if watch is not None:
            watch.piece(piece.label, number, len(pieces))
        numbers = finished.find(piece)
        if numbers is None:
            numbers = finished.keep(piece, piece.compute(_telling(watch, before, piece, total)))
        found.append(numbers)
        before += piece.steps
        if watch is not None:
            watch.progress(before / max(total, 1))
    return found


def _telling(watch: ProgressListener | None, before: int, piece: CachedRun, total: int) -> OnStep:
    if watch is None:
        return lambda done: None
    return lambda done: watch.progress((before + min(done, piece.steps)) / max(total, 1))


def _identity(piece: CachedRun) -> dict[str, Any]:
    return {"dpkern": __version__, "layout": LAYOUT, "key": dict(piece.key)}


def _digest(piece: CachedRun) -> str:
    text = json.dumps(json.loads(dumps(_identity(piece))), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(path: Path, piece: CachedRun) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        identity = json.loads(dumps(_identity(piece)))
        same = {name: content[name] for name in identity} == identity
        numbers = content["numbers"] if same else None
    except (OSError, ValueError, KeyError, TypeError):
        numbers = None
    if not isinstance(numbers, dict):
        raise InvalidInput(
            "out",
            expected=f"finished settings below {path.parent}",
            got=f"{path.name}, which is not the file that was written",
            remedy="Delete this file, or leave --resume out.",
        )
    found: dict[str, Any] = _floats(numbers)
    return found


def _floats(value: Any) -> Any:
    """Convert back to floats what ``plain`` made words of."""
    if isinstance(value, dict):
        return {name: _floats(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return _FLOATS.get(value, value) if isinstance(value, str) else value
