"""Snapshot everything that a module can remember from one forward pass to the next.

That is parameters, buffers, and the values of attributes, containers, objects, closures and
generators that the modules reach. A snapshot can be compared with another one and put back.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from .contents import content_hash, readable, same_bits
from .parameter import without_torch_function

KEEP_BYTES = 128 << 20
"""Bytes of tensors that a snapshot copies; further tensors are hashed and cannot be put back."""

MAX_OBJECTS = 100_000

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_FOREIGN = frozenset(
    "torch numpy dpkern lightning pytorch_lightning accelerate threading logging re builtins "
    "_thread weakref io pathlib abc enum".split()
)
"""Packages whose objects are no state of a model; torch's modules and tensors are known."""

_GLOBAL = (Tensor, torch.Generator, random.Random, list, dict, set, deque, int, float)
"""Types of globals that count as state where a function reachable from a module names them."""

_OWN = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
_STANDARD = frozenset(vars(nn.Module())) - {"training"}
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
        module: the root.
        keep: bytes of tensors that are copied; larger ones are hashed.
        parameters: False leaves parameters out, which ``fully_shard`` swaps as it likes.
        earlier: a snapshot of the same module; what did not change since shares its copies.
        trusted: tensors, by ``id``, whose contents are not compared with those in ``earlier`` while
            their versions agree; ``broke_trust`` compares them once at the end.

    Attributes:
        values: scalars and tensors by path, as they are held; ``content`` tells what they held.
        kinds: ``parameter``, ``buffer`` or ``attribute``, by path.
        tells: whether every change shows without another walk.
    """

    def __init__(
        self,
        module: nn.Module,
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
        self._seen: set[int] = set()
        self._alive: list[Any] = []
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
            and all(_holds(container, saved) for container, saved in self._containers)
            and all(_holds(table, saved) for table, saved in self._tables)
            and all(
                held.same_place() and ((key in trusted and held.unwritten()) or not held.changed())
                for key, held in self._held.items()
            )
        )

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
        """Put everything back; return the paths of changed tensors that were too large for a copy.

        Args:
            since: a snapshot of the present state with this one as ``earlier``; tensors that both
                share are not compared.
            trusted: tensors, by ``id``, that are not compared while their versions agree.
        """
        if since is not None and self.is_same(since):
            return []
        same = {} if since is None else since._held
        with without_torch_function(), torch.no_grad():
            for container, saved in self._containers:
                _refill(container, saved)
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
        return [path for path, value in self.values.items() if id(value) in lost]

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

    def _walk(self, module: nn.Module) -> None:
        todo: deque[tuple[str, Any]] = deque([("", module)])
        while todo:
            path, thing = todo.popleft()
            if isinstance(thing, _SCALARS):
                self.values[path] = thing
                continue
            if isinstance(thing, Tensor):
                self._take(path, thing, self.kinds.get(path, "attribute"))
                continue
            if id(thing) in self._seen or len(self._seen) >= MAX_OBJECTS:
                continue
            self._seen.add(id(thing))
            self._alive.append(thing)
            todo.extend(self._inside(path, thing))

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
            self._containers.append((thing, saved))
            yield from ((f"{path}[{key!r}]", value) for key, value in saved.items())
        elif isinstance(thing, (list, deque, set, bytearray)):
            self._containers.append((thing, thing.copy()))
            if not isinstance(thing, bytearray):
                yield from ((f"{path}[{i}]", value) for i, value in enumerate(list(thing)))
        elif isinstance(thing, (tuple, frozenset)):
            yield from ((f"{path}[{i}]", value) for i, value in enumerate(thing))
        elif isinstance(thing, torch.Generator):
            self.tells = False
            self._puts.append((thing.set_state, thing.get_state()))
        elif isinstance(thing, random.Random):
            self.tells = False
            self._puts.append((thing.setstate, thing.getstate()))
        elif type(thing).__name__ == "ndarray":
            self.tells = False  # its memory and shape may be exchanged
            if thing.flags.writeable and thing.dtype.kind in "biufc":
                # The tensor shares the array's memory, so its copy holds the array's values.
                self._alive.append(shared := torch.from_numpy(thing))
                self._take(path, shared, "attribute")
        elif isinstance(getattr(thing, "bit_generator", None), object) and hasattr(
            thing, "bit_generator"
        ):
            bits = thing.bit_generator
            self.tells = False
            self._puts.append((lambda state: setattr(bits, "state", state), bits.state))
        else:
            yield from self._in_object(path, thing)

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
        yield from ((dot + name, part) for name, part in module._modules.items() if part)
        for name, value in list(held.items()):
            if name not in _OWN and (name not in _STANDARD or value):
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
            if (cls.__module__ or "").split(".")[0] in _FOREIGN or id(cls) in self._seen:
                continue
            self._seen.add(id(cls))
            self._alive.append(cls)
            self._puts.append((_name_keeper(cls), frozenset(vars(cls))))
            self._tables.append((vars(cls), dict(vars(cls))))
            for name, value in list(vars(cls).items()):
                if name.startswith("__"):
                    continue
                if isinstance(value, (Tensor, list, dict, set, deque, *_SCALARS[:4])):
                    self._puts.append((_class_setter(cls, name), value))
                    yield f"{cls.__name__}.{name}", value
                elif isinstance(value, types.FunctionType):
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
        elif isinstance(thing, (type, types.ModuleType, types.BuiltinFunctionType)):
            return
        elif (type(thing).__module__ or "").split(".")[0] not in _FOREIGN:
            held = getattr(thing, "__dict__", None)
            self._looks.append((_attributes, thing, held))
            if isinstance(held, dict):
                self._containers.append((held, dict(held)))
                yield from ((f"{path}.{name}", value) for name, value in list(held.items()))

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
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            self._looks.append((function.__globals__.get, name, value))
            if isinstance(value, _GLOBAL):
                put = _item_setter(function.__globals__, name)
                self._puts.append((put, value))
                yield name, value
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield f"{path}(default)", value


def _hash(held: _Held) -> int | None:
    return content_hash(held.copy) if held.copy is not None else held.hash


_PARTS_OF_FUNCTIONS = tuple(map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__")))

_EMPTY: Any = object()


def _inside_of(cell: types.CellType) -> Any:
    """Return the variable of a closure; ``_EMPTY`` if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY


def _attributes(thing: Any) -> Any:
    return getattr(thing, "__dict__", None)


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


def _item_setter(table: dict[str, Any], name: str) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        table[name] = value

    return put


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function and those written inside it look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


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
