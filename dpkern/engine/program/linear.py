"""Replay ``F.linear`` with a private weight."""

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
from ..per_sample_gradients import ExplicitGradients, LinearGradients, PerSampleGradients
from ..uses import CapturedOp
from .facts import UseFacts
from .quick import compiled_use, quick, quick_backward
from .run import ReplayRun, next_site
from .site import (
    NotReplayed,
    OperandSite,
    Part,
    address,
    apply_of,
    kind,
    skip_frames,
    written_since,
)

if TYPE_CHECKING:
    from .flat import Flat

_differentiable = torch.is_grad_enabled
_empty = torch.empty
_mm = torch.mm


@kind
class LinearSite(OperandSite):
    """Linear map ``x [k B, ..., d] -> [k B, ..., p]``, with ``T`` positions per sample."""

    operations = ("linear",)
    places = (False, True)
    joined_as = "operands"

    def __init__(self, facts: UseFacts, kept: Sequence[bool]) -> None:
        super().__init__(facts, kept)
        if self.plain_weight.dim() != 2:
            raise NotReplayed(f"{facts.operation} takes its weight in another shape")
        self.outputs, self.inputs = self.plain_weight.shape
        self.positions = facts.fold * math.prod(facts.tail[:-1])
        if not self.positions or facts.tail[-1:] != (self.inputs,):
            raise NotReplayed("linear has no positions")
        if self.kept and self.positions == 1:
            raise NotReplayed("gradients of one position are kept")
        self.integer_operands = direct.rounds_operands(self.positions, self.inputs, self.outputs)
        self.product = direct.kernel("matmul", self.dtype)
        self.weights = self.plain_weight.numel()
        self.sum_positions = direct.kernel("sum_positions", self.dtype)
        self.turned = self.plain_weight.t()
        self.weight_address = address(self.plain_weight)

    @property
    def weight_kind(self) -> tuple[bool, bool]:
        return self.kept, True

    def place(self, flat: Flat) -> None:
        self.flat, memory = flat, flat.memory
        if self.weight_part.joined:
            return
        bias = self._own_bias
        flat.calls.set_layer(
            *(self.index, self.positions, self.inputs, self.outputs),
            memory.square_address(self.weight_part.square),
            memory.rows_address(self.weight_part.rows) if self.kept else 0,
            memory.rows_address(bias.rows) if bias is not None and self.positions > 1 else 0,
            bias.place if bias is not None and self.positions == 1 else -1,
            flat.group_of[self.weight_part.slot.index],
            flat.starts[self.weight_part.slot.index],
            self.integer_operands,
        )
        self.take_norm = flat.calls.take
        self.compile()

    def in_cpp(self) -> Any:
        if self.weight_part.joined or self._own_bias is not self.bias_part:
            return None  # weight or bias have other uses
        return compiled_use(
            *(self, _apply),
            kind="linear",
            outputs=self.outputs,
            kept=self.kept,
            weight_address=self.weight_address,
            plain_bias=self.plain_bias,
            bias_address=address(self.plain_bias),
            turned=self.turned,
            calls=self.flat.calls,
        )

    @property
    def _own_bias(self) -> Part | None:
        """The part of a bias that no other use shares."""
        bias = self.bias_part
        return None if bias is None or bias.joined else bias

    def resize(self, flat: Flat, batch: int) -> None:
        super().resize(flat, batch)
        self.out_shape = (*self.shape[:-1], self.outputs)
        self.sizes = (math.prod(self.shape[:-1]), self.inputs, self.outputs)
        self.in_positions = (batch, self.positions, self.inputs)
        self.out_positions = (batch, self.positions, self.outputs)
        bias = self._own_bias
        if bias is not None and self.positions > 1:
            self.bias_rows = flat.memory.rows(bias.rows, batch)

    def admits(self, x: Tensor) -> bool:
        return self.differentiable or not is_buffer(x, self.weight)

    def take(self, run: ReplayRun, x: Tensor, g: Tensor) -> None:
        """Take an output gradient: compute the norms, and hold the operands of the sum."""
        if not x.is_contiguous():
            x = x.contiguous()
        if not g.is_contiguous():
            g = g.contiguous()
        if not self.weight_part.joined:
            self.take_norm(self.index, x.data_ptr(), g.data_ptr())
        elif self._own_bias is not None:
            if self.positions > 1:
                rows = self.bias_rows
                sizes = (len(rows), self.positions, self.outputs)
                self.sum_positions(g.data_ptr(), rows.data_ptr(), *sizes, run.threads)
            else:
                self.flat.calls.set_rows(self._own_bias.place, g.data_ptr())
        held = (x, g, x._version, g._version)
        run.held[self.index] = held if not self.kept else self._held_of_bias(g)
        run.order.append(self.index)

    def record(self, use: CapturedOp, x: Tensor, g: Tensor) -> None:
        recorded._arrive(use, x, g)

    def _held_of_bias(self, g: Tensor) -> tuple[Any, ...]:
        """Return what is left to hold where the weight's gradients are kept."""
        shared = self.bias_part is not None and self.bias_part.joined
        rows = recorded._sum_positions(g.view(self.out_positions)) if shared else None
        return () if rows is None else (None, None, 0, 0, rows)

    def gradients(self, part: Part, held: Any) -> PerSampleGradients:
        if part is self.bias_part and self.kept:
            return ExplicitGradients(held[4])
        out = held[1].view(self.out_positions)
        if part is self.bias_part:
            return ExplicitGradients(recorded._sum_positions(out))
        return LinearGradients(held[0].view(self.in_positions), out, self.integer_operands)

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
            rows = held[4] if self.bias_part.joined else self.bias_rows.clone()
            use.arrive(1, ExplicitGradients(rows))


def _gradient(
    ctx: Any, x: Tensor, g: Tensor | None, entered: Any = None
) -> tuple[Tensor | None, ...]:
    """Take an output gradient, and return the input's.

    ``entered`` is what the run has said of the gradient, if it was asked.
    """
    if g is None:
        return None, None, None, None
    if _differentiable():
        refuse_double_backward()
    run: ReplayRun = ctx.run
    site: LinearSite = ctx.site
    site.arrive(run, x, g, entered)
    if not site.differentiable:
        return None, None, None, None
    weight = site.plain_weight
    if weight._version != ctx.version:
        written_since()
    if not run.live or not g.is_contiguous():
        return None, None, None, recorded._product(g, weight.to(g.dtype)).to(x.dtype)
    if site.weights <= run.own_products.get(site.dtype, -1):
        gx = _empty(site.shape, dtype=site.dtype)
        rows, inputs, outputs = site.sizes
        site.product(
            *(g.data_ptr(), site.weight_address, False, 0, gx.data_ptr()),
            *(rows, outputs, inputs, run.threads),
        )
        return None, None, None, gx
    if len(site.shape) == 2:
        return None, None, None, _mm(g, weight)
    gx = _mm(g.view(site.sizes[0], site.outputs), weight)
    return None, None, None, gx.view(site.shape)


class _ReplayedLinear(torch.autograd.Function):
    @staticmethod
    @quick("linear_forward")
    def forward(ctx: Any, anchor: Tensor, run: ReplayRun, site: LinearSite, x: Tensor) -> Tensor:
        ctx.run, ctx.site = run, site
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.version = site.plain_weight._version
        if not x.is_contiguous():
            return fresh(F.linear(x, site.plain_weight, site.plain_bias))
        if site.weights <= run.own_products.get(site.dtype, -1):
            out = _empty(site.out_shape, dtype=site.dtype)
            weight, bias = site.weight_address, address(site.plain_bias)
            site.product(x.data_ptr(), weight, True, bias, out.data_ptr(), *site.sizes, run.threads)
            return out
        if len(site.shape) == 2 or site.plain_bias is None:
            return fresh(F.linear(x, site.plain_weight, site.plain_bias))
        rows, inputs, _ = site.sizes
        out = torch.addmm(site.plain_bias, x.view(rows, inputs), site.turned)
        out.resize_(site.out_shape)  # no view, which in-place activations would refuse
        return out

    backward = staticmethod(quick_backward("linear_backward", _gradient))


_apply = apply_of(_ReplayedLinear)
skip_frames(_ReplayedLinear)


@quick("linear")
def linear(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``F.linear(x, weight, bias)``; return None if it is not the next use."""
    count = len(args)
    if count < 2 or kwargs:
        return None
    found = next_site(args[1], args[2] if count > 2 else None, args[0], LinearSite)
    if found is None:
        return None
    run, site = found
    return _apply(run.program.capture.anchor, run, site, args[0])


REPLAYED[F.linear] = linear
