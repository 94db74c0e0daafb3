"""``F.linear`` with a private weight, replayed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import direct
from ..layers import linear as recorded
from ..layers.expression import is_buffer
from ..parameter import REPLAYED, fresh, refuse_double_backward
from ..per_sample_gradients import ExplicitGradients
from ..uses import CapturedOp
from .facts import UseFacts
from .run import ReplayRun, next_site
from .site import NotReplayed, UseSite, address, apply_of, kind

if TYPE_CHECKING:
    from .flat import Flat

_differentiable = torch.is_grad_enabled
_task = torch._C._current_graph_task_id
_empty = torch.empty
_matmul = torch.matmul
_AUTO = 0
"""The code of the route ``auto``."""


@kind
class LinearSite(UseSite):
    """``x [k B, ..., d] -> [k B, ..., p]``: ``T`` positions of each sample."""

    operations = ("linear",)

    def __init__(self, facts: UseFacts, kept: Sequence[bool]) -> None:
        super().__init__(facts, kept)
        if self.plain_weight.dim() != 2:
            raise NotReplayed(f"{facts.operation} takes its weight in another shape")
        self.outputs, self.inputs = self.plain_weight.shape
        self.positions = facts.fold * math.prod(facts.tail[:-1])
        if not self.positions or facts.tail[-1:] != (self.inputs,):
            raise NotReplayed("linear has no positions")
        self.product = direct.kernel("matmul", self.dtype)
        self.norm = direct.kernel("linear_norm", self.dtype)
        self.gradient = direct.kernel("linear_gradient", self.dtype)
        self.sum = direct.kernel("linear_sum", self.dtype)
        self.turned = self.plain_weight.t()
        self.weight_address = address(self.plain_weight)
        self.bias_address = address(self.plain_bias)

    @property
    def weight_kind(self) -> tuple[bool, bool]:
        return self.kept, True

    def place(self, flat: Flat) -> None:
        self.flat = flat
        self.square = flat.memory.square_address(self.weight_part.square)
        if self.kept:
            self.rows = flat.memory.rows_address(self.weight_part.rows)

    def resize(self, flat: Flat, batch: int) -> None:
        super().resize(flat, batch)
        self.out_shape = (*self.shape[:-1], self.outputs)
        self.sizes = (math.prod(self.shape[:-1]), self.inputs, self.outputs)
        self.record_sizes = (batch, self.positions, self.inputs, self.outputs)
        if self.bias_part is not None and self.positions > 1:
            self.bias_rows = flat.memory.rows(self.bias_part.rows, batch)
            self.bias_shape = (batch, self.positions, self.outputs)

    def admits(self, x: Tensor) -> bool:
        return self.differentiable or not is_buffer(x, self.weight)

    def take(self, run: ReplayRun, x: Tensor, g: Tensor) -> None:
        """Take the norm of an arriving gradient, and hold what the sum needs."""
        if not x.is_contiguous():
            x = x.contiguous()
        if not g.is_contiguous():
            g = g.contiguous()
        a, b = x.data_ptr(), g.data_ptr()
        if self.kept:
            self.gradient(a, b, self.rows, self.square, *self.record_sizes, run.threads)
        else:
            self.norm(a, b, _AUTO, self.square, *self.record_sizes, run.threads)
        if self.bias_part is not None:
            if self.positions > 1:
                torch.sum(g.view(self.bias_shape), 1, out=self.bias_rows)
            else:
                self.flat.explicit[self.bias_part.place] = b
        run.held[self.index] = () if self.kept else (x, g, x._version, g._version)
        run.order.append(self.index)

    def add_sum(self, run: ReplayRun, held: Any, out: int, place: Tensor) -> None:
        x, g = held[:2]
        sizes = self.record_sizes
        self.sum(x.data_ptr(), g.data_ptr(), run.factors_address, out, *sizes, run.threads)

    def deliver(self, use: CapturedOp, held: Any) -> None:
        if not self.kept:
            recorded._arrive(use, held[0], held[1])
            return
        memory = self.flat.memory
        squares = memory.squares(self.weight_part.square, use.batch).clone()
        use.arrive(
            0, ExplicitGradients(memory.rows(self.weight_part.rows, use.batch).clone(), squares)
        )
        if self.bias_part is not None:
            use.arrive(1, ExplicitGradients(self.bias_rows.clone()))


class _ReplayedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: ReplayRun, site: LinearSite, x: Tensor) -> Tensor:
        ctx.run, ctx.site = run, site
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, site.plain_weight)
        if not x.is_contiguous():
            return fresh(F.linear(x, site.plain_weight, site.plain_bias))
        if run.own_products:
            out = _empty(site.out_shape, dtype=site.dtype)
            weight, bias = site.weight_address, site.bias_address
            site.product(x.data_ptr(), weight, True, bias, out.data_ptr(), *site.sizes, run.threads)
            return out
        if len(site.shape) == 2 or site.plain_bias is None:
            return fresh(F.linear(x, site.plain_weight, site.plain_bias))
        rows, inputs, _ = site.sizes
        out = torch.addmm(site.plain_bias, x.view(rows, inputs), site.turned)
        out.resize_(site.out_shape)  # no view, which in-place activations would refuse
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if g is None:
            return None, None, None, None
        if _differentiable():
            refuse_double_backward()
        run: ReplayRun = ctx.run
        site: LinearSite = ctx.site
        use: Any = run.task == _task() or run.enters(site, g)
        if use is True:
            use = run.repeats(site, g)
            if use is False:
                site.take(run, x, g)
        if use is not False:
            recorded._arrive(use, x, g)
        if not ctx.needs_input_grad[3]:
            return None, None, None, None
        if not run.live or not g.is_contiguous():
            return None, None, None, recorded._product(g, weight.to(g.dtype)).to(x.dtype)
        if run.own_products:
            gx = _empty(site.shape, dtype=site.dtype)
            rows, inputs, outputs = site.sizes
            site.product(
                *(g.data_ptr(), site.weight_address, False, 0, gx.data_ptr()),
                *(rows, outputs, inputs, run.threads),
            )
            return None, None, None, gx
        return None, None, None, _matmul(g, weight)


_apply = apply_of(_ReplayedLinear)


def linear(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``F.linear(x, weight, bias)``; None if it is not the next use."""
    count = len(args)
    if count < 2 or kwargs:
        return None
    found = next_site(args[1], args[2] if count > 2 else None, args[0], LinearSite)
    if found is None:
        return None
    run, site = found
    return _apply(run.program.capture.anchor, run, site, args[0])


REPLAYED[F.linear] = linear
