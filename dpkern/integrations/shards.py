"""Write a stream of records to disk, so that private batches can be drawn from it by index.

Poisson sampling asks for each record with the same probability in every step. A stream that can
only be read in order cannot give that; the same records in files with an index can.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..base import outputs
from ..base import validate as check
from ..base.errors import InvalidInput

INDEX = "index.npy"
"""File of the index, ``int64 [records, 3]``: shard, offset and length. It is written last."""


class IndexedShards(Dataset[Any]):
    """Records in files, read one by one.

    Args:
        folder: what ``write`` has filled.

    Raises:
        InvalidInput: a folder without an index, or whose files are not those of its index.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        try:
            index = np.load(self.folder / INDEX, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise self._damaged(f"{INDEX}: {error}") from None
        if index.dtype != np.int64 or index.ndim != 2 or index.shape[1:] != (3,) or not len(index):
            raise self._damaged(f"{INDEX} of {index.dtype} {list(index.shape)}")
        self._index = index
        ends: dict[int, int] = {}
        for shard in np.unique(index[:, 0]).tolist():
            rows = index[index[:, 0] == shard]
            ends[shard] = int((rows[:, 1] + rows[:, 2]).max())
        for shard, end in ends.items():
            path = self.folder / _name(shard)
            if not path.is_file() or path.stat().st_size != end or (index < 0).any():
                raise self._damaged(f"{path.name}, which is not of {end} bytes")

    @classmethod
    def write(
        cls,
        records: Iterable[Any],
        folder: str | os.PathLike[str],
        *,
        records_per_shard: int = 10_000,
    ) -> IndexedShards:
        """Write all records of a stream and return them as a data set.

        Args:
            records: tensors, numbers, texts, or lists, tuples and dictionaries of them.
            folder: is made; it must be empty.
            records_per_shard: number of records in one file, at least 1.

        Raises:
            InvalidInput: a folder with files, an empty stream, a record that cannot be read back,
                or what the file system refuses. No index is written then.
        """
        check.integer(1, records_per_shard=records_per_shard)
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidInput(
                "folder",
                expected="a new or empty folder",
                got=str(folder),
                remedy="Choose another one, or remove its files.",
            )
        index: list[tuple[int, int, int]] = []
        kept: list[bytes] = []
        offset = 0

        def close() -> None:
            nonlocal offset
            content = b"".join(kept)
            path = folder / _name(index[-1][0])
            outputs.write_atomically(path, lambda file: file.write(content))
            kept.clear()
            offset = 0

        for number, record in enumerate(records):
            content = _packed(number, record)
            index.append((number // records_per_shard, offset, len(content)))
            kept.append(content)
            offset += len(content)
            if (number + 1) % records_per_shard == 0:
                close()
        check.that(bool(index), "records", "at least one", "an empty stream", "Read it first.")
        if kept:
            close()
        table = np.asarray(index, dtype=np.int64)
        outputs.write_atomically(folder / INDEX, lambda file: np.save(file, table))
        return cls(folder)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Any:
        """Return one record.

        Raises:
            IndexError: no such record.
            InvalidInput: its bytes are damaged, or its file is gone.
        """
        shard, offset, length = self._index[index].tolist()
        try:
            # No file stays open: a stream may have more shards than a process may have files.
            with open(self.folder / _name(shard), "rb", buffering=0) as file:
                content = os.pread(file.fileno(), length, offset)
            return torch.load(io.BytesIO(content), weights_only=True)
        except Exception as error:  # noqa: BLE001 (damaged bytes may raise anything)
            raise self._damaged(f"record {index}: {type(error).__name__}") from None

    def _damaged(self, got: str) -> InvalidInput:
        return InvalidInput(
            "folder",
            expected="the folder that IndexedShards.write has filled",
            got=f"{self.folder} with {got}",
            remedy="Write the stream again with IndexedShards.write(records, folder).",
        )


def _name(shard: int) -> str:
    return f"{shard:06d}.records"


def _packed(number: int, record: Any) -> bytes:
    """Return the bytes of a record, which have been read back once.

    Raises:
        InvalidInput: it holds what only trusted files may hold.
    """
    file = io.BytesIO()
    try:
        torch.save(_alone(record), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # noqa: BLE001 (pickling may raise anything)
        raise InvalidInput(
            f"records[{number}]",
            expected="tensors, numbers, texts, and lists, tuples and dictionaries of them",
            got=f"{type(record).__name__}: {type(error).__name__}",
            remedy="Convert the record first, for example images to tensors.",
        ) from None
    return file.getvalue()


def _alone(record: Any) -> Any:
    """Return a record whose tensors own their memory: a view is saved with all that it looks at."""
    if isinstance(record, torch.Tensor):
        size = record.numel() * record.element_size()
        view = record.layout is torch.strided and record.untyped_storage().nbytes() > size
        return record.detach().clone() if view else record
    if type(record) in (list, tuple):
        return type(record)(map(_alone, record))
    if type(record) is dict:
        return {key: _alone(value) for key, value in record.items()}
    return record
