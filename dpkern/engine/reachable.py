"""Snapshot everything that a module can remember from one forward pass to the next.

That is parameters, buffers, and the values of attributes, containers, objects, closures and
generators that the modules reach. A snapshot can be compared with another one and put back.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import io
import os
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .contents import content_hash, readable, same_bits
from .parameter import without_torch_function
from .table_entries import same_entries

KEEP_BYTES = 128 << 20
"""Bytes of tensors that a snapshot copies; further tensors are hashed and cannot be put back."""

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
_SAME: Any = object()


@dataclasses.dataclass
class _Held:
    """A tensor and its content at the time of the snapshot."""

    tensor: Tensor
    data: Tensor
    copy: Tensor | None
    hash: int | None
    version: int = -1

    def same_place(self) -> bool:
        """Whether the tensor still shows the memory that it showed."""
        return self.tensor.data_ptr() == self.data.data_ptr()

    def unwritten(self) -> bool:
        """Whether place and version are what they were; ``.data`` writes change neither."""
        if self.version == -1 or self.tensor.is_inference():
            return False
        return self.same_place() and self.tensor._version == self.version

    def changed(self) -> bool:
        """Whether the tensor holds something else now."""
        if self.tensor.dtype is not self.data.dtype or self.tensor.shape != self.data.shape:
            return True
        if self.copy is not None:
            return not same_bits(self.tensor, self.copy)
        return self.hash is not None and content_hash(self.tensor) != self.hash

    def restore(self) -> bool:
        """Put the content back; return whether that was possible."""
        if not self.changed():
            return True
        if self.copy is None:
            return False
        if not self.same_place() or self.tensor.shape != self.data.shape:
            self.tensor.data = self.data
        self.tensor.data.copy_(self.copy)
        return True


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
        values: scalars and tensors by path, as they are held; ``content`` tells what they held.
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
        self._trusted = trusted
        self._earlier = {} if earlier is None else earlier._held
        self._owned = _OWN if parameters else _OWN - {"_parameters"}
        self._hidden: set[str] = set() if parameters else {"_parameters"}
        self.values: dict[str, Any] = {}
        self.kinds: dict[str, str] = {}
        self._room = keep
        self._held: dict[int, _Held] = {}
        self._containers: list[tuple[Any, Any]] = []
        self._puts: list[tuple[Callable[[Any], Any], Any]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._looks: list[tuple[Callable[[Any], Any], Any, Any]] = []
        """Lookups that found the state: the function, its argument and its result."""
        self._tables: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = []
        """Tables that were read and are not put back as a whole, with their contents."""
        self._empty: list[Any] = []
        """Tables of hooks without an entry."""
        self.tells = True
        self.generators: list[Any] = []
        self._suspended: list[tuple[str, types.GeneratorType[Any, Any, Any], Any]] = []
        """Generators, which cannot be put back, with their paths and where they stood."""
        self._seen: set[int] = set()
        self._classes: set[int] = set()
        self._alive: list[Any] = []
        self._repeats: dict[str, int] = {}
        """Number of things that were met at a path so far, for paths of several."""
        with without_torch_function(), torch.no_grad():
            if earlier is not None and earlier._still_holds(trusted):
                vars(self).update(vars(earlier))
            else:
                self._walk(module)
        self._earlier = {}

    def _still_holds(self, trusted: Collection[int]) -> bool:
        """Whether a walk would find what this one found.

        It looks again at all that was looked at, without following paths.
        """
        return (
            self.tells
            and not any(self._empty)
            and all(tensor.grad is gradient for tensor, gradient in self._gradients)
            and all(look(at) is value for look, at, value in self._looks)
            and same_entries(*self._dicts)
            and all(_holds(container, saved) for container, saved in self._others)
            and all(
                held.same_place() and ((key in trusted and held.unwritten()) or not held.changed())
                for key, held in self._held.items()
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
        yield from self._containers
        yield from self._tables

    def is_same(self, other: Snapshot) -> bool:
        """Whether nothing changed between the two, of which one was the other's ``earlier``."""
        return self._held is other._held

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
                for key, held in self._held.items()
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
        same = {} if since is None else since._held
        with without_torch_function(), torch.no_grad():
            all_hold = same_entries(*self._dicts)  # one look in C serves most passes
            for container, saved in self._containers:
                if not (all_hold and type(container) is dict):
                    _refill(container, saved)
            for table in self._empty:
                if table:  # a hook that a pass has registered
                    table.clear()
            for put, value in self._puts:
                put(value)
            for tensor, gradient in self._gradients:
                if tensor.grad is not gradient:
                    tensor.grad = gradient
            lost = {
                key
                for key, held in self._held.items()
                if same.get(key) is not held
                and not (key in trusted and held.unwritten())
                and not held.restore()
            }
        return [
            *(path for path, value in self.values.items() if id(value) in lost),
            *(path for path, thing, at in self._suspended if _place_in(thing) != at),
        ]

    def _same(self, path: str, later: Snapshot) -> bool:
        mine, other = self.values.get(path, _SAME), later.values.get(path, _SAME)
        if isinstance(mine, Tensor) and isinstance(other, Tensor):
            one, two = self._held[id(mine)], later._held[id(other)]
            if one is two:
                return True
            if one.copy is not None and two.copy is not None:
                return same_bits(one.copy, two.copy)
            known = (_hash(one), _hash(two))
            return known[0] == known[1]
        if isinstance(mine, Tensor) or isinstance(other, Tensor):
            return False
        return type(mine) is type(other) and (mine == other or (mine != mine and other != other))

    def _walk(self, module: Any) -> None:
        todo: deque[tuple[str, Any]] = deque([("", module)])
        while todo:
            path, thing = todo.popleft()
            if type(thing) not in _SCALARS and not _tells_its_class(thing):
                continue
            if isinstance(thing, _SCALARS):
                self.values[self._own_path(path)] = thing
                continue
            if isinstance(thing, Tensor) and (parts := _parts_of(thing)) is not None:
                self.tells = False
                self._alive.append(parts)
                todo.extend((f"{path}[{i}]", part) for i, part in enumerate(parts))
                continue
            if isinstance(thing, Tensor):
                if self.values.get(path) is not thing:
                    path = self._own_path(path)
                self._take(path, thing, self.kinds.get(path, "attribute"))
                continue
            if id(thing) in self._seen or len(self._seen) >= MAX_OBJECTS:
                continue
            self._seen.add(id(thing))
            self._alive.append(thing)
            todo.extend(self._inside(path, thing))

    def _own_path(self, path: str) -> str:
        """Return the path, numbered if something else has it: a global and an attribute, say."""
        if path not in self.values:
            return path
        self._repeats[path] = self._repeats.get(path, 1) + 1
        return f"{path} ({self._repeats[path]})"

    def _take(self, path: str, tensor: Tensor, kind: str) -> None:
        self.values[path], self.kinds[path] = tensor, kind
        if id(tensor) in self._held:
            return
        known = self._earlier.get(id(tensor))
        same = known is not None and known.tensor is tensor and known.same_place()
        trusted = id(tensor) in self._trusted
        if known is not None and same and ((trusted and known.unwritten()) or not known.changed()):
            self._held[id(tensor)] = known
            return
        copied, hashed = None, None
        version = -1 if tensor.is_inference() else tensor._version
        if readable(tensor):
            if tensor.nbytes <= self._room:
                self._room -= tensor.nbytes
                copied = tensor.detach().clone(memory_format=torch.preserve_format)
            else:
                hashed = content_hash(tensor)
        self._held[id(tensor)] = _Held(tensor, tensor.detach(), copied, hashed, version)

    def _inside(self, path: str, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, nn.Module):
            yield from self._in_module(path, thing)
        elif isinstance(thing, (dict, MutableMapping)):
            # What is held, which a subclass's own [] need not return (a table that makes objects).
            saved = dict(thing.items())
            if isinstance(thing, dict) or _holds(thing, saved):
                self._containers.append((thing, saved))
            else:  # a view of a file or of the environment, which nothing here may empty
                self.tells = False
            names = map(_name_of, saved, range(len(saved)))
            yield from ((f"{path}[{n}]", v) for n, v in zip(names, saved.values(), strict=True))
        elif isinstance(thing, bytearray):
            self._containers.append((thing, bytes(thing)))
        elif isinstance(thing, (list, deque, set)):
            items = set(thing) if isinstance(thing, set) else [*thing]
            self._containers.append((thing, items))
            yield from ((f"{path}[{i}]", value) for i, value in enumerate(items))
        elif isinstance(thing, (tuple, frozenset)):
            yield from ((f"{path}[{i}]", value) for i, value in enumerate(thing))
        elif isinstance(thing, torch.Generator):
            self.tells = False
            self.generators.append(thing)
            self._puts.append((thing.set_state, thing.get_state()))
        elif isinstance(thing, random.Random):
            if not isinstance(thing, random.SystemRandom):
                self.tells = False
                self.generators.append(thing)
                self._puts.append((thing.setstate, thing.getstate()))
        elif type(thing).__name__ == "ndarray":
            self.tells = False  # its memory and shape may be exchanged
            yield from self._in_array(path, thing)
        elif isinstance(thing, (np.random.Generator, np.random.BitGenerator)):
            bits = thing.bit_generator if isinstance(thing, np.random.Generator) else thing
            self.tells = False
            self.generators.append(bits)
            self._puts.append((lambda state: setattr(bits, "state", state), bits.state))
        elif isinstance(thing, np.random.RandomState):
            self.tells = False
            self.generators.append(thing)
            self._puts.append((thing.set_state, thing.get_state(legacy=False)))
        elif isinstance(thing, types.GeneratorType):
            self.tells = False
            self._suspended.append((path, thing, _place_in(thing)))
        elif isinstance(thing, weakref.ref):
            self._looks.append((type(thing).__call__, thing, thing()))
            yield path, thing()
        else:
            yield from self._in_object(path, thing)

    def _in_array(self, path: str, array: Any) -> Iterator[tuple[str, Any]]:
        if not array.flags.writeable:
            return
        if array.dtype in _SHARED and array.dtype.isnative and min((0, *array.strides)) == 0:
            # The tensor shares the array's memory, so its copy holds the array's values.
            self._alive.append(shared := torch.from_numpy(array))
            self._take(path, shared, "attribute")
            return
        saved = array.copy()
        self._puts.append((functools.partial(array.__setitem__, ...), saved))
        if array.dtype.hasobject:
            yield from ((f"{path}[{i}]", value) for i, value in enumerate(array.flat))
        else:
            yield path, saved.tobytes()

    def _in_module(self, path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        dot = f"{path}." if path else ""
        held = vars(module)
        self._containers.append((held, dict(held)))
        self._looks.append((vars, module, held))
        for name in self._owned:
            if isinstance(held.get(name), (dict, set)):
                self._containers.append((held[name], held[name].copy()))
        for name, parameter in module._parameters.items():
            if parameter is not None and not self._hidden:
                self.kinds[dot + name] = "parameter"
                if parameter.is_leaf:
                    self._gradients.append((parameter, parameter.grad))
                yield dot + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self.kinds[dot + name] = "buffer"
                yield dot + name, buffer
        # Not by its truth: an empty ModuleList may have buffers of its own.
        yield from ((dot + n, p) for n, p in module._modules.items() if p is not None)
        for name, value in list(held.items()):
            if name in _TABLES and isinstance(value, dict) and value:
                # By place: their keys count all hooks that were ever registered, anywhere.
                self._containers.append((value, dict(value)))
                yield from ((f"{dot}{name}[{i}]", v) for i, v in enumerate(value.values()))
            elif name not in _OWN and (name not in _STANDARD or value):
                yield dot + name, value
            elif isinstance(value, dict) and not value:
                self._empty.append(value)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self.tells = False
            self.kinds[f"{dot}_extra_state"] = "buffer"
            self.values[f"{dot}_extra_state"] = _bytes_of(module.get_extra_state())
        yield from self._in_class(path, type(module))

    def _in_class(self, path: str, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield state that a class holds, or that its functions close over."""
        for cls in kind.__mro__:
            if _is_foreign(cls) or id(cls) in self._classes:
                continue
            self._classes.add(id(cls))
            self._alive.append(cls)
            self._puts.append((_name_keeper(cls), frozenset(vars(cls))))
            self._tables.append((vars(cls), dict(vars(cls))))
            for name, value in list(vars(cls).items()):
                if name.startswith("__"):
                    continue
                if isinstance(value, _DESCRIPTORS):
                    continue
                if not isinstance(value, (types.FunctionType, *_WRAPPERS)):
                    self._puts.append((_class_setter(cls, name), value))
                yield f"{cls.__name__}.{name}", value

    def _in_object(self, path: str, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, types.MethodType):
            yield f"{path}.__self__", thing.__self__
            thing = thing.__func__
        if isinstance(thing, functools.partial):
            yield from ((f"{path}({i})", v) for i, v in enumerate(thing.args))
            yield from ((f"{path}({k})", v) for k, v in thing.keywords.items())
            self._tables.append((thing.keywords, dict(thing.keywords)))
            yield path, thing.func
        elif isinstance(thing, types.FunctionType):
            yield from self._in_function(path, thing)
        elif isinstance(thing, _WRAPPERS):
            if isinstance(thing, _CACHES):
                self.tells = False
                self._puts.append((_cache_keeper(thing), thing.cache_info().misses))
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
            self._looks.append((_attributes, thing, held))
            if isinstance(held, dict):
                self._containers.append((held, dict(held)))
                yield from ((f"{path}.{name}", value) for name, value in list(held.items()))
            yield from self._in_slots(path, thing)
            yield from self._in_class(path, type(thing))

    def _in_slots(self, path: str, thing: Any) -> Iterator[tuple[str, Any]]:
        for cls in type(thing).__mro__:
            for name, slot in vars(cls).items() if "__slots__" in vars(cls) else ():
                if isinstance(slot, types.MemberDescriptorType):
                    value = _slot_of((slot, thing))
                    self._looks.append((_slot_of, (slot, thing), value))
                    self._puts.append((_slot_setter(slot, thing), value))
                    if value is not _EMPTY:
                        yield f"{path}.{name}", value

    def _in_function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        if (function.__module__ or "").split(".")[0] in ("torch", "dpkern"):
            return
        for attribute in _PARTS_OF_FUNCTIONS:
            self._looks.append((attribute, function, attribute(function)))
        if function.__kwdefaults__:
            self._tables.append((function.__kwdefaults__, dict(function.__kwdefaults__)))
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            value = _inside_of(cell)
            self._looks.append((_inside_of, cell, value))
            if name == "__class__" or value is _EMPTY:
                continue
            self._puts.append((_cell_setter(cell), value))
            yield f"{path}<{name}>", value
        held = vars(function)
        self._containers.append((held, dict(held)))
        yield from ((f"{path}.{name}", value) for name, value in list(held.items()))
        code, table = function.__code__, function.__globals__
        for name in _attributes_of(code) if _is_installed(code) else _globals_of(code):
            yield from self._in_global(name, table, code)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield f"{path}(default)", value

    def _in_global(
        self, name: str, table: dict[str, Any], code: types.CodeType
    ) -> Iterator[tuple[str, Any]]:
        """Yield what a function's global variable holds, or what it reads of another file."""
        value = table.get(name, _EMPTY)
        self._looks.append((functools.partial(table.get, name), _EMPTY, value))
        if not _tells_its_class(value):
            return
        if _is_installed(code) and not isinstance(value, _CONTAINERS):
            return
        if isinstance(value, types.ModuleType):
            held = vars(value)
            if not _is_foreign_name(value.__name__):
                inside = [n for n in _attributes_of(code) if n in held]
                yield from (
                    pair
                    for n in inside
                    if not isinstance(held[n], types.ModuleType)
                    for pair in self._in_global(n, held, code)
                )
        else:
            self._puts.append((_item_setter(table, name), value))
            if value is not _EMPTY:
                yield name, value


def _hash(held: _Held) -> int | None:
    return content_hash(held.copy) if held.copy is not None else held.hash


def _parts_of(tensor: Tensor) -> Sequence[Tensor] | None:
    """Return the memory of a tensor that has no one block of it; None for ordinary tensors."""
    if tensor.layout is torch.strided and not tensor.is_nested and not is_lazy(tensor):
        return None
    if is_lazy(tensor):
        return ()  # nothing yet
    own = tensor.detach()
    if own.is_nested:
        return own.unbind()
    if own.layout is torch.sparse_coo:
        return own._indices(), own._values()
    if own.layout in (torch.sparse_csr, torch.sparse_bsr):
        return own.crow_indices(), own.col_indices(), own.values()
    if own.layout in (torch.sparse_csc, torch.sparse_bsc):
        return own.ccol_indices(), own.row_indices(), own.values()
    return None


_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def _is_foreign(cls: type) -> bool:
    return _is_foreign_name(cls.__module__ or "")


def _is_foreign_name(name: str) -> bool:
    return name.split(".")[0] in _FOREIGN


def _is_installed(code: types.CodeType) -> bool:
    """Whether the code is a package's: following all that it names would read whole libraries."""
    return any(part in code.co_filename for part in _INSTALLED)


_INSTALLED = (*("site-packages", "dist-packages"), os.path.dirname(os.__file__) + os.sep)

_PARTS_OF_FUNCTIONS = tuple(map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__")))

_EMPTY: Any = object()


def _inside_of(cell: types.CellType) -> Any:
    """Return the variable of a closure; ``_EMPTY`` if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY


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


def _holds(container: Any, saved: Any) -> bool:
    """Whether a container holds the same objects as before."""
    if len(container) != len(saved):
        return False
    if isinstance(container, Mapping):
        pairs = (container.keys(), saved.keys()), (container.values(), saved.values())
        return all(all(map(is_, now, before)) for now, before in pairs)
    if isinstance(container, (set, bytearray)):
        return bool(container == saved)
    return all(map(is_, container, saved))


def _cell_setter(cell: types.CellType) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        cell.cell_contents = value

    return put


def _name_keeper(cls: type) -> Callable[[Any], None]:
    def put(names: Any) -> None:
        for name in set(vars(cls)) - names:
            delattr(cls, name)

    return put


def _cache_keeper(cache: Any) -> Callable[[Any], None]:
    """Return a function that empties a cache which was filled: what it holds cannot be read."""

    def put(misses: Any) -> None:
        if cache.cache_info().misses != misses:
            cache.cache_clear()

    return put


def _slot_of(at: tuple[Any, Any]) -> Any:
    slot, thing = at
    try:
        return slot.__get__(thing)
    except AttributeError:  # not assigned yet
        return _EMPTY


def _slot_setter(slot: Any, thing: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if value is not _EMPTY:
            slot.__set__(thing, value)
        elif _slot_of((slot, thing)) is not _EMPTY:
            slot.__delete__(thing)

    return put


def _place_in(generator: types.GeneratorType[Any, Any, Any]) -> Any:
    """Return where a generator stands, and the identities of its variables."""
    frame = generator.gi_frame
    if frame is None:
        return None
    return frame.f_lasti, {name: id(value) for name, value in frame.f_locals.items()}


def _item_setter(table: dict[str, Any], name: str) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if value is _EMPTY:  # assigned since
            table.pop(name, None)
        else:
            table[name] = value

    return put


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that a function and those written inside it read or write."""
    found = {i.argval: None for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= dict.fromkeys(_globals_of(inner))
    return tuple(found)


_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")


def _attributes_of(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function and those written inside it look up anywhere."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _attributes_of(inner)


def _class_setter(cls: type, name: str) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if vars(cls).get(name) is not value:
            setattr(cls, name, value)

    return put


def _refill(container: Any, saved: Any) -> None:
    """Make the container hold what it held."""
    if isinstance(container, (dict, MutableMapping)):
        if _holds(container, saved):
            return
        container.clear()
        container.update(saved)
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


def _bytes_of(value: Any) -> bytes:
    """Return the bytes in which the value would be saved, to compare."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
