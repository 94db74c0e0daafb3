"""Read places that hold one object, and make functions that put back what they held."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from operator import is_
from typing import Any

EMPTY: Any = object()
"""The content of a place without an object."""


def inside_of(cell: types.CellType) -> Any:
    """Return the variable of a closure; ``EMPTY`` if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return EMPTY


def cell_setter(cell: types.CellType) -> Callable[[Any], None]:
    """Return a function that assigns the variable of a closure."""

    def put(value: Any) -> None:
        cell.cell_contents = value

    return put


def slot_of(at: tuple[Any, Any]) -> Any:
    """Return what a slot ``(descriptor, object)`` holds; ``EMPTY`` if it is not assigned yet."""

    slot, thing = at
    try:
        return slot.__get__(thing)
    except AttributeError:  # not assigned yet
        return EMPTY


def slot_setter(slot: Any, thing: Any) -> Callable[[Any], None]:
    """Return a function that assigns the slot of an object, or deletes it."""

    def put(value: Any) -> None:
        if value is not EMPTY:
            slot.__set__(thing, value)
        elif slot_of((slot, thing)) is not EMPTY:
            slot.__delete__(thing)

    return put


def item_setter(table: dict[str, Any], name: str) -> Callable[[Any], None]:
    """Return a function that assigns a global variable, or deletes it."""

    def put(value: Any) -> None:
        if value is EMPTY:  # assigned since
            table.pop(name, None)
        else:
            table[name] = value

    return put


def class_setter(cls: type, name: str) -> Callable[[Any], None]:
    """Return a function that assigns an attribute of a class where it has changed."""

    def put(value: Any) -> None:
        if vars(cls).get(name) is not value:
            setattr(cls, name, value)

    return put


def name_keeper(cls: type) -> Callable[[Any], None]:
    """Return a function that deletes the attributes that a class has beside the given ones."""

    def put(names: Any) -> None:
        for name in set(vars(cls)) - names:
            delattr(cls, name)

    return put


def cache_keeper(cache: Any) -> Callable[[Any], None]:
    """Return a function that empties a cache which was filled: what it holds cannot be read."""

    def put(misses: Any) -> None:
        if cache.cache_info().misses != misses:
            cache.cache_clear()

    return put


def methods_of(table: Any) -> Any:
    """Return the class whose methods read and write what a table holds.

    Those of a subclass of dict need not: transformers' tables of models import all of them.
    """
    return next((kind for kind in (OrderedDict, dict) if isinstance(table, kind)), type(table))


def holds(container: Any, saved: Any) -> bool:
    """Whether a container holds the same objects as before."""
    if isinstance(container, Mapping):
        of = methods_of(container)
        if of.__len__(container) != len(saved):
            return False
        pairs = (of.keys(container), saved.keys()), (of.values(container), saved.values())
        return all(all(map(is_, now, before)) for now, before in pairs)
    if len(container) != len(saved):
        return False
    if isinstance(container, (set, bytearray)):
        return bool(container == saved)
    return all(map(is_, container, saved))


def refill(container: Any, saved: Any) -> None:
    """Make the container hold what it held."""
    if isinstance(container, (dict, MutableMapping)):
        if holds(container, saved):
            return
        of = methods_of(container)
        of.clear(container)
        for key, value in saved.items():
            of.__setitem__(container, key, value)
    elif isinstance(container, (list, bytearray)):
        if len(container) != len(saved) or any(
            a is not b for a, b in zip(container, saved, strict=True)
        ):
            container[:] = saved
    elif isinstance(container, set):
        if container != saved:
            container.clear()
            container.update(saved)
    else:
        container.clear()
        container.extend(saved)
