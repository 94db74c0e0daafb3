"""Handle operations that bypass the states: shared memory, hooks and decisions.

NumPy arrays, DLPack capsules and storages of tracked tensors are copies, so that writes into them
do not reach the tensor. A hook that changes gradients must treat rows separately, which is tested
on other rows. A decision on several samples at once cannot be tracked; it becomes a condition of
the certificate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UnsupportedModule
from .rules import TrackedCall, action, note_read
from .states import Mixed, PerRecord, RecordSum, State
from .statistic import DECIDED
from .tensor import TrackedTensor, state_of


@action("numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "_typed_storage")
def copied(call: TrackedCall) -> Any:
    """Return the values in memory of their own."""
    if call.states:
        note_read(call.states[0])
    args = [a.clone() if type(a) is TrackedTensor else a for a in call.args]
    return call.func(*args, **call.kwargs)


@action("__bool__", "is_nonzero")
def decided(call: TrackedCall) -> Any:
    """Return the truth value; for a mixed tensor, record the condition ``DECIDED``."""
    state = state_of(call.args[0])
    boundary = None if state is None or state.batch is None else state.batch.boundary
    if isinstance(state, Mixed) and boundary is not None and torch.is_grad_enabled():
        boundary.assume(DECIDED)
    return call.plain()


@action("register_hook")
def hooked(call: TrackedCall) -> Any:
    """Register the hook, whose results must depend on each row's own gradient."""
    x, hook = call.args
    state = state_of(x)
    boundary = None if state is None or state.batch is None else state.batch.boundary
    if boundary is not None:
        boundary.constants.note_read(None)  # it reads what it likes, of ordinary tensors
    return call.func(x, RowwiseHook(hook, state))


class RowwiseHook:
    """A gradient hook that is tested on other rows whenever it changes a gradient.

    Args:
        hook: the user's hook.
        state: state of the tensor whose gradient it sees.
    """

    def __init__(self, hook: Callable[[Tensor], Tensor | None], state: State | None) -> None:
        self.hook = hook
        self.state = state

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """Return the hook's result.

        Raises:
            UnsupportedModule: a row of it depends on other rows, or there are none.
        """
        result = self.hook(gradient)
        if result is None:
            return None
        state = self.state
        has_rows = isinstance(state, PerRecord) and state.dim == 0
        mixes = isinstance(state_of(result), (Mixed, RecordSum))  # by what else the hook has seen
        if has_rows and not mixes and result.shape == gradient.shape:
            assert isinstance(state, PerRecord)
            if all(self._keeps(gradient, result, rows) for rows in _halves(state)):
                return result
        raise UnsupportedModule(
            "register_hook",
            expected="a gradient hook that changes each sample's gradient by itself",
            got="one whose result for a sample depends on others",
            remedy="Scale each row by its own norm or a constant; every sample is clipped anyway.",
        )

    def _keeps(self, gradient: Tensor, result: Tensor, changed: Tensor) -> bool:
        """Whether other rows come out the same after these were changed."""
        rows = changed.to(gradient.device)
        other = gradient.clone()
        other[rows] = -3 * other[rows]
        again = self.hook(other)
        return again is not None and torch.equal(
            again[~rows].nan_to_num(), result[~rows].nan_to_num()
        )


def _halves(state: PerRecord) -> tuple[Tensor, Tensor]:
    """Return masks of two sets of rows that share no record."""
    low = torch.from_numpy(state.ids) < (int(state.ids.max(initial=0)) + 1) // 2
    return low, ~low
