"""Fingerprint everything that a training loop remembers beyond a step.

A loop keeps state in its model (parameters, buffers, tensors held as attributes), in optimizers, in
other modules, and in its own variables: those of the functions that are running and of the script.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

MODEL = "the model"
OPTIMIZER = "an optimizer"
MODULE = "another module"
VARIABLE = "a variable of the loop"

_OWN = frozenset(nn.Module().__dict__)
"""Attributes of every module: its tables of parameters, buffers, modules and hooks."""
_PACKAGE = Path(__file__).resolve().parents[2]
_DEPTH = 6
_ITEMS = 10_000


@dataclass(frozen=True)
class Held:
    """One thing that is remembered.

    Attributes:
        where: ``MODEL``, ``OPTIMIZER``, ``MODULE`` or ``VARIABLE``.
        digest: digest of its content.
    """

    where: str
    digest: bytes


Snapshot = Mapping[str, Held]
"""Everything that is remembered, by name."""


def snapshot(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    frames: Sequence[types.FrameType] = (),
    script: types.ModuleType | None = None,
) -> Snapshot:
    """Return fingerprints of a model, its optimizer, and of what a script's functions hold.

    Args:
        module, optimizer: model and optimizer that the engine has made private.
        frames: running functions, the innermost first.
        script: the script's module.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        walk = _Walk(script)
        walk.add("model", module, MODEL)
        walk.add("optimizer", optimizer, OPTIMIZER)
        for frame in frames:
            for name, value in list(frame.f_locals.items()):
                walk.add(f"{name} ({frame.f_code.co_name})", value, VARIABLE)
        if script is not None:
            for name, value in list(vars(script).items()):
                if not name.startswith("__"):
                    walk.add(name, value, VARIABLE)
        return walk.found


def frames_of(frame: types.FrameType | None, folder: Path) -> list[types.FrameType]:
    """Return the running functions of files in a folder, from this frame outwards."""
    found = []
    while frame is not None:
        if is_own(frame.f_code.co_filename, folder):
            found.append(frame)
        frame = frame.f_back
    return found


def is_own(file: str | None, folder: Path) -> bool:
    """Whether a file of code is the user's: in the folder, and no installed package or dpkern."""
    place = Path(file or "")
    installed = "site-packages" in place.parts or _PACKAGE in place.parents
    return folder in place.parents and not installed


def differences(one: Snapshot, other: Snapshot) -> dict[str, str]:
    """Return where two runs remember different things: names, and what holds them."""
    found: dict[str, str] = {}
    for name in (*one, *(name for name in other if name not in one)):
        if one.get(name) != other.get(name):
            where = (one.get(name) or other[name]).where
            found[_variable(name) if where is VARIABLE else name] = where
    return found


def _variable(name: str) -> str:
    """Return the variable's name, whatever part of it differs."""
    return name.split("[")[0].rstrip("'")


class _Walk:
    def __init__(self, script: types.ModuleType | None) -> None:
        self.found: dict[str, Held] = {}
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # an id is a name only while its object lives
        self._script = "" if script is None else script.__name__

    def add(self, name: str, value: Any, where: str, depth: int = 0) -> None:
        """Take in a value and what it holds."""
        if isinstance(value, (bool, int, float, complex)):
            if where is VARIABLE or not isinstance(value, (bool, int)):
                self._put(name, VARIABLE, repr(value).encode())
            return
        if id(value) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, Tensor):
            self._put(name, where, _content(value))
        elif isinstance(value, np.ndarray):
            self._put(name, where, np.ascontiguousarray(value).data if value.size else b"")
        elif isinstance(value, nn.Module):
            self._module(name, value, where, depth)
        elif isinstance(value, torch.optim.Optimizer):
            for number, state in enumerate(value.state.values()):
                self.add(f"{name}.state[{number}]", state, OPTIMIZER, depth + 1)
        elif not isinstance(value, (Dataset, DataLoader)):
            for key, part in self._parts(value):
                self.add(f"{name}{key}", part, where, depth + 1)

    def _parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping):
            for key, part in list(value.items())[:_ITEMS]:
                yield f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", part
        elif isinstance(value, (list, tuple, deque)):
            for number, part in enumerate(list(value)[:_ITEMS]):
                yield f"[{number}]", part
        elif type(value).__module__ == self._script:
            for key, part in list(getattr(value, "__dict__", {}).items()):
                yield f".{key}", part

    def _module(self, name: str, module: nn.Module, where: str, depth: int) -> None:
        if where is VARIABLE and next(module.parameters(), None) is not None:
            where = MODULE
        for path, part in module.named_modules():
            self._seen.add(id(part))
            place = f"{name}.{path}" if path else name
            for tensors in (part._parameters, part._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        self.add(f"{place}.{key}", tensor, where, depth + 1)
            for key, value in list(part.__dict__.items()):
                if key not in _OWN:
                    self.add(f"{place}.{key}", value, where, depth + 1)

    def _put(self, name: str, where: str, content: Any) -> None:
        while name in self.found:
            name += "'"
        self.found[name] = Held(where, blake2b(content, digest_size=16).digest())


def _content(tensor: Tensor) -> Any:
    """Return a tensor's bytes, with shape and type."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
    head = f"{tuple(plain.shape)} {plain.dtype} ".encode()
    return head + plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else head
