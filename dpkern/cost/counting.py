"""Counting what a call really does: our ops by their counted kernels, torch between by a table.

    with the call running:  op(...)      -> counted.tally_of: the core's own code on counted numbers
                            torch.x(...) -> _aten.counts_of:  primitives per element

Every count is booked under the phase of a private step whose mark (``dpkern._phase``) is the
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

from .. import _dispatch
from .._phase import CONSTANTS, listening
from ._aten import MODELLED, counts_of, stem
from .counted import tally_of
from .forms import FORMS
from .phases import ELSEWHERE, by_phase
from .primitives import Counts, Item, Itemised


@dataclass(frozen=True)
class Call:
    """One operation that was counted.

    Attributes:
        name: of our op, or torch's.
        phase: which one of ``PHASES`` it belongs to.
        kind: ``exact``, ``modelled`` or ``random``, as ``Item.kind``.
        counts: its primitives.
    """

    name: str
    phase: str
    kind: str
    counts: Counts


@dataclass(frozen=True)
class Execution:
    """What a call returned, and what it took.

    Attributes:
        result: of the call.
        calls: every operation, in order.
    """

    result: Any
    calls: tuple[Call, ...]

    @property
    def items(self) -> Itemised:
        """The sums by phase and kind."""
        calls = (Item(name=c.phase, kind=c.kind, counts=c.counts) for c in self.calls)
        return by_phase(Itemised(tuple(calls)))


def count(call: Callable[[], Any]) -> Execution:
    """Run a call and count all its operations on tensors.

    Args:
        call: what to run, for example ``lambda: (step.add(gradients), step.finish())``. Its ops run
            as counted kernels on the CPU: slowly. What other threads do, such as a device's
            backward pass or a ring of noise, is not counted.

    Raises:
        InvalidInput: an op without a counted kernel, or an operation of torch that the table does
            not know. Nothing is ever counted as zero silently.
    """
    with listening() as running:
        counter = _Counter(running)
        with torch.no_grad(), counter, _dispatch.intercepted(counter.op):
            result = call()
    return Execution(result, tuple(counter.calls))


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of torch on this thread; ``op`` sees our own."""

    def __init__(self, running: Callable[[], str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._running = running
        self._inside = False
        self._thread = get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would load its compiler for that, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        if not self._inside:
            counts = counts_of(func, args, given, out)
            if counts:
                kind = "modelled" if stem(func) in MODELLED else "exact"
                self._book(str(func), kind, counts)
        return out

    def op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one of our ops by its counted kernel; a library's part in it comes from its form."""
        if get_ident() != self._thread:
            with _dispatch.intercepted(None):
                return op(*args, **kwargs)
        with self._within_op():
            result, tally = tally_of(op, args, kwargs)
            modelled = tally.modelled or FORMS[op.name](*args, **kwargs).of("modelled")
        found = {"exact": tally.counts, "modelled": modelled, "random": tally.random}
        for kind, counts in found.items():
            if counts:
                self._book(op.name, kind, counts)
        return result

    def _book(self, name: str, kind: str, counts: Counts) -> None:
        phase = self._running()
        if phase != CONSTANTS:
            self.calls.append(Call(name, phase or ELSEWHERE, kind, counts))

    @contextmanager
    def _within_op(self) -> Iterator[None]:
        self._inside = True
        try:
            with _dispatch.intercepted(None):
                yield
        finally:
            self._inside = False


__all__ = ["Call", "Execution", "count"]
