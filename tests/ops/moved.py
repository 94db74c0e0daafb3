"""A backend of a real device run by tests whose tensors are on the CPU.

Every argument goes to the device and comes back, changed in place or not; results come back too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dpkern.base import dispatch
from dpkern.base.kernel import Kernel
from dpkern.base.schema import BoundCall
from dpkern.ops.update import State


class Move:
    """One call's tensors, each moved once."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.states: list[tuple[State, State]] = []

    def there(self, tree: Any) -> Any:
        """The same arguments with tensors on the device."""
        if isinstance(tree, torch.Tensor):
            if id(tree) not in self.pairs:
                self.pairs[id(tree)] = tree, _alike(tree, self.device)
            return self.pairs[id(tree)][1]
        if isinstance(tree, State):
            state = copy.copy(tree)
            state.buffers = {k: self.there(list(v)) for k, v in tree.buffers.items()}
            self.states.append((tree, state))
            return state
        return _mapped(tree, self.there)

    def call(self, bound: BoundCall) -> BoundCall:
        """The checked call with its tensors on the device."""
        args, plan = self.there(bound.args), self.there(bound.plan)
        place = torch.device(self.device) if self.pairs else bound.device
        return bound._replace(args=args, plan=plan, device=place)

    def back(self, tree: Any) -> Any:
        """The same results with tensors on the CPU; a tensor of the caller's is that very one."""
        if isinstance(tree, torch.Tensor):
            mine = [cpu for cpu, moved in self.pairs.values() if moved is tree]
            return mine[0] if mine else tree.cpu()
        return _mapped(tree, self.back)

    def finish(self) -> None:
        """Write what the kernel changed into the caller's own tensors."""
        with torch.no_grad():
            for cpu, moved in self.pairs.values():
                if not torch.equal(cpu, moved.cpu()) or moved._version:
                    cpu.copy_(moved)
        for mine, theirs in self.states:
            mine.steps = theirs.steps


def _alike(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor.detach()) if 0 not in tensor.stride() else tensor.to(device)


def _mapped(tree: Any, each: Callable[[Any], Any]) -> Any:
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(each(item) for item in tree))
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)(each(item) for item in tree)
    if isinstance(tree, dict):
        return {key: each(value) for key, value in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {f.name: each(getattr(tree, f.name)) for f in dataclasses.fields(tree)}
        if any(changes[name] is not getattr(tree, name) for name in changes):
            return dataclasses.replace(tree, **changes)
    return tree


@contextmanager
def moved(backend: str, device: str = "cuda") -> Iterator[None]:
    """The backend's kernels for tensors on the CPU, which travel to the device and back."""

    def wrapped(kernel: Kernel) -> Kernel:
        def run(bound: BoundCall) -> Any:
            move = Move(device)
            result = move.back(kernel.run(move.call(bound)))
            move.finish()
            return result

        def refuse(bound: BoundCall) -> str | None:
            return None if kernel.refuse is None else kernel.refuse(Move(device).call(bound))

        return Kernel(run, refuse)

    kernels = [
        (name, wrapped(op.kernels[backend]), None)
        for name, op in dispatch.OPS.items()
        if backend in op.kernels
    ]
    with dispatch.replaced(backend, kernels):
        yield
