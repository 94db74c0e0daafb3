"""Writing files whole or not at all: modes, links, names, full disks, killed processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from dpkern.base import files, sealed
from dpkern.base.errors import DPKernError, InvalidInput
from dpkern.base.files import write_atomically


def put(content: bytes) -> Any:
    return lambda file: file.write(content)


@pytest.fixture
def umask() -> Iterator[None]:
    """A usual one."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.usefixtures("umask")
def test_modes_are_those_of_ordinary_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomically(path, put(b"1"))
    assert mode(path) == 0o640
    path.chmod(0o600)
    seen = []

    def look(file: IO[bytes]) -> None:
        seen.append(mode(Path(file.name)))
        file.write(b"2")

    write_atomically(path, look)
    assert (mode(path), seen) == (0o600, [0o600])
    assert path.read_bytes() == b"2"


def test_a_read_only_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o444)
    with pytest.raises(InvalidInput, match="read-only"):
        write_atomically(path, put(b"new"))
    assert path.read_bytes() == b"old"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link, target = tmp_path / "latest", tmp_path / "runs" / "7"
    link.symlink_to("runs/7")
    for content in (b"1", b"2"):  # dangling, then not
        write_atomically(link, put(content))
        assert link.is_symlink()
        assert target.read_bytes() == content
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["7", "latest", "runs"]
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(InvalidInput, match=r"^path: "):
        write_atomically(loop, put(b"1"))


def test_every_way_to_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        def __fspath__(self) -> str:
            return "d"

    monkeypatch.chdir(tmp_path)
    longest = "x" * 255
    for path in ("a", "./b", Path("c"), Named(), longest, tmp_path / "e"):
        write_atomically(path, put(b"1"))
    write_atomically(b"f", put(b"1"))  # type: ignore[arg-type]
    assert {p.name for p in tmp_path.iterdir()} == {*"abcdef", longest}


def test_devices_and_pipes_are_left_alone(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null"), tmp_path):
        with pytest.raises(InvalidInput, match="regular file"):
            write_atomically(path, put(b"1"))
        with pytest.raises(InvalidInput, match="regular file"):
            sealed.read(path, unsealed="")
    assert pipe.is_fifo()


class Full:
    """A disk that takes so many bytes."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, descriptor: int, data: Any) -> int:
        self.left -= len(data)
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)


@pytest.mark.parametrize("left", [0, 10, 300, 1500, 9000])
def test_a_full_disk(left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    sealed.write(path, {"x": 1})
    before, disk, take = path.read_bytes(), Full(left), sealed._Sink._pass

    def full(self: Any, data: Any) -> None:
        class File:
            def write(self, data: Any) -> int:
                return disk(0, data)

        self._file = File()
        take(self, data)

    monkeypatch.setattr(sealed._Sink, "_pass", full)
    with pytest.raises(InvalidInput, match="No space left"):
        sealed.write(path, {"x": torch.ones(3000)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_errors_of_the_system_keep_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    write_atomically(path, put(b"old"))
    for name in ("fsync", "replace"):

        def fail(*given: object) -> None:
            raise OSError(errno.EIO, "broken")

        with monkeypatch.context() as patch:
            patch.setattr(files.os, name, fail)
            with pytest.raises(InvalidInput, match="broken"):
                write_atomically(path, put(b"new"))
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_folders_are_synchronised_where_that_is_possible(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronise, folders = os.fsync, []

    def only_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            folders.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            raise OSError(number, "no folders here")
        synchronise(descriptor)

    monkeypatch.setattr(files.os, "fsync", only_files)
    if number == errno.EIO:
        with pytest.raises(InvalidInput, match="no folders here"):
            write_atomically(tmp_path / "a", put(b"1"))
    else:
        write_atomically(tmp_path / "a", put(b"1"))
    assert folders == [str(tmp_path)]
    assert (tmp_path / "a").read_bytes() == b"1"


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(file: IO[bytes]) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a", interrupt)
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from dpkern.base.files import write_atomically
def die(file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
write_atomically(sys.argv[1], die)
"""


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    sealed.write(path, [1, 2])
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert sealed.read(path, unsealed="") == [1, 2]
    (left,) = [p.name for p in tmp_path.iterdir() if p != path]
    assert left.startswith(".dpkern-")
    sealed.write(path, [3])
    assert sealed.read(path, unsealed="") == [3]


def test_unreadable_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    sealed.write(path, 1)

    def refuse(self: Path, *given: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InvalidInput, match=r"Permission denied.*permissions"):
        sealed.read(path, unsealed="")


def test_errors_of_the_content_stay_what_they_are(tmp_path: Path) -> None:
    class Secret:
        def __reduce__(self) -> Any:
            raise DPKernError("key", expected="no copy", got="a copy", remedy="Leave it.")

    with pytest.raises(DPKernError, match=r"^key: "):
        sealed.write(tmp_path / "a", Secret())
    assert not list(tmp_path.iterdir())


def test_other_programs_read_the_file(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "a.pt"
    sealed.write(path, {"x": torch.arange(5)})
    assert torch.load(path, weights_only=True)["x"].tolist() == [0, 1, 2, 3, 4]
    assert torch.load(path, weights_only=True, mmap=True)["x"].tolist() == [0, 1, 2, 3, 4]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert b"SHA-256" in archive.comment
