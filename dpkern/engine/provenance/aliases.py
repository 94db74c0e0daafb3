"""Follow writes through views.

A state belongs to a Python object, but ``x[0].copy_(x[1])`` writes into the storage of ``x``
through another object. Storages in which a write has changed whose values they hold are listed
here. Any other tensor that shares one and got its state before the write counts as mixed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .states import Mixed, PerRecord, State
from .tensor import TrackedTensor, count_write, untracked

WRITTEN: dict[int, tuple[Any, int]] = {}
"""Storages, by address, with the number of the last write that changed their records."""


def note_write(target: Tensor, before: State | None, after: State) -> None:
    """List the target's storage as written, unless its entries keep their records."""
    if before is after or keeps_records(before, after) or target.layout is not torch.strided:
        return
    if is_functorch_wrapped_tensor(target):
        return
    for key in [k for k, (storage, _) in WRITTEN.items() if _expired(storage)]:
        del WRITTEN[key]
    storage = untracked(target).untyped_storage()
    WRITTEN[storage._cdata] = (_weak(storage), count_write())


def keeps_records(before: State | None, after: State) -> bool:
    """Whether both states give every entry the same record."""
    if not isinstance(before, PerRecord) or not isinstance(after, PerRecord):
        return False
    return before.dim == after.dim and before.matches(after)


def is_stale(tensors: Iterable[Tensor]) -> bool:
    """Whether a tensor shares storage with a target of a later write."""
    return bool(WRITTEN) and any(_is_stale(tensor) for tensor in tensors)


def written_elsewhere(state: State | None) -> Mixed:
    """Return the state of a stale tensor."""
    batch = None if state is None else state.batch
    return Mixed("a write", "in the loop", "went through another view of its storage", batch)


def _weak(storage: Any) -> Any:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _expired(storage: Any) -> bool:
    return bool(storage.expired())


def _is_stale(tensor: Tensor) -> bool:
    plain = untracked(tensor)
    if is_functorch_wrapped_tensor(plain):  # has no storage that can be looked up
        return True
    if plain.layout is not torch.strided or plain.device.type == "meta":
        return False
    found = WRITTEN.get(plain.untyped_storage()._cdata)
    if found is None or _expired(found[0]):
        return False
    since = tensor._since if type(tensor) is TrackedTensor else -1
    return since < found[1]
