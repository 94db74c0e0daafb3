"""Find everything that a module can remember from one forward pass to the next.

That is parameters, buffers, and the values of attributes, containers, objects, closures and
generators that the module reaches.
"""

from __future__ import annotations

import functools
import io
import random
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .held_tensors import HeldTensor, held_now, parts_of
from .names_in_code import attributes_of, globals_of, is_installed
from .places import (
    EMPTY,
    cache_keeper,
    cell_setter,
    class_setter,
    holds,
    inside_of,
    item_setter,
    methods_of,
    name_keeper,
    slot_of,
    slot_setter,
)

MAX_OBJECTS = 100_000

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_PLAIN = frozenset(_SCALARS)
_SHARED = frozenset(map(np.dtype, "?bhilqBHILQefdFD"))
"""Types of NumPy's arrays that tensors can share; the others are copied."""
_FOREIGN = frozenset(
    "torch numpy dpkern lightning pytorch_lightning accelerate threading logging re builtins "
    "_thread weakref io pathlib abc enum os concurrent asyncio multiprocessing tqdm".split()
)
"""Packages whose objects are no state of a model; torch's modules and tensors are known."""

_CONTAINERS = (Tensor, torch.Generator, random.Random, list, dict, set, deque, int, float)
"""Types of globals that count as state where code of an installed package names them."""

_CACHES = type(functools.lru_cache(len))
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, _CACHES)
"""Types of what a class may hold in the place of a function."""

_OWN = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
_STANDARD = frozenset(vars(nn.Module())) - {"training"}
_TABLES = _STANDARD - _OWN
"""Standard attributes of a module: tables of hooks and the like, most of them empty."""


@dataclass
class Reached:
    """All that a walk has found.

    Attributes:
        values: scalars and tensors by path, as they are held.
        kinds: ``parameter``, ``buffer`` or ``attribute``, by path.
        held: what tensors held, by ``id``.
        containers: containers, with what they held.
        tables: tables that are not put back as a whole, with what they held.
        empty: tables of hooks without an entry.
        puts: functions that put back what a place held, with that.
        looks: lookups that found the state: the function, its argument and its result.
        gradients: parameters with their ``.grad``.
        generators: random generators.
        suspended: generators, which cannot be put back, with their paths and where they stood.
        tells: whether every change shows without another walk.
        alive: what must live on, as an ``id`` stands for it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    held: dict[int, HeldTensor] = field(default_factory=dict)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    tables: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = field(default_factory=list)
    empty: list[Any] = field(default_factory=list)
    puts: list[tuple[Callable[[Any], Any], Any]] = field(default_factory=list)
    looks: list[tuple[Callable[[Any], Any], Any, Any]] = field(default_factory=list)
    gradients: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    suspended: list[tuple[str, types.GeneratorType[Any, Any, Any], Any]] = field(
        default_factory=list
    )
    tells: bool = True
    alive: list[Any] = field(default_factory=list)


class Walk:
    """A walk from a module, or a function, to all that it reaches.

    Args:
        module: where it begins.
        keep: bytes of tensors that are copied; larger ones are hashed.
        parameters: False leaves parameters out.
        earlier: what tensors held before, by ``id``; what did not change since is shared.
        trusted: tensors, by ``id``, whose contents are not compared while their versions agree.
    """

    def __init__(
        self,
        module: Any,
        *,
        keep: int,
        parameters: bool,
        earlier: Mapping[int, HeldTensor],
        trusted: Collection[int],
    ) -> None:
        self.found = Reached()
        self._room = keep
        self._parameters = parameters
        self._owned = _OWN if parameters else _OWN - {"_parameters"}
        self._earlier = earlier
        self._trusted = trusted
        self._seen: set[int] = set()
        self._classes: set[int] = set()
        self._repeats: dict[str, int] = {}
        """Number of things that were met at a path so far, for paths of several."""
        self._walk(module)

    def _walk(self, module: Any) -> None:
        todo: deque[tuple[str, Any]] = deque([("", module)])
        while todo:
            path, thing = todo.popleft()
            if type(thing) not in _SCALARS and not _tells_its_class(thing):
                continue
            if isinstance(thing, _SCALARS):
                self.found.values[self._own_path(path)] = thing
                continue
            if isinstance(thing, Tensor) and (parts := parts_of(thing)) is not None:
                self.found.tells = False
                self.found.alive.append(parts)
                todo.extend((f"{path}[{i}]", part) for i, part in enumerate(parts))
                continue
            if isinstance(thing, Tensor):
                if self.found.values.get(path) is not thing:
                    path = self._own_path(path)
                self._take(path, thing, self.found.kinds.get(path, "attribute"))
                continue
            if id(thing) in self._seen or len(self._seen) >= MAX_OBJECTS:
                continue
            self._seen.add(id(thing))
            self.found.alive.append(thing)
            todo.extend(self._inside(path, thing))

    def _own_path(self, path: str) -> str:
        """Return the path, numbered if something else has it: a global and an attribute, say."""
        if path not in self.found.values:
            return path
        self._repeats[path] = self._repeats.get(path, 1) + 1
        return f"{path} ({self._repeats[path]})"

    def _take(self, path: str, tensor: Tensor, kind: str) -> None:
        found = self.found
        found.values[path], found.kinds[path] = tensor, kind
        if id(tensor) in found.held:
            return
        known = self._earlier.get(id(tensor))
        same = known is not None and known.tensor is tensor and known.same_place()
        trusted = id(tensor) in self._trusted
        if known is not None and same and ((trusted and known.unwritten()) or not known.changed()):
            found.held[id(tensor)] = known
            return
        held = found.held[id(tensor)] = held_now(tensor, self._room)
        self._room -= 0 if held.copy is None else tensor.nbytes

    def _inside(self, path: str, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, nn.Module):
            yield from self._in_module(path, thing)
        elif isinstance(thing, (dict, MutableMapping)):
            # What is held, which a subclass's own methods need not return.
            saved = dict(methods_of(thing).items(thing))
            if isinstance(thing, dict) or holds(thing, saved):
                self.found.containers.append((thing, saved))
            else:  # a view of a file or of the environment, which nothing here may empty
                self.found.tells = False
            names = map(_name_of, saved, range(len(saved)))
            yield from ((f"{path}[{n}]", v) for n, v in zip(names, saved.values(), strict=True))
            if isinstance(thing, dict) and type(thing) not in (dict, OrderedDict):
                yield from self._in_object(path, thing)
        elif isinstance(thing, bytearray):
            self.found.containers.append((thing, bytes(thing)))
        elif isinstance(thing, (list, deque, set)):
            items = set(thing) if isinstance(thing, set) else [*thing]
            self.found.containers.append((thing, items))
            yield from ((f"{path}[{i}]", value) for i, value in enumerate(items))
        elif isinstance(thing, (tuple, frozenset)):
            yield from ((f"{path}[{i}]", value) for i, value in enumerate(thing))
        elif isinstance(thing, torch.Generator):
            self.found.tells = False
            self.found.generators.append(thing)
            self.found.puts.append((thing.set_state, thing.get_state()))
        elif isinstance(thing, random.Random):
            if not isinstance(thing, random.SystemRandom):
                self.found.tells = False
                self.found.generators.append(thing)
                self.found.puts.append((thing.setstate, thing.getstate()))
        elif type(thing).__name__ == "ndarray":
            self.found.tells = False  # its memory and shape may be exchanged
            yield from self._in_array(path, thing)
        elif isinstance(thing, (np.random.Generator, np.random.BitGenerator)):
            bits = thing.bit_generator if isinstance(thing, np.random.Generator) else thing
            self.found.tells = False
            self.found.generators.append(bits)
            self.found.puts.append((lambda state: setattr(bits, "state", state), bits.state))
        elif isinstance(thing, np.random.RandomState):
            self.found.tells = False
            self.found.generators.append(thing)
            self.found.puts.append((thing.set_state, thing.get_state(legacy=False)))
        elif isinstance(thing, types.GeneratorType):
            self.found.tells = False
            self.found.suspended.append((path, thing, place_in(thing)))
        elif isinstance(thing, weakref.ref):
            self.found.looks.append((type(thing).__call__, thing, thing()))
            yield path, thing()
        else:
            yield from self._in_object(path, thing)

    def _in_array(self, path: str, array: Any) -> Iterator[tuple[str, Any]]:
        if not array.flags.writeable:
            return
        if array.dtype in _SHARED and array.dtype.isnative and min((0, *array.strides)) == 0:
            # The tensor shares the array's memory, so its copy holds the array's values.
            self.found.alive.append(shared := torch.from_numpy(array))
            self._take(path, shared, "attribute")
            return
        saved = array.copy()
        self.found.puts.append((functools.partial(array.__setitem__, ...), saved))
        if array.dtype.hasobject:
            yield from ((f"{path}[{i}]", value) for i, value in enumerate(array.flat))
        else:
            yield path, saved.tobytes()

    def _in_module(self, path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        dot = f"{path}." if path else ""
        held = vars(module)
        self.found.containers.append((held, dict(held)))
        self.found.looks.append((vars, module, held))
        for name in self._owned:
            if isinstance(held.get(name), (dict, set)):
                self.found.containers.append((held[name], held[name].copy()))
        for name, parameter in module._parameters.items():
            if parameter is not None and self._parameters:
                self.found.kinds[dot + name] = "parameter"
                if parameter.is_leaf:
                    self.found.gradients.append((parameter, parameter.grad))
                yield dot + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self.found.kinds[dot + name] = "buffer"
                yield dot + name, buffer
        # Not by its truth: an empty ModuleList may have buffers of its own.
        yield from ((dot + n, p) for n, p in module._modules.items() if p is not None)
        for name, value in list(held.items()):
            if name in _TABLES and isinstance(value, dict) and value:
                # By place: their keys count all hooks that were ever registered, anywhere.
                self.found.containers.append((value, dict(value)))
                yield from ((f"{dot}{name}[{i}]", v) for i, v in enumerate(value.values()))
            elif name not in _OWN and (name not in _STANDARD or value):
                yield dot + name, value
            elif isinstance(value, dict) and not value:
                self.found.empty.append(value)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self.found.tells = False
            self.found.kinds[f"{dot}_extra_state"] = "buffer"
            self.found.values[f"{dot}_extra_state"] = _bytes_of(module.get_extra_state())
        yield from self._in_class(path, type(module))

    def _in_class(self, path: str, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield state that a class holds, or that its functions close over."""
        for cls in kind.__mro__:
            if _is_foreign(cls) or id(cls) in self._classes:
                continue
            self._classes.add(id(cls))
            self.found.alive.append(cls)
            self.found.puts.append((name_keeper(cls), frozenset(vars(cls))))
            self.found.tables.append((vars(cls), dict(vars(cls))))
            for name, value in list(vars(cls).items()):
                if name.startswith("__"):
                    continue
                if isinstance(value, _DESCRIPTORS):
                    continue
                if not isinstance(value, (types.FunctionType, *_WRAPPERS)):
                    self.found.puts.append((class_setter(cls, name), value))
                yield f"{cls.__name__}.{name}", value

    def _in_object(self, path: str, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, types.MethodType):
            yield f"{path}.__self__", thing.__self__
            thing = thing.__func__
        if isinstance(thing, functools.partial):
            yield from ((f"{path}({i})", v) for i, v in enumerate(thing.args))
            yield from ((f"{path}({k})", v) for k, v in thing.keywords.items())
            self.found.tables.append((thing.keywords, dict(thing.keywords)))
            yield path, thing.func
        elif isinstance(thing, types.FunctionType):
            yield from self._in_function(path, thing)
        elif isinstance(thing, _WRAPPERS):
            if isinstance(thing, _CACHES):
                self.found.tells = False
                self.found.puts.append((cache_keeper(thing), thing.cache_info().misses))
            yield from ((path, getattr(thing, n, None)) for n in ("__wrapped__", "fget", "func"))
        elif isinstance(thing, type):
            yield from self._in_class(path, thing)
        elif isinstance(thing, types.ModuleType):
            return
        elif isinstance(thing, (types.BuiltinFunctionType, types.MethodWrapperType)):
            # ``append`` of a list that is held nowhere else, say.
            if not isinstance(thing.__self__, types.ModuleType):
                yield f"{path}.__self__", thing.__self__
        elif isinstance(thing, threading.local) or not _is_foreign(type(thing)):
            held = _attributes(thing)
            self.found.looks.append((_attributes, thing, held))
            if isinstance(held, dict):
                self.found.containers.append((held, dict(held)))
                yield from ((f"{path}.{name}", value) for name, value in list(held.items()))
            yield from self._in_slots(path, thing)
            yield from self._in_class(path, type(thing))

    def _in_slots(self, path: str, thing: Any) -> Iterator[tuple[str, Any]]:
        for cls in type(thing).__mro__:
            for name, slot in vars(cls).items() if "__slots__" in vars(cls) else ():
                if isinstance(slot, types.MemberDescriptorType):
                    value = slot_of((slot, thing))
                    self.found.looks.append((slot_of, (slot, thing), value))
                    self.found.puts.append((slot_setter(slot, thing), value))
                    if value is not EMPTY:
                        yield f"{path}.{name}", value

    def _in_function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        if (function.__module__ or "").split(".")[0] in ("torch", "dpkern"):
            return
        for attribute in _PARTS_OF_FUNCTIONS:
            self.found.looks.append((attribute, function, attribute(function)))
        if function.__kwdefaults__:
            self.found.tables.append((function.__kwdefaults__, dict(function.__kwdefaults__)))
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            value = inside_of(cell)
            self.found.looks.append((inside_of, cell, value))
            if name == "__class__" or value is EMPTY:
                continue
            self.found.puts.append((cell_setter(cell), value))
            yield f"{path}<{name}>", value
        held = vars(function)
        self.found.containers.append((held, dict(held)))
        yield from ((f"{path}.{name}", value) for name, value in list(held.items()))
        code, table = function.__code__, function.__globals__
        for name in attributes_of(code) if is_installed(code) else globals_of(code):
            yield from self._in_global(name, table, code)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield f"{path}(default)", value

    def _in_global(
        self, name: str, table: dict[str, Any], code: types.CodeType
    ) -> Iterator[tuple[str, Any]]:
        """Yield what a function's global variable holds, or what it reads of another file."""
        value = table.get(name, EMPTY)
        self.found.looks.append((functools.partial(table.get, name), EMPTY, value))
        if not _tells_its_class(value):
            return
        if is_installed(code) and not isinstance(value, _CONTAINERS):
            return
        if isinstance(value, types.ModuleType):
            held = vars(value)
            if not _is_foreign_name(value.__name__):
                inside = [n for n in attributes_of(code) if n in held]
                yield from (
                    pair
                    for n in inside
                    if not isinstance(held[n], types.ModuleType)
                    for pair in self._in_global(n, held, code)
                )
        else:
            self.found.puts.append((item_setter(table, name), value))
            if value is not EMPTY:
                yield name, value


_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)

_PARTS_OF_FUNCTIONS = tuple(map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__")))


def _is_foreign(cls: type) -> bool:
    return _is_foreign_name(cls.__module__ or "")


def _is_foreign_name(name: str) -> bool:
    return name.split(".")[0] in _FOREIGN


def _attributes(thing: Any) -> Any:
    try:
        return getattr(thing, "__dict__", None)
    except Exception:  # noqa: BLE001 - code of the user's: nothing can be read there
        return None


def _tells_its_class(thing: Any) -> bool:
    """Whether types can be asked for; a proxy of something that is gone raises instead."""
    try:
        return thing.__class__ is not None
    except Exception:  # noqa: BLE001 - code of the user's
        return False


def _name_of(key: Any, place: int) -> str:
    """Return what a path calls a key; others than plain ones have texts of any length or none."""
    plain = isinstance(key, _SCALARS) or (type(key) is tuple and {*map(type, key)} <= _PLAIN)
    return repr(key) if plain else f"{type(key).__name__} {place}"


def place_in(generator: types.GeneratorType[Any, Any, Any]) -> Any:
    """Return where a generator stands, and the identities of its variables."""
    frame = generator.gi_frame
    if frame is None:
        return None
    return frame.f_lasti, {name: id(value) for name, value in frame.f_locals.items()}


def _bytes_of(value: Any) -> bytes:
    """Return the bytes in which the value would be saved, to compare."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
