"""Checkpoints in open files: typed refusals that name the file and the call that helps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from dpkern.base import sealed
from dpkern.base.errors import InvalidInput

CONTENT = {"epoch": 3, "name": "x"}


def filled() -> io.BytesIO:
    file = io.BytesIO()
    sealed.write(file, CONTENT)
    return file


def read(file: Any) -> Any:
    return sealed.read(file, unsealed="Nothing helps.")


def closed() -> io.BytesIO:
    file = filled()
    file.close()
    return file


def test_an_open_file_is_read_from_its_start() -> None:
    file = filled()
    file.seek(0)
    assert read(file) == CONTENT


def test_a_file_at_its_end_is_refused_with_seek() -> None:
    with pytest.raises(InvalidInput, match=r"open BytesIO.*call seek\(0\) on it first"):
        read(filled())


def test_a_damaged_open_file_is_refused_without_a_temporary_name() -> None:
    content = bytearray(filled().getvalue())
    content[10] ^= 1
    with pytest.raises(InvalidInput, match="other bytes than were written") as caught:
        read(io.BytesIO(bytes(content)))
    assert "tmp" not in str(caught.value)
    assert "seek" not in str(caught.value)


def test_an_archive_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="open BytesIO: no checksum"):
        read(io.BytesIO(b"nothing"))


@pytest.mark.parametrize("kind", ["closed", "text", "write only"])
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, kind: str) -> None:
    with (tmp_path / "f").open("wb") as file:
        given = {"closed": closed(), "text": io.StringIO("x"), "write only": file}[kind]
        with pytest.raises(InvalidInput, match="open file of bytes that can be read"):
            read(given)


class Full(io.RawIOBase):
    """A file on a disk without room: it takes a part, or says so."""

    def __init__(self, error: bool) -> None:
        self.error = error

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.error:
            raise OSError(28, "No space left on device")
        return len(data) // 2


@pytest.mark.parametrize("kind", ["closed", "text", "read only", "full", "short"])
def test_files_that_cannot_be_written_are_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "f").touch()
    with (tmp_path / "f").open("rb") as file:
        given: Any = {
            "closed": closed(),
            "text": io.StringIO(),
            "read only": file,
            "full": Full(error=True),
            "short": Full(error=False),
        }[kind]
        with pytest.raises(InvalidInput, match="open file of bytes that can be written"):
            sealed.write(given, CONTENT)
