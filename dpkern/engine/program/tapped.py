"""Replay the scales and shifts of compiled graphs, whose taps get per-sample gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...ops.clip import sum_dtype
from ..layers import norm as recorded
from ..per_sample_gradients import ExplicitGradients, PerSampleGradients
from ..uses import CapturedOp
from .run import ReplayRun
from .site import OperandSite, Part, kind

if TYPE_CHECKING:
    from .flat import Flat


@kind
class RowsSite(OperandSite):
    """Scale, or scale and shift, with one copy for each row, whose gradients the graph makes.

    They stand in the place of operand and output gradient, the scale's alone in both places.
    """

    operations = (
        *("layer_norm", "group_norm"),
        *("add", "sub", "mul", "div", "truediv", "radd", "rmul"),
    )
    places = (True,)
    joined_as = "rows"

    @property
    def weight_kind(self) -> tuple[bool, bool]:
        return True, False

    def place(self, flat: Flat) -> None:
        self.flat = flat

    def expects(self, x: Tensor, g: Tensor) -> bool:
        return x.dtype is g.dtype is self.gradient_dtype

    def take(self, run: ReplayRun, x: Tensor, g: Tensor) -> None:
        rows = [self._each(x), self._each(g)][: len(self.parts)]
        for part, mine in zip(self.parts, rows, strict=True):
            if not part.joined:
                self.flat.calls.set_rows(part.place, mine.data_ptr())
        scale, shift = rows[0], rows[-1]
        run.held[self.index] = (scale, shift, scale._version, shift._version)
        run.order.append(self.index)

    def _each(self, rows: Tensor) -> Tensor:
        """Return gradients by sample, which may have several rows."""
        each = rows.reshape(self.batch, self.facts.fold, -1)
        return (each[:, 0] if self.facts.fold == 1 else each.sum(1)).contiguous()

    def record(self, use: CapturedOp, x: Tensor, g: Tensor) -> None:
        rows = [t.to(sum_dtype(t.dtype)).flatten(1) for t in (x, g)]
        recorded._deliver(use, self.weight_part.slot.shape, *rows[: len(self.parts)])

    def gradients(self, part: Part, held: Any) -> PerSampleGradients:
        rows = held[1 if part is self.bias_part else 0]
        return ExplicitGradients(rows.view(-1, *part.slot.shape))

    def deliver(self, use: CapturedOp, held: Any) -> None:
        recorded._deliver(use, self.weight_part.slot.shape, *held[: len(self.parts)])


__all__ = ["RowsSite"]
