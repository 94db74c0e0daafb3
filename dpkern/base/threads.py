"""Limit the number of threads that kernels may use on the thread that calls them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Here(threading.local):
    """Limit set by ``limited`` on this thread; a missing attribute would take longer to read."""

    most: int | None = None


here = _Here()
"""The limit on this thread, for callers that ask for it in every step."""


def allowed() -> int:
    """Return the number of threads of a kernel: torch's, or the limit set on this thread."""
    most = here.most
    return torch.get_num_threads() if most is None else most


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Limit kernels that this thread calls inside the block to ``most`` threads."""
    before = here.most
    here.most = most
    try:
        yield
    finally:
        here.most = before


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of threads of torch, and with it of every kernel, inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


__all__ = ["allowed", "here", "limited", "torch_threads"]
