"""Finds where a host would wait for a device, on the CPU: a number or a shape is read from data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "unique_dim", "_unique2"}


class NoWait(TorchDispatchMode):
    """Refuses operations whose result the host must see before it goes on."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")  # type: ignore[attr-defined]
        if name in _READS or (name.startswith("index") and _has_mask(args)):
            raise AssertionError(f"the host would wait: {name}")
        return func(*args, **(kwargs or {}))


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask, whose count only the device knows."""
    lists = [item for item in args if isinstance(item, (list, tuple))]
    found = [t for items in lists for t in items if isinstance(t, torch.Tensor)]
    return any(t.dtype in (torch.bool, torch.uint8) for t in found)
