"""Snapshot what a module remembers, to compare it with another snapshot and to put it back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .parameter import without_torch_function
from .places import holds, refill
from .reachable import Reached, Walk, place_in
from .table_entries import same_entries

KEEP_BYTES = 128 << 20
"""Bytes of tensors that a snapshot copies; further tensors are hashed and cannot be put back."""

_NOTHING: Any = object()


class Snapshot:
    """The state that a module remembers at one time.

    Args:
        module: the root, or a function.
        keep: bytes of tensors that are copied; larger ones are hashed.
        parameters: False leaves parameters out, which ``fully_shard`` swaps as it likes.
        earlier: a snapshot of the same module; what did not change since shares its copies.
        trusted: tensors, by ``id``, whose contents are not compared with those in ``earlier`` while
            their versions agree; ``broke_trust`` compares them once at the end.

    Attributes:
        values: scalars and tensors by path, as they are held.
        kinds: ``parameter``, ``buffer`` or ``attribute``, by path.
        tells: whether every change shows without another walk.
        generators: random generators.
    """

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        *,
        keep: int = KEEP_BYTES,
        parameters: bool = True,
        earlier: Snapshot | None = None,
        trusted: Collection[int] = (),
    ) -> None:
        with without_torch_function(), torch.no_grad():
            if earlier is not None and earlier._still_holds(trusted):
                vars(self).update(vars(earlier))
                return
            known = {} if earlier is None else earlier._found.held
            self._found: Reached = Walk(
                module, keep=keep, parameters=parameters, earlier=known, trusted=trusted
            ).found
        self.values = self._found.values
        self.kinds = self._found.kinds
        self.tells = self._found.tells
        self.generators = self._found.generators

    def _still_holds(self, trusted: Collection[int]) -> bool:
        """Whether a walk would find what this one found.

        It looks again at all that was looked at, without following paths.
        """
        return (
            self.tells
            and not any(self._found.empty)
            and all(tensor.grad is gradient for tensor, gradient in self._found.gradients)
            and all(look(at) is value for look, at, value in self._found.looks)
            and same_entries(*self._dicts)
            and all(holds(container, saved) for container, saved in self._others)
            and all(
                held.same_place() and ((key in trusted and held.unwritten()) or not held.changed())
                for key, held in self._found.held.items()
            )
        )

    @functools.cached_property
    def _dicts(self) -> tuple[list[dict[Any, Any]], list[tuple[Any, ...]]]:
        """All dicts that were read, and their keys and values: one call compares them."""
        pairs = [(c, saved) for c, saved in self._read if type(c) is dict]
        return [c for c, _ in pairs], [(*chain.from_iterable(saved.items()),) for _, saved in pairs]

    @functools.cached_property
    def _others(self) -> list[tuple[Any, Any]]:
        """All other containers that were read, with what they held."""
        return [(c, saved) for c, saved in self._read if type(c) is not dict]

    @property
    def _read(self) -> Iterator[tuple[Any, Any]]:
        yield from self._found.containers
        yield from self._found.tables

    def is_same(self, other: Snapshot) -> bool:
        """Whether nothing changed between the two, of which one was the other's ``earlier``."""
        return self._found is other._found

    def changes(self, later: Snapshot) -> set[str]:
        """Return the paths at which the later snapshot holds something else."""
        if self.is_same(later):
            return set()
        paths = self.values.keys() | later.values.keys()
        with without_torch_function():
            return {path for path in paths if not self._same(path, later)}

    def broke_trust(self, trusted: Collection[int]) -> bool:
        """Whether a trusted tensor holds something else now."""
        with without_torch_function(), torch.no_grad():
            return any(
                not held.same_place() or held.changed()
                for key, held in self._found.held.items()
                if key in trusted
            )

    def restore(self, since: Snapshot | None = None, *, trusted: Collection[int] = ()) -> list[str]:
        """Put everything back; return the paths of what cannot be.

        That is changed tensors that were too large for a copy, and generators that went on.

        Args:
            since: a snapshot of the present state with this one as ``earlier``; tensors that both
                share are not compared.
            trusted: tensors, by ``id``, that are not compared while their versions agree.
        """
        if since is not None and self.is_same(since):
            return []
        same = {} if since is None else since._found.held
        with without_torch_function(), torch.no_grad():
            all_hold = same_entries(*self._dicts)  # one look in C serves most passes
            for container, saved in self._found.containers:
                if not (all_hold and type(container) is dict):
                    refill(container, saved)
            for table in self._found.empty:
                if table:  # a hook that a pass has registered
                    table.clear()
            for put, value in self._found.puts:
                put(value)
            for tensor, gradient in self._found.gradients:
                if tensor.grad is not gradient:
                    tensor.grad = gradient
            lost = {
                key
                for key, held in self._found.held.items()
                if same.get(key) is not held
                and not (key in trusted and held.unwritten())
                and not held.restore()
            }
        return [
            *(path for path, value in self.values.items() if id(value) in lost),
            *(path for path, thing, at in self._found.suspended if place_in(thing) != at),
        ]

    def _same(self, path: str, later: Snapshot) -> bool:
        mine, other = self.values.get(path, _NOTHING), later.values.get(path, _NOTHING)
        if isinstance(mine, Tensor) and isinstance(other, Tensor):
            return not self._found.held[id(mine)].differs(later._found.held[id(other)])
        if isinstance(mine, Tensor) or isinstance(other, Tensor):
            return False
        return type(mine) is type(other) and (mine == other or (mine != mine and other != other))
