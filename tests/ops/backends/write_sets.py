"""Watch what the programs of an interpreted Triton launch read and write.

Programs of a launch run in any order on a device. Two of them must not write the same number, nor
one write what another reads, but by atomic operations, which are not watched. The interpreter runs
them one after another, so that nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

Addresses = np.ndarray[Any, np.dtype[np.uint64]]


class Watch:
    """Addresses that the running launch has read and written, by program.

    Attributes:
        launches: how many launches of at least two programs were looked at.
        found: what was wrong with them.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.found: list[str] = []
        self._written: list[tuple[int, Addresses]] = []
        self._read: list[tuple[int, Addresses]] = []

    def note(self, written: bool, program: int, addresses: Any, mask: Any) -> None:
        """Note an access."""
        live = np.unique(np.asarray(addresses)[np.asarray(mask, dtype=bool)].astype(np.uint64))
        (self._written if written else self._read).append((program, live))

    def begin(self) -> None:
        """Forget the last launch."""
        self._written, self._read = [], []

    def end(self, name: str) -> None:
        """Judge the launch."""
        written, writers = _joined(self._written)
        read, readers = _joined(self._read)
        if len({*writers.tolist(), *readers.tolist()}) < 2:
            return
        self.launches += 1
        twice = (written[1:] == written[:-1]) & (writers[1:] != writers[:-1])
        if twice.any():
            self.found.append(f"{name}: {int(twice.sum())} addresses are written by two programs")
        if not len(written):
            return
        at = np.searchsorted(written, read).clip(max=len(written) - 1)
        foreign = (written[at] == read) & (writers[at] != readers)
        if foreign.any():
            self.found.append(
                f"{name}: {int(foreign.sum())} addresses are read that another writes"
            )


def _joined(parts: list[tuple[int, Addresses]]) -> tuple[Addresses, Any]:
    """Return all addresses of a launch in order, and their programs."""
    if not parts:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    addresses = np.concatenate([addresses for _, addresses in parts])
    programs = np.concatenate([np.full(len(each), program) for program, each in parts])
    order = np.lexsort((programs, addresses))
    return addresses[order], programs[order]


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch every launch inside the block."""
    from triton.runtime import interpreter

    watch, builder = Watch(), interpreter.interpreter_builder
    store, load = builder.create_masked_store, builder.create_masked_load
    launch = interpreter.GridExecutor.__call__

    def program() -> int:
        x, y, z = builder.grid_idx
        wide, high, _ = builder.grid_dim
        return int(x + wide * (y + high * z))

    def stored(ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        watch.note(True, program(), ptrs.data, mask.data)
        return store(ptrs, value, mask, cache_policy)

    def loaded(ptrs: Any, mask: Any, *others: Any) -> Any:
        watch.note(False, program(), ptrs.data, mask.data)
        return load(ptrs, mask, *others)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch.begin()
        made = launch(self, *args, **kwargs)
        watch.end(self.fn.__name__)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_store", stored, raising=False)
        patch.setattr(builder, "create_masked_load", loaded, raising=False)
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        yield watch
