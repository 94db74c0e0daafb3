"""Read and write objects as text and tensors, the only arguments that PyTorch operators pass.

Text is JSON of the fields, an object of class ``Band`` as ``{"Band": {...}}``. Tensors stand beside
it, in the order of their numbers in the text. Bytes are keys: they stay in this process, and the
text has a name for them, which reveals nothing and no other process can read.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, get_args, get_type_hints

import torch

from .errors import InvalidInput

_TENSOR, _KEY, _DICT = "tensor", "key", "dict"
_keys: dict[str, bytes] = {}
_names: dict[bytes, str] = {}


def flat(value: object) -> tuple[str, list[torch.Tensor]]:
    """Return an argument of an op, such as a stream, a rule or a state, as text and tensors.

    The key of a stream stays in memory until the process ends.

    Raises:
        InvalidInput: the value holds something that is no number, text, tensor, list or dataclass.
    """
    tensors: list[torch.Tensor] = []
    return json.dumps(_plain(value, tensors)), tensors


def _plain(value: object, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {_KEY: _name_of(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, tensors) for item in value]
    if isinstance(value, dict):
        return {_DICT: {name: _plain(item, tensors) for name, item in value.items()}}
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in fields(value)}
        return {type(value).__name__: {k: _plain(item, tensors) for k, item in held.items()}}
    raise InvalidInput(
        "value",
        expected="an argument of an op: plain values and tensors",
        got=type(value).__name__,
        remedy="Pass a Stream, a rule, a State, a Noise, a Band or a projection.",
    )


def _name_of(key: bytes) -> str:
    if key not in _names:
        name = secrets.token_hex(8)
        _keys[name] = key
        _names[key] = name
    return _names[key]


def classes_of(kind: type) -> dict[str, type]:
    """Return a dataclass, its subclasses and those that their fields may have, by name."""
    found: dict[str, type] = {}
    waiting = [kind]
    while waiting:
        cls = waiting.pop()
        if is_dataclass(cls) and cls.__name__ not in found:
            found[cls.__name__] = cls
            waiting.extend(cls.__subclasses__())
            for hint in get_type_hints(cls).values():
                waiting.extend(members(hint))
    return found


def members(hint: Any) -> list[Any]:
    """Return the types in an annotation: ``tuple[float, ...] | None`` has float and None's."""
    inside = get_args(hint)
    return [hint] if not inside else [kind for part in inside for kind in members(part)]


def holds_tensors(classes: Mapping[str, type]) -> bool:
    """Whether one of these has a tensor in a field."""
    return any(
        torch.Tensor in members(hint)
        for cls in classes.values()
        for hint in get_type_hints(cls).values()
    )


def read(name: str, text: str, tensors: Sequence[torch.Tensor], classes: Mapping[str, type]) -> Any:
    """Return the object that ``flat`` made text of.

    Args:
        name: of the argument, for the message.
        text, tensors: from ``flat``.
        classes: those that may occur, by name.

    Raises:
        InvalidInput: other text, or the text of another process.
    """
    try:
        value = _parsed(text)
        if not classes.keys() & value.keys():
            raise KeyError
        return _made(value, tensors, classes)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise InvalidInput(
            name,
            expected=f"text and tensors of {', '.join(classes)}",
            got="other text, or that of another process",
            remedy="Make both in this process with dpkern.ops.flat(...).",
        ) from None


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    return json.loads(text)


def _made(value: Any, tensors: Sequence[torch.Tensor], classes: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return tuple(_made(item, tensors, classes) for item in value)
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == _TENSOR:
        return tensors[held]
    if kind == _KEY:
        return _keys[held]
    fields_of = {name: _made(item, tensors, classes) for name, item in held.items()}
    return fields_of if kind == _DICT else classes[kind](**fields_of)


__all__ = ["classes_of", "flat", "holds_tensors", "members", "read"]
