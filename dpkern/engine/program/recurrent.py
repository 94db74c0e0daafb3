"""Replay recurrent layers, one site per layer and direction.

A layer runs forwards and backwards as on the recorded path (``layers.fused_recurrent``); a site
takes the place of the registered use and keeps the gradients of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...ops import clip
from ..layers import fused_recurrent as recorded
from ..parameter import REPLAYED, without_torch_function
from ..per_sample_gradients import PerSampleGradients
from ..uses import CapturedOp
from .facts import UseFacts
from .run import ReplayRun, next_site
from .site import NotReplayed, Part, UseSite, kind
from .unchanged import Unchanged

if TYPE_CHECKING:
    from .arithmetic import Add
    from .flat import Flat

_CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_task = torch._C._current_graph_task_id


@kind
class RecurrentSite(UseSite):
    """Layer in one direction, with two trained weights, and two trained biases or none."""

    operations = (*_CELLS, *(f"{cell} backwards" for cell in _CELLS))

    def __init__(self, facts: UseFacts, kept: Sequence[bool]) -> None:
        slots = [slot for slot in facts.slots if slot is not None]
        if len(slots) not in (2, 4) or None in facts.slots[:2]:
            raise NotReplayed(f"{facts.operation} trains some of its weights")
        if facts.fold != 1:
            raise NotReplayed(f"{facts.operation} sees several rows of each sample")
        self.facts, self.kept, self.index, self.batch = facts, any(kept), 0, 0
        self.kept_weights = kept[:2]
        self.dtype, self.differentiable, self.shape = facts.dtype, facts.differentiable, ()
        self.weight, self.bias, self.bias_part = slots[0].used, None, None
        self.used = [None if slot is None else slot.used for slot in facts.slots]
        self.unchanged = Unchanged([slot.used for slot in slots])
        with without_torch_function():
            dtypes = {slot.used.dtype for slot in slots}
            self.gradient_dtype = slots[0].used.dtype
        if dtypes != {facts.dtype} or clip.sum_dtype(facts.dtype) is not facts.dtype:
            raise NotReplayed(f"{facts.operation} has weights and inputs of several dtypes")
        self.parts = [
            Part(slot, self, explicit=number > 1, normed=number < 2)
            for number, slot in enumerate(slots)
        ]
        self.weight_part = self.parts[0]

    @property
    def weight_kind(self) -> tuple[bool, bool]:
        return False, True

    def place(self, flat: Flat) -> None:
        self.flat = flat
        self.apart = len(flat.groups) > 1
        """Whether each weight has a norm of its own, because they may be in different groups."""

    def resize(self, flat: Flat, batch: int) -> None:
        super().resize(flat, batch)
        self.bias_rows = [flat.memory.rows(part.rows, batch) for part in self.parts[2:]]

    def trains(self, weights: recorded.Weights) -> bool:
        """Whether these are the weights, and what is not trained needs no gradient."""
        return all(
            given is used or (used is None and given is not None and not given.requires_grad)
            for given, used in zip(weights, self.used, strict=True)
        )

    def take(self, run: ReplayRun, x: Tensor, before: Tensor, made: recorded.Backward) -> None:
        """Take the gradients of a backward pass, and the norms of the weights'."""
        operands, joint = recorded.gradients_of(self.batch, x, before, made)
        records: list[PerSampleGradients] = [
            record.materialize() if kept else record
            for record, kept in zip(operands, self.kept_weights, strict=True)
        ]
        squares_of = self.flat.arithmetic.squares
        if joint is None or self.kept or self.apart:
            squares, joint = [squares_of(record) for record in records], None
        else:
            squares = [squares_of(joint())]
            squares.append(torch.zeros_like(squares[0]))
        for part, square in zip(self.parts, squares, strict=False):
            self.flat.calls.set_square(part.square, square.data_ptr())
        for rows, sums in zip(self.bias_rows, (made.sums_d, made.sums_e), strict=False):
            rows.copy_(sums)
        versions = x._version, made.d._version
        run.held[self.index] = (x, made.d, *versions, records, joint, squares)
        run.order.append(self.index)

    sums_alone = True

    def add_sum(self, add: Add, part: Part, factors: Tensor, held: Any, place: Tensor) -> None:
        add(held[4][self.parts.index(part)], factors, place)

    def deliver(self, use: CapturedOp, held: Any) -> None:
        recorded.arrive(use, held[4], held[5], [rows.clone() for rows in self.bias_rows])


class ReplayedUse:
    """A site of the current run, in the place of the use that the recorded path registers."""

    passes_on = True

    def __init__(self, run: ReplayRun, site: RecurrentSite) -> None:
        self.run, self.site = run, site

    def take(self, x: Tensor, before: Tensor, made: recorded.Backward) -> None:
        """Take the gradients of a backward pass, or pass them to the recorded path."""
        run, site, d = self.run, self.site, made.d
        use: Any = run.task == _task() or run.enters(site, d)
        if use is True:
            if run.held[site.index] is None and d.dtype is site.gradient_dtype:
                with without_torch_function():
                    site.take(run, x, before, made)
                return
            use = run.repeated(site)
        if use is not False:
            recorded.deliver(use, x, before, made)


def _next_use(operation: str, x: Tensor, weights: recorded.Weights) -> ReplayedUse | None:
    """Return the next use of the run if it is this one, else None."""
    found = next_site(weights[0], None, x, RecurrentSite)
    if found is None:
        return None
    run, site = found
    if site.facts.operation != operation or not site.trains(weights):
        run.cursor -= 1
        return None
    return ReplayedUse(run, site)


REPLAYED[recorded.run] = _next_use
