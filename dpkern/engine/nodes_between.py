"""Count the autograd nodes that the loop's own operations make between two captured uses.

A probe has seen where the rows of each use come from. A module that sorts some batches and leaves
others has other operations between its uses: the count tells it, at the price of one number a use.
Operations on constants, such as the inputs themselves, make no nodes and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..ops import direct

_made = torch._C._autograd._get_sequence_nr
"""Number of nodes that this thread has made so far."""


_NONE = -1


class NodesBetween:
    """Counter of the nodes between captured uses, in whatever module.

    Attributes:
        pending: number of nodes between the last captured operation and the one that runs; 0 after
            its first use, since what it makes itself does not count.
    """

    __slots__ = ("_depth", "_entered", "_left", "_wasted", "pending")

    def __init__(self) -> None:
        self._left = _NONE
        self._depth = 0
        self._entered = self._wasted = 0
        self.pending = 0

    def begin(self) -> None:
        """Begin a forward pass: in front of its first use stand other samples' nodes."""
        self._left, self._wasted = _NONE, 0

    def enter(self) -> None:
        """Begin an operation that is replayed; ``leave`` ends it, or ``give_up``."""
        if not self._depth:
            self._entered = _made()
            since = self._entered - self._left - self._wasted
            self.pending = 0 if self._left == _NONE else since

    def give_up(self) -> None:
        """Forget what a replay has made that came to nothing: the operation runs another way."""
        if not self._depth:
            self._wasted += _made() - self._entered

    def leave(self) -> None:
        """End an operation: what follows is counted."""
        self._left, self._wasted = _made(), 0

    def counted(self, replay: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation as ``replay`` does, which returns None if it came to nothing."""
        self.enter()
        result = replay(args, kwargs)
        if result is not None:
            self.leave()
        else:
            self.give_up()
        return result

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Run an operation, which may be written with others that are captured."""
        self.enter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.leave()

    def kinds(self, x: Tensor) -> tuple[type[Any], ...]:
        """Return the kinds of these nodes on the way back from an operand, first operands first.

        An operation may stand in another's place: as many nodes are not the same nodes.
        """
        found: list[type[Any]] = []
        node: Any = x.grad_fn if self.pending else None
        while node is not None and len(found) < self.pending:
            number = node._sequence_nr()
            if number < self._left:
                break
            if number < self._entered:  # not made by the operation itself
                found.append(type(node))
            following = node.next_functions
            node = following[0][0] if following else None
        return tuple(found)

    def take(self) -> int:
        """Return the number of nodes in front of a use, and count no more of them."""
        found, self.pending = self.pending, 0
        return found


nodes_between = NodesBetween()
"""Counter of this process: one thread runs forward passes."""

_count = direct.look("count_nodes")
counted: Callable[..., Any] = (
    nodes_between.counted if _count is None else _count(nodes_between, _made)
)
"""``nodes_between.counted``, in C++ where there is a compiled module."""
