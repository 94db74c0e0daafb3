"""Read the state of a loss that the module computes itself from the autograd graph.

A scalar output has no rows. Its graph says how it was reduced: constants times means or sums of
terms. Torch's cross entropy divides by the number of targets that are not ignored, which depends on
the whole batch; the rows of its gradient are rescaled so that each record is divided by its own
number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .elementwise import added, rescaled
from .rules import TrackedCall
from .states import Ids, Mixed, RecordSum, State, YieldedBatch

_PASS = (
    "ToCopyBackward0",
    "CloneBackward0",
    "ViewBackward0",
    "AliasBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "UnsafeViewBackward0",
    "NegBackward0",
)
_MEAN, _SUM = 1, 2


def state_of_scalar(loss: Tensor, batch: YieldedBatch, records: Ids) -> tuple[Tensor, State]:
    """Return a loss that the module computed, with its state."""
    return loss, _state(loss.grad_fn, batch, records)


def _state(node: Any, batch: YieldedBatch, records: Ids) -> State:
    scaled = False
    while node is not None:
        name = node.name()
        if name in _PASS:
            node = _only(node)
        elif name in ("MulBackward0", "DivBackward0") and _constant(node):
            scaled, node = True, _only(node)
        elif name == "AddBackward0":
            parts = [_state(n, batch, records) for n, _ in node.next_functions if n is not None]
            mixed = next((p for p in parts if isinstance(p, Mixed)), None)
            if mixed is not None or not parts:
                return mixed or _unknown(name, batch)
            call = TrackedCall("add", torch.add, (), {})
            total = added(call, [p for p in parts if isinstance(p, RecordSum)])
            return rescaled(total) if scaled and isinstance(total, RecordSum) else total
        else:
            found = _reduction(node, name, batch, records)
            return rescaled(found) if scaled and isinstance(found, RecordSum) else found
    return _unknown("no graph", batch)


def _only(node: Any) -> Any:
    following = [n for n, _ in node.next_functions if n is not None]
    return following[0] if len(following) == 1 else None


def _constant(node: Any) -> bool:
    """Whether the other factor is a Python number, which torch saves as a double."""
    if len([n for n, _ in node.next_functions if n is not None]) != 1:
        return False
    other = getattr(node, "_saved_other", None)
    return other is None or (other.dim() == 0 and other.dtype is torch.float64)


def _reduction(node: Any, name: str, batch: YieldedBatch, records: Ids) -> State:
    if name in ("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1"):
        mean = name.startswith("Mean")
        shape = (
            node._saved_self_sym_sizes if mean and hasattr(node, "_saved_self_sym_sizes") else ()
        )
        entries = int(np.prod(shape)) if len(shape) else len(records)
        return _sum(batch, mean, entries, records)
    reduction = getattr(node, "_saved_reduction", None)
    if reduction not in (_MEAN, _SUM):
        return _unknown(name, batch)
    if name.startswith("NllLoss"):
        return _cross_entropy(node, reduction, batch, records)
    saved = getattr(node, "_saved_self", None)
    entries = saved.numel() if saved is not None else len(records)
    return _sum(batch, reduction == _MEAN, entries, records)


def _sum(batch: YieldedBatch, mean: bool, entries: int, records: Ids) -> State:
    if not mean:
        return RecordSum(batch, "sum")
    count = max(len(records), 1)
    if entries % count:
        return Mixed("mean", "the module", "divides by something else than the samples", batch)
    return RecordSum(batch, "mean", False, frozenset({entries // count}))


def _cross_entropy(node: Any, reduction: int, batch: YieldedBatch, records: Ids) -> State:
    target, ignored = node._saved_target, node._saved_ignore_index
    if ignored >= 1 << 63:  # saved as an unsigned number
        ignored -= 1 << 64
    count = max(len(records), 1)
    if target.shape[0] % count:
        return Mixed(
            "cross_entropy", "the module", "has targets that are no rows of the samples", batch
        )
    if reduction == _SUM:
        return RecordSum(batch, "sum")
    valid = (target != ignored).reshape(count, -1)
    weight = node._saved_weight
    if weight is None and bool(valid.all()):
        return RecordSum(batch, "mean", False, frozenset({max(valid.shape[1], 1)}))
    total = node._saved_total_weight
    own = valid.sum(1).clamp(min=1)
    factors = (total / (own * count)).repeat_interleave(target.shape[0] // count)

    def rescale(inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...]) -> Any:
        g = inputs[0]
        assert g is not None
        each = factors.to(g.dtype).reshape(-1, *[1] * (g.dim() - 1))
        return (g * each, *inputs[1:])

    node.register_hook(rescale)
    return RecordSum(batch, "mean")


def _unknown(name: str, batch: YieldedBatch) -> Mixed:
    return Mixed(
        name.removesuffix("0").removesuffix("Backward"),
        "the module's own loss",
        "is no mean or sum of the samples' own terms that could be recognised",
        batch,
    )
