"""Tensors that carry the records of their rows through the user's code.

A ``TrackedTensor`` is an ordinary tensor with a state (``states``). Torch hands every operation on
it to ``__torch_function__``, which runs the ordinary operation and asks ``rules`` for the state of
what comes out. The module never sees a tracked tensor: ``boundary`` takes the state off at its
entrance.

What leaves torch loses its state: ``float(x)``, ``.tolist()``, ``.numpy()``, ``torch.tensor(x)``,
``torch.vmap`` and kernels of extensions (``.item()`` marks what it returns, see ``statistic``).
Numbers that come back this way count as constants. Tensors that come back
this way are refused as inputs of the module, and count as constants in arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..uncompiled import uncompiled
from .states import State

Function = Callable[..., Any]


class TrackedTensor(Tensor):
    """A tensor with a state; copies stay tracked, pickles are ordinary tensors."""

    follows_records = True
    _state: State
    _since: int
    """Number of the write (``aliases``) that the state takes into account."""

    @classmethod
    @uncompiled  # torch.compile breaks its graph here
    def __torch_function__(
        cls,
        func: Function,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            usual = USUAL.get(func)
        except TypeError:  # not hashable
            usual = None
        if usual is not None and (found := usual(func, args, kwargs)) is not None:
            return found
        return _RUN[0](func, args, {} if kwargs is None else dict(kwargs))

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Check the loss and go backward (``losses.backward``)."""
        batch = self._state.batch
        if args or kwargs or batch is None or batch.boundary is None:
            _RUN[0](Tensor.backward, (self, *args), kwargs)
        else:
            loss = untracked(self)

            def run(factor: int | None = None) -> None:
                loss.backward(None if factor is None else torch.full_like(loss, factor))  # type: ignore[no-untyped-call]

            batch.boundary.backward([loss], [self._state], run, frees=True)

    def as_subclass(self, cls: type[Any]) -> Any:
        """A copy of another class, which may enter other modules and not the private one."""
        return untracked(self).clone().as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = track(untracked(self).detach().clone(), self._state)
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return untracked(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __format__(self, form: str) -> str:
        return format(untracked(self).detach(), form)


Usual = Callable[[Function, Sequence[Any], "Mapping[str, Any] | None"], Any]

USUAL: dict[Function, Usual] = {}
"""What runs the most frequent calls of a function at a low price; it returns None for all others.
"""

_RUN: list[Callable[[Function, Sequence[Any], dict[str, Any]], Any]] = []
"""What runs operations on tracked tensors (``rules.run``, which stands on this module)."""


def run_by(run: Callable[[Function, Sequence[Any], dict[str, Any]], Any]) -> None:
    """Hand operations on tracked tensors to this function."""
    _RUN[:] = [run]


def track(tensor: Tensor, state: State) -> TrackedTensor:
    """Return a tracked alias of the tensor: same storage, same place in the autograd graph."""
    if type(tensor) is Tensor:
        if tensor.requires_grad:
            alias = Tensor.as_subclass(tensor, TrackedTensor)
        else:  # the same, at a third of the price
            alias = tensor.detach()  # type: ignore[assignment]
            alias.__class__ = TrackedTensor
    else:
        with torch._C.DisableTorchFunctionSubclass():
            alias = Tensor.as_subclass(tensor, TrackedTensor)
    alias._state = state
    alias._since = _WRITES[0]
    return alias


def retrack(tensor: Tensor, state: State) -> Tensor:
    """Return the same object, tracked from now on: fresh results and targets of writes."""
    if type(tensor) is Tensor:
        tensor.__class__ = TrackedTensor
    tensor._state = state  # type: ignore[attr-defined]
    tensor._since = _WRITES[0]  # type: ignore[attr-defined]
    return tensor


def untracked(tensor: Tensor) -> Tensor:
    """Return an ordinary alias of a tracked tensor, and any other tensor itself."""
    if type(tensor) is not TrackedTensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.requires_grad:
            return Tensor.as_subclass(tensor, Tensor)
        return tensor.detach()


def state_of(value: Any) -> State | None:
    """Return the state of a tracked tensor, None for anything else."""
    return value._state if type(value) is TrackedTensor else None


_WRITES = [0]


def writes() -> int:
    """Return how many writes have changed whose values a storage holds."""
    return _WRITES[0]


def count_write() -> int:
    """Return the number of a new write that changes whose values a storage holds."""
    _WRITES[0] += 1
    return _WRITES[0]
