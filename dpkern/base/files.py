"""Write files whole or not at all.

A reader of the path sees the old content or the new one, also while another process writes there,
and after a power failure. A process that is killed while it writes leaves the old content and a
hidden file ``.dpkern-*.part`` beside it, which may be deleted.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .errors import InvalidInput

_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EACCES, errno.EPERM}
"""Answers of file systems that synchronise no folders, and of folders that cannot be read."""

_REMEDY = "Free space or permissions, then run again."


def file_at(name: str, path: object) -> Path:
    """Return the file that ``path`` names, links followed; it need not exist.

    Args:
        name: the caller's argument, for the message.
        path: a string, bytes or ``os.PathLike``.

    Raises:
        InvalidInput: no path, or the path of a folder, device or pipe.
    """
    try:
        given = os.fsdecode(path)  # type: ignore[arg-type]
        # A link keeps its place: its target is replaced.
        target = Path(os.path.realpath(given))
        other = target.is_symlink() or (target.exists() and not target.is_file())
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            name,
            expected="a path, as a string or os.PathLike",
            got=type(path).__name__ if isinstance(error, TypeError) else f"{given!r}: {error}",
            remedy="Name a file, such as 'run.pt'.",
        ) from error
    except OSError as error:
        raise unusable(name, given, error, "Name a file that can be reached.") from error
    if other or given.endswith(os.sep):
        folder = target.is_dir() or not other
        found = "a folder" if folder else "a device, a pipe or a link in a circle"
        raise InvalidInput(
            name,
            expected="the path of a regular file",
            got=f"{given!r}, {found}",
            remedy="Name a file, such as 'run.pt'.",
        )
    return target


def unusable(name: str, path: object, error: OSError, remedy: str = _REMEDY) -> InvalidInput:
    """Return the error that says why the system refuses this path."""
    return InvalidInput(
        name,
        expected="a file that the system can read or write",
        got=f"{path}: {error.strerror or type(error).__name__}",
        remedy=remedy,
    )


def write_atomically(
    path: str | os.PathLike[str],
    write: Callable[[IO[bytes]], object],
    *,
    name: str = "path",
    remedy: str = _REMEDY,
) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in that place.

    File and folder are synchronised with the disk, the folder where the file system can. The mode
    of a file that was there stays, a new one follows the process's umask, and a symbolic link stays
    a link. After any error the old file stands and the temporary one is gone; only a folder that
    fails to synchronise is found when the new file stands already.

    Args:
        path: in a folder that exists.
        write: called with the open file.
        name: the caller's argument, for messages.
        remedy: what to do where the system refuses.

    Raises:
        InvalidInput: the path is no regular file's, is read-only, or the system refuses.
    """
    target = file_at(name, path)
    # A short name of its own: the target's may be as long as names can be.
    temporary = target.with_name(f".dpkern-{secrets.token_hex(8)}.part")
    try:
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        if mode is not None and not mode & 0o222:
            raise PermissionError(errno.EACCES, "the file is read-only")
        try:
            with temporary.open("xb") as file:
                if mode is not None:
                    os.fchmod(file.fileno(), mode)  # before anything secret is in it
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _synchronise(target.parent)
    except OSError as error:
        raise unusable(name, target, error, remedy) from error


def _synchronise(folder: Path) -> None:
    """Make the folder's names durable, where the file system knows how."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
