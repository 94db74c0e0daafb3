"""Checkpoint files that carry their own checksum.

A file is what ``torch.save`` writes, a zip archive, and its comment is the seal: the SHA-256 of all
bytes before it. ``torch.load(path, weights_only=True)`` reads it like any other. The archive's last
record counts the comment's bytes and is under the checksum, so no damaged or shortened file can
pass for one that never had a seal. The seal shows damage; it is no signature.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tempfile
from typing import IO, Any

import torch

from .errors import DPKernError, InvalidInput
from .files import file_at, unusable, write_atomically

_LABEL = b"dpkern checkpoint; SHA-256 of all bytes before this comment: "
_SEAL = len(_LABEL) + 2 * hashlib.sha256().digest_size
_END_MARK = b"PK\x05\x06"
_END = 22
"""Bytes of a zip archive's last record, which ends with the length of the comment after it."""
_CHUNK = 1 << 20

_DAMAGED = "Take another copy of the file, or a checkpoint saved before it."


Place = str | os.PathLike[str] | IO[bytes]
"""A path, or an open file of bytes such as ``io.BytesIO``."""


def write(path: Place, content: Any, *, name: str = "path") -> None:
    """Save ``content`` and its seal, atomically (``files.write_atomically``).

    Args:
        path: in a folder that exists; or an open file, which gets all bytes in one write.
        content: tensors and plain values, which ``weights_only`` loading accepts.
        name: the caller's argument, for messages.

    Raises:
        InvalidInput: something that could not be loaded again, or the system refuses; a file that
            was there stands.
    """

    def fill(file: IO[bytes]) -> None:
        sink = _Sink(file)
        try:
            torch.save(content, sink)  # type: ignore[arg-type]
        except (MemoryError, DPKernError):
            raise
        except Exception as error:
            # torch hides why the system refused to write.
            if sink.error is not None:
                raise sink.error from error
            raise _unsaveable(name, f"{type(error).__name__}: {_first_line(error)}") from error
        sink.seal()
        file.flush()
        _check_loadable(name, file.name)

    if not _is_open(path):
        write_atomically(path, fill, name=name)  # type: ignore[arg-type]
        return
    with tempfile.NamedTemporaryFile() as whole:
        fill(whole)
        whole.seek(0)
        content = whole.read()
    try:
        taken = path.write(content)  # type: ignore[union-attr]
    except (OSError, ValueError, TypeError) as error:
        raise _unusable_open(name, "written", path, _first_line(error), "wb") from error
    if taken is not None and taken != len(content):
        got = f"{taken} of {len(content)} bytes were taken"
        raise _unusable_open(name, "written", path, got, "wb")


def read(
    path: Place,
    *,
    name: str = "path",
    unsealed: str,
    absent: str = "Check the path.",
) -> Any:
    """Return the content of a file of ``write``, tensors on the CPU.

    Args:
        path: the file; an open one is read to its end from where it stands.
        name: the caller's argument, for messages.
        unsealed: the remedy for an archive without a seal.
        absent: the remedy where there is no file.

    Raises:
        InvalidInput: no such file, the system refuses, or not a single byte more or less or other
            than what was written.
    """
    if _is_open(path):
        content, shown, remedy = _content_of(name, path)
        return _read(io.BytesIO(content), name, shown, unsealed, remedy)
    source = file_at(name, path)
    try:
        # One open file: what another process puts in its place meanwhile is another file.
        with source.open("rb") as file:
            return _read(file, name, str(source), unsealed, _DAMAGED)
    except FileNotFoundError as error:
        raise InvalidInput(
            name, expected="a checkpoint file", got=f"no file {source}", remedy=absent
        ) from error
    except OSError as error:
        raise unusable(name, source, error, "Check the file's permissions and its disk.") from error


def _read(file: IO[bytes], name: str, shown: str, unsealed: str, damaged: str) -> Any:
    """Return the content of an open file whose seal is whole; the last two are remedies."""
    _check_seal(file, name, shown, unsealed, damaged)
    file.seek(0)
    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except (MemoryError, DPKernError, OSError):
        raise
    except Exception as error:
        raise _refused(name, shown, _first_line(error), damaged) from error


def _content_of(name: str, path: Any) -> tuple[bytes, str, str]:
    """Return the bytes of an open file from where it stands, its name, and a remedy for damage."""
    try:
        start = path.tell() if path.seekable() else 0
        content = path.read()
    except (OSError, ValueError, AttributeError) as error:
        raise _unusable_open(name, "read", path, _first_line(error), "rb") from error
    if not isinstance(content, bytes):
        raise _unusable_open(name, "read", path, f"it yields {type(content).__name__}", "rb")
    remedy = _DAMAGED
    if content.count(_LABEL) > 1:
        remedy = (
            "Several checkpoints were written into it, one after the other: call seek(0) and "
            "truncate() before each, or use a new file for each."
        )
    elif start:
        remedy = f"It was read from byte {start}: call seek(0) on it first."
    return content, _shown(path), remedy


def _shown(path: Any) -> str:
    given = getattr(path, "name", None)
    return given if isinstance(given, str) else f"an open {type(path).__name__}"


def _unusable_open(name: str, done: str, path: Any, got: str, mode: str) -> InvalidInput:
    return InvalidInput(
        name,
        expected=f"a path, or an open file of bytes that can be {done}",
        got=f"{_shown(path)}: {got}",
        remedy=f"Open it with mode {mode!r}, use a new io.BytesIO, or pass a path.",
    )


def _is_open(path: object) -> bool:
    return hasattr(path, "read") and hasattr(path, "write")


class _Sink:
    """A file for ``torch.save`` that takes the checksum on the way and remembers a failure.

    The archive's last record is held back, because the seal's length belongs into it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.error: OSError | None = None
        self._file = file
        self._digest = hashlib.sha256()
        self._tail = b""

    def write(self, data: bytes) -> int:
        """Take over bytes of the archive."""
        view = memoryview(data)
        if len(view) >= _END:
            self._pass(self._tail)
            self._pass(view[:-_END])
            self._tail = bytes(view[-_END:])
        else:
            joined = self._tail + data
            self._pass(joined[:-_END])
            self._tail = joined[-_END:]
        return len(view)

    def flush(self) -> None:
        """Do nothing: only the last record is pending."""

    def seal(self) -> None:
        """Write the archive's last record with the seal as its comment."""
        if not self._tail.startswith(_END_MARK) or self._tail[-2:] != bytes(2):
            raise RuntimeError("torch.save wrote no zip archive")
        self._pass(self._tail[:-2] + _SEAL.to_bytes(2, "little"))
        self._file.write(_LABEL + self._digest.hexdigest().encode())

    def _pass(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise


def _check_seal(file: IO[bytes], name: str, shown: str, unsealed: str, damaged: str) -> None:
    """Refuse a file whose bytes are not those that were written."""
    size = file.seek(0, os.SEEK_END)
    body = size - _SEAL
    file.seek(max(0, size - _END))
    end = file.read(_END)
    if end.startswith(_END_MARK) and end.endswith(bytes(2)):
        raise _refused(name, shown, "an archive without a checksum", unsealed)
    file.seek(max(0, body))
    seal = file.read(_SEAL)
    if body < 0 or not seal.startswith(_LABEL):
        raise _refused(name, shown, "no checksum at its end: cut off or not ours", damaged)
    digest = hashlib.sha256()
    file.seek(0)
    while body and (chunk := file.read(min(body, _CHUNK))):
        digest.update(chunk)
        body -= len(chunk)
    if seal != _LABEL + digest.hexdigest().encode():
        raise _refused(name, shown, "other bytes than were written", damaged)


def _check_loadable(name: str, path: str) -> None:
    """Refuse content that ``weights_only`` loading would refuse."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except pickle.UnpicklingError as error:
        raise _unsaveable(name, _first_line(error)) from error
    if unknown:
        raise _unsaveable(name, ", ".join(sorted(unknown)))


def _unsaveable(name: str, got: str) -> InvalidInput:
    return InvalidInput(
        name,
        expected="content of tensors and plain values, which loads with weights_only=True",
        got=got,
        remedy="Save numbers, strings, lists, dicts and tensors: convert other objects first, or "
        "name their types to torch.serialization.add_safe_globals. No file was changed.",
    )


def _refused(name: str, path: object, got: str, remedy: str) -> InvalidInput:
    return InvalidInput(
        name,
        expected="a complete checkpoint as dpkern wrote it",
        got=f"{path}: {got}",
        remedy=remedy,
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
