"""Carry the records of rows through the user's code, in a subclass of ``Tensor``.

A ``TrackedTensor`` is an ordinary tensor with a state (``states``). Torch hands every operation on
it to ``__torch_function__``, which runs the ordinary operation and asks ``rules`` for the state of
what comes out. The module never sees a tracked tensor: ``boundary`` takes the state off at its
entrance.

Values that leave torch lose their state: ``float(x)``, ``.tolist()``, ``.numpy()``,
``torch.tensor(x)``, ``torch.vmap`` and kernels of extensions (``.item()`` marks what it returns,
see ``statistic``). Numbers and tensors that come back this way count as constants in arithmetic;
such tensors are refused as inputs of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.compiler import is_dynamo_compiling

from ...ops import direct
from ..uncompiled import never_compiled, no_graph_begins_with, uncompiled
from .states import State

Function = Callable[..., Any]


class TrackedTensor(Tensor):
    """A tensor with a state; its copies are tracked, its pickles are ordinary tensors."""

    follows_records = True
    _state: State
    _since: int = 0
    """Number of the write (``aliases``) that the state takes into account."""

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if is_dynamo_compiling() or get_eval_frame_callback() is not None:
            return _outside_of_graphs(func, args, kwargs)
        try:
            usual = USUAL.get(func)
        except TypeError:  # not hashable
            usual = None
        if usual is not None and (found := usual(func, args, kwargs)) is not None:
            return found
        return _RUN[0](func, args, {} if kwargs is None else dict(kwargs))

    def dim(self) -> int:
        """Return the number of dimensions, without a detour through ``__torch_function__``."""
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.dim(self)

    @never_compiled
    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Check the loss and go backward (``losses.backward``)."""
        batch = self._state.batch
        if args or kwargs or batch is None or batch.boundary is None:
            _RUN[0](Tensor.backward, (self, *args), kwargs)
        else:
            # For as long as it goes backward the loss is an ordinary tensor: no alias is made.
            state, self.__class__ = self._state, Tensor  # type: ignore[assignment]

            def run(factor: int | None = None) -> None:
                _backward(self, factor)

            try:
                batch.boundary.backward([self], [state], run, frees=True)
            finally:
                self.__class__ = TrackedTensor

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Take other memory; torch calls no ``__torch_function__`` for it."""
        return _RUN[0](Tensor.set_, (self, *args), kwargs)

    def as_subclass(self, cls: type[Any]) -> Any:
        """Return a copy of another class, which other modules take and the private one refuses."""
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


no_graph_begins_with(TrackedTensor.__torch_function__.__func__)  # type: ignore[attr-defined]


@uncompiled  # torch.compile breaks its graph here
def _outside_of_graphs(
    func: Function, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    return _RUN[0](func, args, {} if kwargs is None else dict(kwargs))


_run_backward = getattr(torch.autograd.graph, "_engine_run_backward", None)


def _backward(loss: Tensor, factor: int | None) -> None:
    """Run the backward pass of an ordinary tensor; its gradient starts as ``factor``, or as 1."""
    usual = (
        _run_backward is not None
        and loss.requires_grad
        and not loss.dim()
        and loss.is_floating_point()
        and not torch._C._is_torch_function_mode_enabled()
        and not torch._C._are_functorch_transforms_active()
    )
    if not usual or _run_backward is None:
        Tensor.backward(loss, None if factor is None else torch.full_like(loss, factor))  # type: ignore[no-untyped-call]
        return
    # What Tensor.backward comes to after a dozen calls.
    start = _start(loss, 1 if factor is None else factor)
    _run_backward((loss,), (start,), False, False, (), allow_unreachable=True, accumulate_grad=True)


_STARTS: dict[tuple[torch.dtype, int], Tensor] = {}
"""The gradients that backward passes on the CPU have started with."""

_MOST_STARTS = 64


def _item_is(tensor: Tensor, number: int) -> bool:
    return tensor.item() == number


_holds_number: Callable[[Tensor, int], bool | None] = direct.look("holds_number") or _item_is
"""Whether a tensor on the CPU is this number, with less of torch's code, or None: ask torch."""


def _start(loss: Tensor, factor: int) -> Tensor:
    """Return the gradient that a backward pass starts with, made once for losses on the CPU."""
    known = _STARTS.get((loss.dtype, factor)) if loss.is_cpu else None
    if known is not None:
        same = _holds_number(known, factor)
        if same or (same is None and _item_is(known, factor)):  # no hook has written into it
            return known
    made = torch.full_like(loss, factor)
    if loss.is_cpu:
        if len(_STARTS) >= _MOST_STARTS:
            _STARTS.clear()
        _STARTS[loss.dtype, factor] = made
    return made


Usual = Callable[[Function, Sequence[Any], "Mapping[str, Any] | None"], Any]

USUAL: dict[Function, Usual] = {}
"""Shortcuts for the most frequent calls, by function; they return None for all other calls."""

_RUN: list[Callable[[Function, Sequence[Any], dict[str, Any]], Any]] = []
"""The function that runs operations on tracked tensors (``rules.run``, which imports this file)."""


def run_by(run: Callable[[Function, Sequence[Any], dict[str, Any]], Any]) -> None:
    """Set the function that runs operations on tracked tensors."""
    _RUN[:] = [run]


def track(tensor: Tensor, state: State) -> TrackedTensor:
    """Return a tracked alias of the tensor: same storage, same place in the autograd graph."""
    if type(tensor) is Tensor:
        if tensor.requires_grad:
            alias = Tensor.as_subclass(tensor, TrackedTensor)
        else:  # the same in a third of the time
            alias = tensor.detach()  # type: ignore[assignment]
            alias.__class__ = TrackedTensor
    else:
        with torch._C.DisableTorchFunctionSubclass():
            alias = Tensor.as_subclass(tensor, TrackedTensor)
    alias._state = state
    if WRITES[0]:
        alias._since = WRITES[0]
    return alias


def retrack(tensor: Tensor, state: State) -> Tensor:
    """Track this object itself, and return it; for new results and targets of writes."""
    if type(tensor) is Tensor:
        tensor.__class__ = TrackedTensor
    tensor._state = state  # type: ignore[attr-defined]
    if WRITES[0]:
        tensor._since = WRITES[0]  # type: ignore[attr-defined]
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


WRITES = [0]
"""The number of writes that have changed whose values a storage holds."""


def writes() -> int:
    """Return how many writes have changed whose values a storage holds."""
    return WRITES[0]


def count_write() -> int:
    """Return the number of a new write that changes whose values a storage holds."""
    WRITES[0] += 1
    return WRITES[0]
