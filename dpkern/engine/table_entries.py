"""Quick looks at many objects at once, which the guards take in every pass.

Whether tables hold the same objects as before, and what an attribute of many tensors is. Compiled
where there is a compiled module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

from ..ops import direct

Table = dict[Any, Any]
Entries = tuple[Any, ...]


class TableEntries:
    """Remembers what some dicts held when this was made.

    Args:
        tables: the dicts; what they hold stays alive as long as this.
    """

    __slots__ = ("entries", "tables")

    def __init__(self, tables: Iterable[Table]) -> None:
        self.tables = list(tables)
        self.entries = [tuple(chain.from_iterable(table.items())) for table in self.tables]

    def same(self) -> bool:
        """Whether each holds the same keys and values, as the same objects in the same order."""
        return bool(same_entries(self.tables, self.entries))


def read_each(attribute: Any, objects: list[Any]) -> list[Any]:
    """Return an attribute of every object, given its descriptor (``Tensor.requires_grad``)."""
    return [*map(attribute.__get__, objects)]


read: Callable[[Any, list[Any]], list[Any]] = direct.look("read") or read_each


def entries_agree(tables: list[Table], entries: list[Entries]) -> bool:
    """Compare dicts with their entries, as the compiled function of this name does."""
    return all(
        2 * len(table) == len(held) and all(map(is_, chain.from_iterable(table.items()), held))
        for table, held in zip(tables, entries, strict=True)
    )


same_entries: Callable[[list[Table], list[Entries]], bool] = (
    direct.look("same_entries") or entries_agree
)
"""Whether each dict holds these keys and values, as the same objects in the same order."""
