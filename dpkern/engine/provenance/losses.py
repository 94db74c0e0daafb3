"""Losses: torch's loss functions, and the backward pass of what they give.

A loss has to be a sum of terms of single records, for only then is the gradient of one record's term what is
clipped. A mean over the batch is such a sum, divided by the number of records, which the clipping undoes.
``cross_entropy`` and ``nll_loss`` divide by a number that depends on the whole batch when targets are ignored or classes
are weighted. For tracked tensors each record's term is divided by its own number of targets instead:

    loss = (1 / B) sum_b (1 / n_b) sum_t w[y_bt] l_bt        n_b: targets of record b that are not ignored
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .reductions import divisor_of
from .rules import Call, action, combined, finish
from .states import NO_RECORD, OneRecord, PerRecord, RecordSum, State
from .tensor import retrack, state_of, untracked
from .trees import mapped

_ELEMENTWISE = (
    *(
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "kl_div",
        "soft_margin_loss",
    ),
    *(
        "binary_cross_entropy_with_logits",
        "poisson_nll_loss",
        "gaussian_nll_loss",
        "hinge_embedding_loss",
    ),
)
_PER_ROW = (
    *(
        "multi_margin_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
        "cosine_embedding_loss",
    ),
    *(
        "margin_ranking_loss",
        "triplet_margin_loss",
        "triplet_margin_with_distance_loss",
        "cross_entropy",
        "nll_loss",
    ),
)
_POSITION = {
    # place of the argument ``reduction``
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "soft_margin_loss", "kl_div"), 4),
    **dict.fromkeys(("huber_loss",), 2),
    **dict.fromkeys(
        ("binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss"), 5
    ),
    **dict.fromkeys(("cross_entropy", "nll_loss"), 6),
}


@action(*_ELEMENTWISE, *_PER_ROW)
def loss(call: Call) -> Any:
    """A loss function with ``reduction`` none, mean, sum or batchmean."""
    reduction = call.argument(_POSITION.get(call.name, 99), "reduction", default="mean")
    if call.kwargs.get("size_average") is not None or call.kwargs.get("reduce") is not None:
        return finish(
            call, call.plain(), lambda c, out: c.mixed("is called with size_average or reduce")
        )
    rows = _rows(call)
    if isinstance(rows, (PerRecord, OneRecord)) and call.name in ("cross_entropy", "nll_loss"):
        if reduction == "mean" and _divisor_depends_on_batch(call):
            return _own_normalisation(call, rows)
    if reduction == "none" or not isinstance(rows, PerRecord):
        return finish(call, call.plain(), lambda c, out: rows)
    result = call.plain()
    if reduction == "sum":
        return retrack(result, RecordSum(rows.batch, "sum"))
    entries = 1
    if reduction == "mean":
        target = call.tracked[0] if call.name in _ELEMENTWISE else _targets(call)
        entries = max(target.numel() // max(len(rows.ids), 1), 1)
    if reduction not in ("mean", "batchmean"):
        return finish(
            call, result, lambda c, out: c.mixed(f"has the unknown reduction {reduction!r}")
        )
    factor, each = divisor_of(rows.ids, rows.batch)
    result = result if factor == 1 else result * factor
    return retrack(result, RecordSum(rows.batch, "mean", False, frozenset({entries * each})))


def _rows(call: Call) -> State:
    """The rows that all operands share."""
    widest = max(call.tracked, key=lambda t: t.dim())
    if call.name in _ELEMENTWISE:
        shape = torch.broadcast_shapes(*(t.shape for t in call.args[:2] if isinstance(t, Tensor)))
        return combined(call, torch.empty(shape, device="meta"), from_right=True)
    return combined(call, untracked(widest), from_right=False)


def _targets(call: Call) -> Tensor:
    """One entry for each single term of a loss that has classes in the second dimension."""
    x: Tensor = call.args[0]
    if call.name in ("cross_entropy", "nll_loss"):
        return untracked(x).select(1, 0) if x.dim() > 1 else untracked(x)[:1]
    return torch.empty(len(x), device="meta")


def _divisor_depends_on_batch(call: Call) -> bool:
    target = call.argument(1, "target")
    if target.is_floating_point():
        return False
    if call.argument(2, "weight") is not None:
        return True
    ignored = call.argument(4, "ignore_index", default=-100)
    return bool((untracked(target) == ignored).any())


def _own_normalisation(call: Call, rows: PerRecord | OneRecord) -> Tensor:
    """The mean in which each record is divided by its own number of targets."""
    place = _POSITION[call.name]
    args = list(call.args[:place])
    kwargs = {**call.kwargs, "reduction": "none"}
    with torch._C.DisableTorchFunctionSubclass():
        terms = call.func(*args, **kwargs)
        ignored = call.argument(4, "ignore_index", default=-100)
        valid = (untracked(call.argument(1, "target")) != ignored).to(terms.dtype)
        if isinstance(rows, OneRecord):
            result = terms.sum() / valid.sum().clamp(min=1)
            return retrack(result, rows)
        terms, valid = (
            terms.flatten(1).sum(1) if terms.dim() > 1 else terms,
            valid.flatten(1).sum(1) if valid.dim() > 1 else valid,
        )
        ids = torch.from_numpy(np.where(rows.ids == NO_RECORD, rows.batch.size, rows.ids)).to(
            terms.device
        )
        counts = valid.new_zeros(rows.batch.size + 1).index_add(0, ids, valid)
        result = (terms / counts.clamp(min=1)[ids]).sum() / max(rows.batch.in_pass, 1)
    return retrack(result, RecordSum(rows.batch, "mean"))


@action("ctc_loss")
def ctc_loss(call: Call) -> Any:
    """Log-probabilities have time first; each sample's loss is divided by its own target length."""
    result = call.plain()
    x = call.args[0]
    state = state_of(x)
    reduction = call.argument(5, "reduction", default="mean")
    others = [state_of(t) for t in call.tracked if t is not x]
    same = isinstance(state, PerRecord) and state.dim == 1
    same = same and all(
        isinstance(s, PerRecord) and s.dim == 0 and s.matches(state) for s in others
    )  # type: ignore[arg-type]
    if not same:
        return finish(
            call, result, lambda c, out: c.mixed("expects time first and the samples second")
        )
    assert isinstance(state, PerRecord)
    if reduction == "none":
        return retrack(result, PerRecord(state.batch, state.ids, 0))
    if reduction == "sum":
        return retrack(result, RecordSum(state.batch, "sum"))
    factor, each = divisor_of(state.ids, state.batch)
    return retrack(result * factor, RecordSum(state.batch, "mean", False, frozenset({each})))


@action("_pack_padded_sequence")
def packed(call: Call) -> Any:
    """Packing puts the rows of all samples that last until step t one after the other, for each t."""
    data, sizes = call.plain()
    state = state_of(call.args[0])
    dim = 0 if call.args[2] else 1
    if not isinstance(state, PerRecord) or state.dim != dim or len(call.tracked) > 2:
        return finish(
            call, (data, sizes), lambda c, out: c.mixed("packs sequences of unknown samples")
        )
    ids = [state.ids[:size] for size in sizes.tolist()]
    return retrack(
        data, PerRecord(state.batch, np.concatenate(ids) if ids else state.ids[:0], 0)
    ), sizes


@action("as_subclass")
def cast(call: Call) -> Any:
    """An ordinary tensor: it can enter another module, and no longer the private one."""
    return call.plain()


@action("backward")
def backward(call: Call) -> Any:
    """``loss.backward()``: the loss has to be a sum over records."""
    roots = call.argument(0, "tensors", "self")
    roots = list(roots) if isinstance(roots, (tuple, list)) else [roots]
    states = [s for s in map(state_of, roots) if s is not None]
    batch = call.batch

    def run() -> Any:
        # Checkpointed segments run again in here, and must see private parameters as such.
        args, kwargs = mapped((call.args, call.kwargs), untracked)
        return call.func(*args, **kwargs)

    if batch is None or batch.boundary is None:
        return run()
    return batch.boundary.backward([untracked(root) for root in roots], states, run)
