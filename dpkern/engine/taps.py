"""Taps of compiled graphs: handed out before a pass, their gradients taken in after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .in_graph import HANDED, TappedUse
from .parameter import differentiable_once
from .program.site import OperandSite
from .uses import CapturedOp

if TYPE_CHECKING:
    from .capture import Capture
    from .program.run import ReplayRun


class HandedTaps:
    """The taps of one pass, and the uses that took them.

    Attributes:
        inside: number of uses whose taps were taken.
    """

    def __init__(self, capture: Capture, plan: list[TappedUse]) -> None:
        self.capture = capture
        self.plan = plan
        self.batch = capture.batch or 0
        self.batch_id = capture.batch_number
        self.padded = capture.padded
        self.captured: list[CapturedOp | None] = [None] * len(plan)
        self.inside = 0
        self._run: ReplayRun | None = None
        self._sites: dict[int, int] = {}
        """The sites of the uses in the run, by their place in the plan."""

    def close(self) -> None:
        """Register the uses whose taps a finished pass has taken, unless they are replayed."""
        taken = [number for number, use in enumerate(self.plan) if not use.is_open]
        for use in self.plan:
            use.source.tapped.clear()
            use.is_open = False
            delattr(HANDED, use.place)
        self.inside = len(taken)
        run = self._run = (
            self.capture.program.meet([self.plan[n] for n in taken]) if taken else None
        )
        if run is not None:
            first = len(run.sites) - len(taken)
            self._sites = {number: first + place for place, number in enumerate(taken)}
            return
        for number in taken:
            self.capture.program.note_in_graph(self.use(number), self.plan[number])

    def deliver(self, number: int, *gradients: Tensor) -> None:
        """Hand the gradients of a use's taps to its site in the run, or to the capture."""
        use = self.plan[number]
        if self._run is None:
            use.operation.deliver(self.use(number), use, *gradients)
            return
        site = self._run.sites[self._sites[number]]
        assert isinstance(site, OperandSite)
        if use.operation.check is not None:
            use.operation.check(use, gradients[0])
        site.arrive(self._run, gradients[0], gradients[-1])

    def use(self, number: int) -> CapturedOp:
        """Return the use that took these taps, as an uncompiled one would have registered it."""
        captured = self.captured[number]
        if captured is None:
            use, capture = self.plan[number], self.capture
            targets = tuple(t if t and t.source.watched else None for t in use.targets)
            captured = self.captured[number] = CapturedOp(
                capture,
                use.name,
                targets,
                self.batch_id,
                self.batch,
                use.key,
                use.saved,
                padded=self.padded,
            )
            rows = self.batch * use.fold
            size = rows * use.dtype.itemsize * torch.Size(use.tail).numel()
            capture.budget.activations += size
            capture.recorded = True
            for target in targets:
                if target is not None:
                    target.source.uses += 1
        return captured


class ParameterTaps(torch.autograd.Function):
    """Zeros whose gradients come out of compiled graphs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, handed: HandedTaps) -> tuple[Tensor, ...]:
        ctx.handed = handed
        ctx.set_materialize_grads(False)
        taps = []
        zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for use in handed.plan:
            rows = handed.batch * use.fold
            for tail, dtype in use.tap_tails:
                zero = zeros.get((dtype, use.device))
                if zero is None:
                    zero = torch.zeros((), dtype=dtype, device=use.device)
                    zeros[dtype, use.device] = zero
                taps.append(zero.expand(rows, *tail))
        return tuple(taps)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        handed: HandedTaps = ctx.handed
        last = len(gradients)
        for number in range(len(handed.plan) - 1, -1, -1):
            use = handed.plan[number]
            last -= len(use.tap_tails)
            count = len(use.tap_tails)
            given = [g for g in gradients[last : last + count] if g is not None]
            assert len(given) in (0, count)
            if given:
                handed.deliver(number, *given)
        return None, None
