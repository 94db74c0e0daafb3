"""Decide when the forward-difference probe runs: at first, after changes, and at secret times."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from operator import call, itemgetter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .parameter import without_torch_function
from .table_entries import TableEntries, read

MEAN_GAP = 500
"""Training passes from one secret probe to the next, on average."""

_MOST_KNOWN = 64
_STANDARD = frozenset(vars(nn.Module())) - {"training"}
_TABLES = frozenset("_parameters _buffers _modules _forward_hooks _forward_pre_hooks".split())
"""Standard attributes of a module that decide what a pass does."""

_modules: Any = nn.modules.module
_OF_ALL_MODULES = (
    _modules._global_forward_hooks,
    _modules._global_forward_pre_hooks,
    _modules._global_backward_hooks,
    _modules._global_backward_pre_hooks,
)
"""Hooks that torch calls for every module."""

function_modes = torch._C._len_torch_function_stack
dispatch_modes = torch._C._len_torch_dispatch_stack

_DISCRETE = (bool, str, type(None))
_TRAINED = Tensor.requires_grad


class Occasions:
    """The occasions for a probe: changes of a module between forward passes, and secret times.

    Every pass, the attributes of all modules (and of plain objects that they hold, such as a
    configuration), their children, hooks, torch's modes (``TorchDispatchMode``) and
    ``requires_grad`` are compared with what the last pass left behind. A combination of training
    flags, hooks, modes, modules, ``requires_grad``, booleans and strings that was never probed is
    an occasion. A return to a known one, and a change of numbers, is one at the 1st, 4th, 16th ...
    time, because loops may switch or anneal at every step.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.refreshed = 0
        """Number of times that the structure was read anew."""
        self._known: set[int] = set()
        self._returns = 0
        self.gap = draw_gap()
        """Training passes up to the next secret probe, including it."""
        self._seen = False
        """Whether there was a pass."""
        self.unchanged = False
        """Whether the last look has found the same objects everywhere."""
        self._contents: list[dict[Any, Any]] = []
        self._counts: list[int] = []
        self._values: list[Any] = []
        self._trained: list[bool] = []
        self.modes: tuple[Any, ...] = ()
        """The modes of torch that the last pass which was read has met."""
        self._firsts = 2
        self._left: list[Any] = []
        """All attributes as one of the first passes has left them."""
        self._before: list[Any] = []
        """All attributes as the pass before this one has left them, where some have changed."""
        self._refresh()
        self.looks_behind = False
        """Whether passes change the module themselves, so that ``settle`` has something to do."""
        self.combination = 0
        """A hash of everything discrete, as the last pass has found it."""
        self._given: Hashable = ()
        self._numbers: Hashable = ()

    def due(self, recording: bool, given: Hashable = (), numbers: Hashable = ()) -> str | None:
        """Return why this pass is to be probed: ``new``, ``changed``, ``secret``; None if not.

        Args:
            recording: whether gradients are recorded; other passes have no secret times.
            given: flags among the arguments of the pass.
            numbers: numbers among them, whose changes count like those of numbers in the module.
        """
        self._given = given
        returned = self._seen and numbers != self._numbers
        self._numbers = numbers
        self._before = []
        if not self._same():
            self._before, self._left = self._left or self._values, []
            self._read()
            before, self.combination = self.combination, self._combination()
            returned = self._seen
            # The pass before may have changed it itself, which ``settle`` sees from now on.
            self.looks_behind = self.looks_behind or self.combination == before
        self._seen = True
        if hash((self.combination, recording, self._given)) not in self._known:
            if len(self._known) < _MOST_KNOWN:
                return "new"
            returned = True
        self._returns += returned
        if returned and _power_of_four(self._returns):
            return "changed"
        if recording:
            self.gap -= 1
            if self.gap <= 0:
                self.gap = draw_gap()
                return "secret"
        return None

    def attributes(self) -> list[Any]:
        """Return what the attributes hold now."""
        with suppress(KeyError):
            return [*_flat([*map(call, self._getters, self._held)])]
        return [*_flat(self._values)]

    def assigned(self) -> dict[int, Any]:
        """Return what was assigned to attributes between the last pass and this one, by place."""
        if not self._before:
            return {}
        known = set(map(id, _flat(self._before)))
        values = enumerate(_flat(self._values))
        return {place: value for place, value in values if id(value) not in known}

    def leave(self) -> None:
        """Remember what one of the first passes leaves, which may have changed the module itself.

        Later ones do so in ``settle``, where passes were seen to.
        """
        if self._firsts:
            self._firsts -= 1
            self._left = [tuple(held.values()) for held in self._attributes]

    def has_same_modes(self) -> bool:
        """Whether the same modes of torch are entered as in the last pass that was read."""
        if not (self.modes or function_modes() or dispatch_modes()):
            return True
        return self.modes == _entered_modes()

    def is_known(self, recording: bool, given: Hashable) -> bool:
        """Whether a pass with these flags, in the present combination, has been probed."""
        return hash((self.combination, recording, given)) in self._known

    @property
    def seen_entries(self) -> TableEntries | None:
        """All tables with what the last look has found in them."""
        return self._entries if self._seen else None

    @property
    def trained_flags(self) -> tuple[list[Tensor], list[bool]]:
        """All parameters, and whether the last look has found each of them trained."""
        return self._parameters, self._trained

    def probed(self, recording: bool) -> None:
        """Record that the combination of this pass has been probed."""
        self._known.add(hash((self.combination, recording, self._given)))

    def forget(self) -> None:
        """Count every combination as one that was never probed."""
        self._known.clear()

    def settle(self) -> None:
        """Accept, after a pass, what it changed itself: that is no occasion."""
        if not self._same():
            self._read()

    def _refresh(self) -> None:
        self.refreshed += 1
        modules = list(self.module.modules())
        self._attributes: list[Any] = []
        seen: set[int] = set()
        for part in modules:
            held = vars(part)
            self._attributes.append(held)
            for name, value in list(held.items()):
                if name in _STANDARD:
                    continue
                plain = value if type(value) is dict else getattr(value, "__dict__", None)
                if not isinstance(plain, dict) or isinstance(value, (nn.Module, Tensor, type)):
                    continue
                if id(plain) not in seen and not callable(value) and len(plain) < 1000:
                    seen.add(id(plain))
                    self._attributes.append(plain)
        own = {id(table) for part in modules for table in _tables(part)}
        self._attributes = [a for a in self._attributes if id(a) not in own]
        self._children = [part._modules for part in modules if part._modules]
        self._hooks = [table for part in modules for table in _hooks(part)]
        self._hooks += _OF_ALL_MODULES
        self._parameters: list[Tensor] = list(self.module.parameters())
        tables = [table for part in modules for table in _tables(part)]
        tables += _OF_ALL_MODULES
        self._empty = [table for table in tables if not table]
        self._tables = [*self._children, *(table for table in self._hooks if table)]
        self._sized = [*self._attributes, *self._tables]
        self._sized += [t for p in modules for t in (p._parameters, p._buffers) if t]
        # Most passes find the same objects everywhere, which one look tells.
        self._everywhere = [*self._sized, *self._empty]
        # In the others the attributes of the module's author are compared, and torch's tables that
        # have entries.
        self._getters: list[Any] = []
        self._held: list[Any] = []
        for held in self._attributes:
            if names := [n for n in held if n not in _STANDARD or n in _TABLES]:
                self._getters.append(itemgetter(*names))
                self._held.append(held)

    def _same(self) -> bool:
        """Whether everything is what it was when it was read."""
        self.unchanged = False
        if not self._seen or not self.has_same_modes():
            return False
        with without_torch_function():  # a few calls that loop in C
            if read(_TRAINED, self._parameters) != self._trained:
                return False
            self.unchanged = self._entries.same()
            return self.unchanged or self._equal()

    def _equal(self) -> bool:
        """Whether what is there now equals what was there, be it other objects."""
        try:
            same = (
                not any(self._empty)
                and [*map(len, self._sized)] == self._counts
                and [*map(call, self._getters, self._held)] == self._values
                and self._tables == self._contents
            )
        except (KeyError, RuntimeError, ValueError, TypeError):  # deleted, or replaced tensors
            return False
        if same:
            self._entries = TableEntries(self._everywhere)
        return same

    def _has_structure(self) -> bool:
        """Whether tables and attributes have as many entries as they had."""
        return self._seen and not any(self._empty) and [*map(len, self._sized)] == self._counts

    def _read(self) -> None:
        """Remember what is there now; another structure than last time is read anew."""
        children = [*map(dict, self._children)]
        if not self._has_structure() or children != self._contents[: len(children)]:
            self._refresh()
        with without_torch_function():
            try:
                self._values = [*map(call, self._getters, self._held)]
            except KeyError:  # one attribute for another
                self._refresh()
                self._values = [*map(call, self._getters, self._held)]
            self._trained = read(_TRAINED, self._parameters)
        self.modes = _entered_modes()
        self._contents = [*map(dict, self._tables)]
        self._counts = [*map(len, self._sized)]
        self._entries = TableEntries(self._everywhere)

    def _combination(self) -> int:
        """Return a hash of everything discrete: flags, strings, functions, modules and hooks."""
        found: list[Any] = []
        for i, held in enumerate(self._attributes):
            found += [
                (i, name, value if isinstance(value, _DISCRETE) else id(_function(value)))
                for name, value in list(held.items())
                if isinstance(name, str)
                and (isinstance(value, (*_DISCRETE, FunctionType, MethodType)))
            ]
        with without_torch_function():
            trained = read(_TRAINED, self._parameters)
        parts = [(id(table), *map(id, table.values())) for table in self._children]
        hooks = [(i, *table) for i, table in enumerate(self._hooks) if table]
        return hash((tuple(found), tuple(trained), tuple(parts), tuple(hooks), self.modes))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for held in values:
        yield from held if type(held) is tuple else (held,)


def _entered_modes() -> tuple[tuple[str, int], ...]:
    """Return the modes through which torch's operations go now."""
    if not (function_modes() or dispatch_modes()):
        return ()
    of_functions: Any = _get_current_function_mode_stack  # torch leaves it without types
    modes = (*of_functions(), *_get_current_dispatch_mode_stack())
    return tuple((type(mode).__qualname__, id(mode)) for mode in modes)


def draw_gap() -> int:
    """Draw the number of passes to the next secret look: geometric, so none tells the next."""
    uniform = 1.0 - _SURE.random()
    return 1 + int(math.log(uniform) / math.log1p(-1 / MEAN_GAP))


_SURE = random.SystemRandom()


def _tables(part: nn.Module) -> Iterable[Any]:
    return (part._parameters, part._buffers, part._modules, *_hooks(part))


def _hooks(part: nn.Module) -> Iterable[Any]:
    yield part._forward_hooks
    yield part._forward_pre_hooks
    yield part._backward_hooks
    yield part._backward_pre_hooks


def _function(value: Any) -> Any:
    return getattr(value, "__func__", value)


def _power_of_four(number: int) -> bool:
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1
