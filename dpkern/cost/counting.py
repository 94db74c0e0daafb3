"""Counting what a call really does: our ops by their counted kernels, torch between by a table.

    with the call running:  op(...)      -> counted.tally_of: the core's own code on counted numbers
                            torch.x(...) -> _aten.counts_of:  primitives per element

Every count is booked under the phase of a private step that it belongs to, found from the functions
of dpkern that are running. Python's own arithmetic on single numbers (a bound divided by a norm, a
learning rate times a correction) is not seen: it is a handful per step, whatever the sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _dispatch
from ._aten import MODELLED, counts_of, stem
from .counted import tally_of
from .forms import FORMS
from .phases import (
    BACK,
    CLIP,
    ELSEWHERE,
    IMPORTANCE,
    LEARN,
    MAP,
    NOISE,
    PROJECT,
    UPDATE,
    by_phase,
)
from .primitives import Counts, Item, Itemised

_WHOLE = {
    "weigh": IMPORTANCE,
    "DPStep._replan": LEARN,
    "RandomizedResponse.estimate": LEARN,
    **dict.fromkeys(("AdaClip.learn", "Directional.learn", "Pruned.learn"), LEARN),
}
"""Functions of which everything belongs to one phase, ops included; the outermost counts."""

_WITHIN = {
    **dict.fromkeys(("accumulators", "adopted", "_clipped_by_group", "common_dtype"), CLIP),
    **dict.fromkeys(("clipped", "DPStep._join", "_check_finite"), CLIP),
    **dict.fromkeys(("clipped_sums", "GroupSums.finish", "GroupSums.result"), CLIP),
    **dict.fromkeys(("Spectrum.square", "_combined", "_zeros", "count"), CLIP),
    **dict.fromkeys(("_centred", "signals", "Diagonal.forward", "Crop.forward"), MAP),
    **dict.fromkeys(("Open.forward", "Kept.forward", "Largest.noised"), MAP),
    **dict.fromkeys(("DPStep._samples", "Open.noised"), NOISE),
    **dict.fromkeys(("Diagonal.back", "Crop.back", "Open.back", "Kept.back"), BACK),
    **dict.fromkeys(("gradient", "step_group", "DPStep.finish"), UPDATE),
}
"""Functions whose torch operations belong to a phase; the innermost counts."""

_OPS = {"update.step": UPDATE, "update.project": PROJECT}
"""The phase of an op, wherever it is called."""

_CONSTANTS = frozenset({"kept_bins", "half_gains"})
"""Functions that make a table once for a configuration and keep it: constants are free."""

_STEMS = {
    **dict.fromkeys(("clip", "ghost", "spectral"), CLIP),
    **dict.fromkeys(("coef", "noise", "symbols"), NOISE),
}
"""The phase of the other ops by their stem, unless a whole function says otherwise."""

_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Call:
    """One operation that was counted.

    Attributes:
        name: of our op, or torch's.
        phase: which one of ``PHASES`` it belongs to.
        kind: ``exact``, ``modelled`` or ``random``, as ``Item.kind``.
        counts: its primitives.
        place: the function of dpkern that called it.
    """

    name: str
    phase: str
    kind: str
    counts: Counts
    place: str


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
    counter = _Counter()
    with torch.no_grad(), counter, _dispatch.intercepted(counter.op):
        result = call()
    return Execution(result, tuple(counter.calls))


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of torch on this thread; ``op`` sees our own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
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
                self._book(str(func), None, kind, counts)
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
                self._book(op.name, _phase(op.name), kind, counts)
        return result

    def _book(self, name: str, known: str | None, kind: str, counts: Counts) -> None:
        names = list(_running(sys._getframe(2)))
        if not _CONSTANTS.isdisjoint(names):
            return
        whole = [_WHOLE[n] for n in names if n in _WHOLE]
        within = [_WITHIN[n] for n in names if n in _WITHIN]
        phase = whole[-1] if whole else known or (within[0] if within else ELSEWHERE)
        self.calls.append(Call(name, phase, kind, counts, names[0] if names else ""))

    @contextmanager
    def _within_op(self) -> Iterator[None]:
        self._inside = True
        try:
            with _dispatch.intercepted(None):
                yield
        finally:
            self._inside = False


def _phase(op: str) -> str | None:
    return _OPS.get(op, _STEMS.get(op.split(".")[0]))


def _running(frame: FrameType | None) -> Iterator[str]:
    """Functions of dpkern that are running, the innermost first, without comprehensions' names."""
    while frame is not None:
        code = frame.f_code
        inside = code.co_filename.startswith(_PACKAGE)
        if inside and code.co_filename not in (__file__, _dispatch.__file__):
            yield code.co_qualname.split(".<locals>")[0]
        frame = frame.f_back


__all__ = ["Call", "Execution", "count"]
