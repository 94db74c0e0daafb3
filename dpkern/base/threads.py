"""The number of threads that a kernel may use on the thread that calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Here(threading.local):
    """What ``limited`` says on this thread; a missing attribute would take longer to read."""

    most: int | None = None


_here = _Here()


def allowed() -> int:
    """As many as torch uses, or what ``limited`` says on this thread."""
    most = _here.most
    return torch.get_num_threads() if most is None else most


@contextmanager
def limited(most: int) -> Iterator[None]:
    """At most this many threads for the kernels that this thread calls inside the block."""
    before = _here.most
    _here.most = most
    try:
        yield
    finally:
        _here.most = before


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of threads of torch, and with it of every kernel, inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


__all__ = ["allowed", "limited", "torch_threads"]
