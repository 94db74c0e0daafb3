"""Replay block-circulant products with the per-sample gradients of the recorded path."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...nn.functional import circulant_product
from ..layers import circulant as recorded
from ..parameter import REPLAYED, fresh, refuse_double_backward
from ..per_sample_gradients import ExplicitGradients, PerSampleGradients, to_sum_dtype_dense
from ..uses import CapturedOp
from .facts import UseFacts
from .recorded import RecordSite
from .run import ReplayRun, next_site
from .site import NotReplayed, apply_of, kind, skip_frames

_differentiable = torch.is_grad_enabled


@kind
class CirculantSite(RecordSite):
    """Block-circulant map ``x [B, ..., q, d] -> [B, ..., p, d]``."""

    operations = ("circulant",)

    def __init__(self, facts: UseFacts, kept: Sequence[bool]) -> None:
        super().__init__(facts, kept)
        if self.kept:
            raise NotReplayed("gradients of circulant blocks are kept")
        if facts.tail[-2:] != self.plain_weight.shape[1:]:
            raise NotReplayed("circulant blocks of another shape")
        self.convention = self.saved["convention"]

    @property
    def bias_shape(self) -> tuple[int, ...]:
        outs, _, block = self.plain_weight.shape
        return (int(outs * block),)

    def record_of(self, x: Tensor, g: Tensor) -> PerSampleGradients:
        inputs, gradients = (t.reshape(self.batch, -1, *t.shape[-2:]) for t in (x, g))
        found = recorded.gradients_of(inputs, gradients, self.convention)
        if not self.flat.arithmetic.exact:
            return found
        # Their integers are those of written rows, as in ``exact_sums``.
        return ExplicitGradients(to_sum_dtype_dense(found.per_sample(), torch.float32))

    def record(self, use: CapturedOp, x: Tensor, g: Tensor) -> None:
        recorded.arrive(use, x, g)

    def sum_bias(self, g: Tensor, out: Tensor | None) -> Tensor:
        each = g.contiguous().view(self.batch, -1, math.prod(g.shape[-2:]))
        if each.shape[1] > 1:
            return torch.sum(each, 1, out=out)
        rows = each[:, 0]
        if out is not None and self.bias_part is not None:
            self.flat.calls.set_rows(self.bias_part.place, rows.data_ptr())
        return rows


class _ReplayedCirculant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: ReplayRun, site: CirculantSite, x: Tensor) -> Tensor:
        ctx.run, ctx.site = run, site
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, site.plain_weight)
        return fresh(circulant_product(x, site.plain_weight, site.convention, site.plain_bias))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if g is None:
            return None, None, None, None
        if _differentiable():
            refuse_double_backward()
        site: CirculantSite = ctx.site
        site.arrive(ctx.run, x, g)
        gx = None
        if ctx.needs_input_grad[3]:
            gx = recorded.input_gradient(g, weight, site.convention).to(x.dtype)
        return None, None, None, gx


_apply = apply_of(_ReplayedCirculant)
skip_frames(_ReplayedCirculant)


def _product(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a product as ``circulant_linear`` calls it; return None if it is not the next use."""
    if len(args) != 4 or kwargs:
        return None
    found = next_site(args[1], args[3], args[0], CirculantSite)
    if found is None:
        return None
    run, site = found
    if args[2] != site.convention:
        run.cursor -= 1
        return None
    return _apply(run.program.capture.anchor, run, site, args[0])


REPLAYED[circulant_product] = _product
