"""The parameters that a module holds now, found without walking over its parts each time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any

from torch import Tensor, nn

_GRADIENT = getattr(Tensor, "grad").__get__  # noqa: B009
_values = dict.values


def no_gradient(tensors: Sequence[Tensor]) -> bool:
    """Whether ``.grad`` of every tensor is None; call it in ``without_torch_function()``."""
    return all(map(is_, map(_GRADIENT, tensors), repeat(None)))


class ModuleParameters:
    """Parameters of a module and its parts; parts that come and go are noticed.

    Args:
        module: the root.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._children: list[Any] = []
        self._below: list[dict[str, Any]] = []
        self._tables: list[dict[str, Any]] = []
        self._plain = True
        """Whether all tables are dicts."""

    def all(self) -> list[Tensor]:
        """Return every parameter, as often as a part holds it."""
        if not self._plain:
            return self._walked()
        children = [*chain.from_iterable(map(_values, self._below))]
        same = len(children) == len(self._children) and all(map(is_, children, self._children))
        if not same or not self._tables:
            parts = list(self._module.modules())
            tables = (table for part in parts for table in (part._modules, part._parameters))
            if not all(isinstance(table, dict) for table in tables):
                self._plain = False  # scripted parts show wrappers of their own
                return self._walked()
            self._below = [part._modules for part in parts]
            self._tables = [part._parameters for part in parts]
            self._children = [*chain.from_iterable(map(_values, self._below))]
        return [p for p in chain.from_iterable(map(_values, self._tables)) if p is not None]

    def _walked(self) -> list[Tensor]:
        parts = self._module.modules()
        return [p for part in parts for p in part._parameters.values() if p is not None]

    def have_no_gradient(self) -> bool:
        """Whether ``.grad`` of every parameter is None; call it in ``without_torch_function()``."""
        return no_gradient(self.all())
