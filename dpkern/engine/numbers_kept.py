"""Find the numbers that a module's code reads where no call hands them over.

These are numbers in lists, tuples, dicts, arrays and tensors that modules hold, in global variables
that their methods name, and in closures. A loop can assign them between two passes without a sign:
``CONFIG["temperature"] = math.exp(-loss.item())``. Numbers that are attributes themselves are
compared in every pass (``occasions``).
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from .names_in_code import globals_of, is_installed
from .places import EMPTY, inside_of

_MOST = 1000
"""Number of entries up to which a container is looked into."""

_CONTAINERS = (list, tuple, Mapping)


def numbers_kept(module: nn.Module) -> list[Any]:
    """Return what holds numbers in all parts of a module, tensors among them."""
    found: list[Any] = []
    classes: set[type] = set()
    for part in module.modules():
        for value in list(vars(part).values()):
            if isinstance(value, types.FunctionType):
                found += _in_function(value)
            elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type)):
                found += [v for v in vars(value).values() if isinstance(v, _CONTAINERS)]
            elif isinstance(value, Tensor) or (isinstance(value, _CONTAINERS) and _is_short(value)):
                found.append(value)
            elif isinstance(value, np.ndarray) and value.dtype.kind == "f":
                found.append(value.ravel()[:_MOST].tolist())
        classes.update(type(part).__mro__)
    for cls in classes:
        for value in list(vars(cls).values()):
            if isinstance(value, types.FunctionType):
                found += _in_function(value)
            elif isinstance(value, (float, *_CONTAINERS)) and _is_short(value):
                found.append(value)
    return found


def _in_function(function: types.FunctionType) -> Iterator[Any]:
    code = function.__code__
    if is_installed(code) or code.co_filename.startswith("<"):
        return
    inside = [inside_of(cell) for cell in function.__closure__ or ()]
    inside += [function.__globals__.get(name, EMPTY) for name in globals_of(code)]
    for value in inside:
        if isinstance(value, (float, *_CONTAINERS)) and _is_short(value):
            yield value


def _is_short(value: Any) -> bool:
    return isinstance(value, float) or len(value) <= _MOST


__all__ = ["numbers_kept"]
