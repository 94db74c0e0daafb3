"""ParameterTaps of compiled graphs: handed out before a pass, their gradients taken in after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .in_graph import HANDED, TappedUse
from .parameter import differentiable_once
from .uses import CapturedOp

if TYPE_CHECKING:
    from .capture import Capture


class HandedTaps:
    """The taps of one pass, and the uses that took them."""

    def __init__(self, capture: Capture, plan: list[TappedUse]) -> None:
        self.capture = capture
        self.plan = plan
        self.batch = capture.batch or 0
        self.batch_id = capture.batch_number
        self.padded = capture.padded
        self.captured: list[CapturedOp | None] = [None] * len(plan)

    def close(self) -> None:
        """Register the uses whose taps a finished pass has taken."""
        for number, use in enumerate(self.plan):
            use.source.tapped.clear()
            if not use.is_open:
                self.use(number)
            use.is_open = False
            delattr(HANDED, use.place)

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
        for use in handed.plan:
            rows = handed.batch * use.fold
            for tail, dtype in use.tap_tails:
                zero = torch.zeros((), dtype=dtype, device=use.device)
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
            given = gradients[last : last + len(use.tap_tails)]
            if all(gradient is not None for gradient in given):
                use.operation.deliver(handed.use(number), use, *given)
            else:
                assert all(gradient is None for gradient in given)
        return None, None
