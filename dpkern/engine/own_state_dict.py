"""Read what ``state_dict()`` adds to parameters and buffers, where a module decides that itself."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from .contents import same_bits
from .parameter import without_torch_function

_OWN = ("state_dict", "_save_to_state_dict")


def own_state_dicts(module: nn.Module) -> bool:
    """Whether a part of the module writes its own entries: by a hook, or by a method."""
    return any(
        part._state_dict_hooks
        or any(getattr(type(part), name) is not getattr(nn.Module, name) for name in _OWN)
        for part in module.modules()
    )


def saved_entries(module: nn.Module) -> dict[str, Any]:
    """Return copies of what ``state_dict()`` gives, without calling hooks in front of it."""
    hooks = module._state_dict_pre_hooks
    kept = dict(hooks)
    hooks.clear()
    try:
        with without_torch_function():
            return {k: _copy(v) for k, v in module.state_dict().items()}
    finally:
        hooks.update(kept)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def same_entries_of(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two state dicts have the same tensors and numbers."""
    if one.keys() != other.keys():
        return False
    return all(_same(value, other[name]) for name, value in one.items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and same_bits(one, other)
    return bool(one == other) if isinstance(one, (bool, int, float, str, bytes)) else True
