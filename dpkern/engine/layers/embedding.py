"""Define the rules of embedding tables: F.embedding, and F.embedding_bag built on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.errors import UnsupportedModule
from ..capture import Capture
from ..parameter import (
    PrivateParameter,
    applied,
    arguments,
    differentiable_once,
    fresh,
    plain,
    rule,
    source_of,
    without_torch_function,
)
from ..tables import EmbeddingGradients
from ..uses import CapturedOp
from . import expression

Function = Callable[..., Any]


class _Embedding(torch.autograd.Function):
    """Table look-up ``ids [B, ...] -> [B, ..., D]``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, use: CapturedOp, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        return fresh(F.embedding(ids, weight))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        use: CapturedOp = ctx.use
        if use.wants(g):
            assert g is not None
            deliver(use, ids, g)
        return None, None, None, None


def deliver(use: CapturedOp, ids: Tensor, g: Tensor) -> None:
    """Capture the per-sample gradients of a look-up."""
    each = g.reshape(use.batch, ids.numel() // max(1, use.batch), g.shape[-1])
    flat = ids.reshape(use.batch, each.shape[1]).to(torch.int64).contiguous()
    use.arrive(0, EmbeddingGradients(flat, each, use.saved["rows"], use.saved["padding_idx"]))


@rule(F.embedding, torch.embedding, leaf=True)
def _embedding(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func is torch.embedding:
        weight, ids, padding_idx = arguments(("weight", "indices", "padding_idx"), args, kwargs)
        padding_idx = None if padding_idx in (None, -1) else padding_idx
    else:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
        ids, weight, padding_idx, max_norm, _, by_frequency = arguments(names, args, kwargs)
        if max_norm is not None or by_frequency:
            raise _refused(
                weight,
                "max_norm" if max_norm is not None else "scale_grad_by_freq",
                "an embedding whose rows do not depend on the other samples",
            )
    target = expression.whole_target_of(weight)
    capture = target.source.capture
    rows = int(weight.shape[0])
    if padding_idx is not None and padding_idx < 0:
        padding_idx += rows
    if expression.is_buffer(ids, weight) or _is_shared(capture, ids):
        with without_torch_function():
            result = F.embedding(ids, weight, padding_idx=padding_idx)
        shared = expression.of(func, (weight,), {}, result)
        source = source_of(shared)
        assert isinstance(source, expression.Expression)
        if isinstance(weight, PrivateParameter):
            source.looked_up = (ids, rows, padding_idx)
        if ids.dim() > 1 and ids.shape[0] == capture.batch and ids.stride(0) == 0:
            # Expanded over the samples, perhaps.
            own = {"padding_idx": padding_idx}
            source.for_samples = lambda: F.embedding(ids.clone(), weight, **own)
        return shared
    use = capture.use("embedding", (target,), ids, rows=rows, padding_idx=padding_idx)
    return applied(_Embedding, capture.anchor, use, ids, plain(weight))


def _is_shared(capture: Capture, ids: Tensor) -> bool:
    """Whether all samples share the ids, such as positions: the first dimension is no batch."""
    batch = capture.require_batch("embedding", ())
    if ids.dim() == 0 or ids.shape[0] != batch:
        folded = ids.dim() > 1 and batch > 0 and ids.shape[0] % batch == 0
        return not (folded and capture.passes.given(ids))
    if batch < 2 or capture.passes.given(ids):
        return False
    if ids.dim() > 1:
        return expression.are_relative_positions(ids)
    # As many positions as samples: 0, 1, 2, ... are positions.
    expression.check_readable(ids, "indices")
    return bool((ids == torch.arange(batch, device=ids.device)).all())


@rule(F.embedding_bag)
def _embedding_bag(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Look the rows up, then reduce each bag by ordinary operations."""
    names = ["input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode"]
    names += ["sparse", "per_sample_weights", "include_last_offset", "padding_idx"]
    given = arguments(names, args, kwargs)
    ids, weight, offsets, max_norm, _, by_frequency, mode, _, weights, last, padding_idx = given
    if max_norm is not None or by_frequency:
        raise _refused(weight, "embedding_bag", "a bag without max_norm and scale_grad_by_freq")
    if ids.dim() == 1:
        ids, weights, inside = _padded(ids, offsets, weights, bool(last))
    else:
        inside = torch.ones_like(ids, dtype=torch.bool)
    if padding_idx is not None:
        size = weight.shape[0]
        inside = inside & (ids != (padding_idx + size if padding_idx < 0 else padding_idx))
    looked_up = F.embedding(ids, weight)
    mask = inside[:, :, None]
    if mode == "max":
        lowest = looked_up.masked_fill(~mask, -torch.inf).max(dim=1).values
        return lowest.masked_fill(~inside.any(1)[:, None], 0)
    if weights is not None:
        looked_up = looked_up * weights[:, :, None]
    total = looked_up.masked_fill(~mask, 0).sum(1)
    if mode in (None, "mean"):
        return total / inside.sum(1).clamp(min=1)[:, None].to(total.dtype)
    return total


def _padded(
    ids: Tensor, offsets: Tensor, weights: Tensor | None, last: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return bags given by offsets as padded rows ``[B, longest]``, with a mask of their ids."""
    starts = offsets[:-1] if last else offsets
    ends = offsets[1:] if last else torch.cat([offsets[1:], offsets.new_tensor([len(ids)])])
    longest = int((ends - starts).max()) if len(starts) else 0
    place = starts[:, None] + torch.arange(longest, device=ids.device)
    inside = place < ends[:, None]
    place = place.clamp(max=max(0, len(ids) - 1))
    if len(ids) == 0:
        return ids.new_zeros(place.shape), weights, inside
    # What stands behind a bag is another sample's, and may be no finite number.
    rows = None if weights is None else weights[place].masked_fill(~inside, 0)
    return ids[place], rows, inside


def _refused(weight: Tensor, got: str, expected: str) -> UnsupportedModule:
    return UnsupportedModule(
        source_of(weight).name,
        expected=expected,
        got=got,
        remedy="Build the embedding without that option.",
    )
