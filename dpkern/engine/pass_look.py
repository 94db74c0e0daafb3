"""Look before and after most passes whether anything has changed, in one call each.

The state guard and the occasions for a probe decide what a change means. Where nothing has changed
there is nothing to decide, which this look finds out with less work than theirs. It exists only
where C++ sees tables and tensors (``csrc/bindings/pass_look.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..ops import direct
from .parameter import without_torch_function
from .state import Left, Marks, StateGuard
from .table_entries import TableEntries

if TYPE_CHECKING:
    from .occasions import Occasions

_MAKE = direct.look("PassLook")
_TRAINED, _VERSION = Tensor.requires_grad, Tensor._version

Flags = tuple[list[Tensor], list[bool]]


class PassLook:
    """Everything that the guards compare around a pass, as it is when this is made.

    Args:
        everywhere: the tables of all modules and plain objects that they hold.
        flags: the parameters, and whether each is trained.
        left: what a pass has left in the module's tensors (``StateGuard.marks_left``).
    """

    def __init__(self, everywhere: TableEntries, flags: Flags, left: Left) -> None:
        tables, tensors, steady, (self._ids, versions) = left
        look: Any = _MAKE(  # type: ignore[misc]
            *(everywhere.tables, everywhere.entries, *flags),
            *(tables.tables, tables.entries, tensors, steady, versions, _TRAINED, _VERSION),
            without_torch_function,
        )
        self.before: Callable[[], bool] = look.before
        """Whether all is as the last pass has left it, trained parameters' values aside."""
        self.after: Callable[[], bool] = look.after
        """Whether the pass that ends has left all tensors as they were."""
        self._versions: Callable[[], list[int]] = look.versions

    def marks(self) -> Marks:
        """Return the marks of all tensors that ``before`` has seen last."""
        return self._ids, self._versions()


def pass_look(occasions: Occasions, state: StateGuard) -> PassLook | None:
    """Return a look that expects what the last pass has found and left; None if it cannot tell."""
    everywhere, left = occasions.seen_entries, state.marks_left
    if _MAKE is None or everywhere is None or left is None:
        return None
    if -1 in left[3][1]:  # tensors of inference mode have no version
        return None
    return PassLook(everywhere, occasions.trained_flags, left)
