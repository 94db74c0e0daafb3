"""Count what a call really does, operation by operation, while it runs.

    op(...)       executed        where it has a counted kernel: the core's own code on scalars that
                                  count (``counted.tally_of``)
                  as its form     otherwise: the lines of its closed form for this call, each with
                                  its evidence
    torch.x(...)  reference walk  by a table of primitives per element (``_aten.counts_of``)

Every count is booked under the phase of a private step whose mark (``dpkern.base.phase``) is the
innermost one; what no mark claims is ``elsewhere``. Python's own arithmetic on single numbers (a
bound divided by a norm, a learning rate times a correction) is not seen: it is a handful per step,
whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..base import dispatch
from ..base.counts import EXECUTED, WALK, Counts, Item, Itemised
from ..base.phase import CONSTANTS, listening
from ._aten import MODELLED, counts_of, stem
from ._facts import facts_of
from .counted import KERNELS, tally_of
from .forms import FORMS
from .phases import ELSEWHERE, by_phase


@dataclass(frozen=True)
class CountedOp:
    """One operation that was counted.

    Attributes:
        name: name of our op, or of torch's.
        phase: its phase, one of ``PHASES``.
        kind: ``exact``, ``modelled`` or ``random``, as ``Item.kind``.
        counts: its primitives.
        evidence: evidence for the counts, as ``Item.evidence``.
    """

    name: str
    phase: str
    kind: str
    counts: Counts
    evidence: str


@dataclass(frozen=True)
class Execution:
    """The result of a call, and what it took.

    Attributes:
        result: return value of the call.
        calls: every operation, in order.
    """

    result: Any
    calls: tuple[CountedOp, ...]

    @property
    def items(self) -> Itemised:
        """The sums by phase and kind."""
        calls = (
            Item(name=c.phase, kind=c.kind, counts=c.counts, evidence=c.evidence)
            for c in self.calls
        )
        return by_phase(Itemised(tuple(calls)))


def count(call: Callable[[], Any]) -> Execution:
    """Run a call and count all its operations on tensors.

    Args:
        call: function to run, for example ``lambda: (step.add(gradients), step.finish())``. Ops
            with counted kernels run there, on the CPU: slowly. The work of other threads, such as a
            device's backward pass or a ring of noise, is not counted.

    Raises:
        InvalidInput: an operation of torch that the table does not know. Nothing is ever counted
            as zero silently.
    """
    with listening() as running:
        counter = _Counter(running)
        with torch.no_grad(), counter, dispatch.intercepted(counter.op):
            result = call()
    return Execution(result, tuple(counter.calls))


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that sees every operation of torch on this thread; ``op`` sees our own."""

    def __init__(self, running: Callable[[], str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[CountedOp] = []
        self._running = running
        self._inside = False
        self._thread = get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would otherwise load its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        if not self._inside:
            kind = "modelled" if stem(func) in MODELLED else "exact"
            self._book(str(func), kind, counts_of(func, args, given, out), WALK)
        return out

    def op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one of our ops and book what it takes."""
        if get_ident() != self._thread:
            with dispatch.intercepted(None):
                return op(*args, **kwargs)
        with self._within_op():
            if op.name in KERNELS:
                result, tally = tally_of(op, args, kwargs)
                self._book(op.name, "exact", tally.counts, EXECUTED)
                self._book(op.name, "random", tally.random, EXECUTED)
                return result
            given = {name: value for name, value in kwargs.items() if name != "backend"}
            op.validate(*args, **given)
            form = FORMS[op.name](*args, **given, **facts_of(op.name, args, given))
            for item in form.items:
                self._book(op.name, item.kind, item.counts, item.evidence)
            return op(*args, **kwargs)

    def _book(self, name: str, kind: str, counts: Counts, evidence: str) -> None:
        phase = self._running()
        if counts and phase != CONSTANTS:
            self.calls.append(CountedOp(name, phase or ELSEWHERE, kind, counts, evidence))

    @contextmanager
    def _within_op(self) -> Iterator[None]:
        self._inside = True
        try:
            with dispatch.intercepted(None):
                yield
        finally:
            self._inside = False


__all__ = ["CountedOp", "Execution", "count"]
