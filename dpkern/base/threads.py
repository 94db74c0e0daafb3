"""How many threads a kernel may use on the thread that calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_here = threading.local()


def allowed() -> int:
    """As many as torch uses, or what ``limited`` says on this thread."""
    most: int | None = getattr(_here, "most", None)
    return torch.get_num_threads() if most is None else most


@contextmanager
def limited(most: int) -> Iterator[None]:
    """At most this many threads for the kernels that this thread calls inside the block."""
    before = getattr(_here, "most", None)
    _here.most = most
    try:
        yield
    finally:
        _here.most = before


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside the block torch, and with it every kernel, uses this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


__all__ = ["allowed", "limited", "torch_threads"]
