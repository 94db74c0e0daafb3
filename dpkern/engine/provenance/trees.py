"""Walk batches and outputs as trees: tuples, lists, mappings, dataclasses and plain objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

Change = Callable[[Tensor], Tensor]

_VALUES = frozenset((bool, int, float, str))


def mapped(tree: Any, change: Change, packed: Change | None = None) -> Any:
    """Return the same tree with every tensor changed; unchanged subtrees are returned as they are.

    Args:
        tree: a tree of any depth.
        change: called with each tensor.
        packed: called with the data of a ``PackedSequence``, whose rows are positions of many
            samples. None selects ``change``.
    """
    kind = type(tree)
    if kind is Tensor:
        return change(tree)
    if tree is None or kind in _VALUES:
        return tree
    if isinstance(tree, Tensor):
        return tree if isinstance(tree, nn.Parameter) else change(tree)
    if isinstance(tree, PackedSequence):
        return PackedSequence((packed or change)(tree.data), *tree[1:])
    if isinstance(tree, (tuple, list)):
        items = [mapped(item, change, packed) for item in tree]
        if not [new for new, old in zip(items, tree, strict=True) if new is not old]:
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        if not tree:
            return tree
        return _with_items(tree, {k: mapped(v, change, packed) for k, v in tree.items()})
    if _is_container(tree):
        changed = {k: mapped(v, change, packed) for k, v in vars(tree).items()}
        if all(changed[k] is v for k, v in vars(tree).items()):
            return tree
        same = copy.copy(tree)
        for name, value in changed.items():
            object.__setattr__(same, name, value)
        return same
    return tree


def _with_items(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if all(items[k] is v for k, v in tree.items()):
        return tree
    if type(tree) is dict:
        return items
    same: Any = copy.copy(tree)
    for key, value in items.items():
        same[key] = value
    return same


def _is_container(value: Any) -> bool:
    """Whether this is a dataclass or another plain object that may hold tensors as attributes."""
    if isinstance(value, (type, nn.Module, str, bytes)) or callable(value):
        return False
    return dataclasses.is_dataclass(value) or any(
        isinstance(v, Tensor) for v in getattr(value, "__dict__", {}).values()
    )


def tensors_of(tree: Any) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors of a tree, and whether each is the data of a ``PackedSequence``."""
    if isinstance(tree, Tensor):
        yield tree, False
    elif isinstance(tree, PackedSequence):
        yield tree.data, True
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_of(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_of(item)
    elif _is_container(tree):
        for item in vars(tree).values():
            yield from tensors_of(item)
