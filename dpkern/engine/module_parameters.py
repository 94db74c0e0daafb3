"""The parameters that a module holds now, found without walking over its parts each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_

from torch import Tensor, nn

from ..ops import direct
from .table_entries import TableEntries, same_entries

_GRADIENT = getattr(Tensor, "grad").__get__  # noqa: B009


def no_gradient_of(tensors: Sequence[Tensor]) -> bool:
    """Do what ``no_gradient`` does, without a compiled module."""
    return all(map(is_, map(_GRADIENT, tensors), repeat(None)))


no_gradient: Callable[[Sequence[Tensor]], bool] = direct.look("no_gradients") or no_gradient_of
"""Whether ``.grad`` of every tensor is None; call it in ``without_torch_function()``."""


class ModuleParameters:
    """Parameters of a module and its parts; parts that come and go are noticed.

    Args:
        module: the root.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._entries: TableEntries | None = None
        """All parts' tables of children and parameters, as they were when ``_found`` was read."""
        self._found: list[Tensor] = []

    def all(self) -> list[Tensor]:
        """Return every parameter, as often as a part holds it."""
        known = self._entries
        if known is not None and same_entries(known.tables, known.entries):
            return self._found
        parts = list(self._module.modules())
        held: list[Tensor] = [
            p for part in parts for p in part._parameters.values() if p is not None
        ]
        tables = [table for part in parts for table in (part._modules, part._parameters)]
        # Scripted parts show wrappers of their own.
        plain = all(isinstance(table, dict) for table in tables)
        self._entries, self._found = TableEntries(tables) if plain else None, held
        return held
