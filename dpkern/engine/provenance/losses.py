"""Follow rows through torch's loss functions, and check losses before the backward pass.

A loss has to be a sum of terms of single records, for only then is the gradient of one record's
term what is clipped. A mean over the batch is such a sum, divided by the number of records, which
the clipping undoes. ``cross_entropy`` and ``nll_loss`` divide by a number that depends on the whole
batch when targets are ignored or classes are weighted. For tracked tensors each record's term is
divided by its own number of targets instead:

    loss = (1 / B) sum_b (1 / n_b) sum_t w[y_bt] l_bt    n_b: targets of b that are not ignored
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ...ops import direct
from .aliases import WRITTEN
from .constants import WHEN_READ
from .filling import kind_of_sum, without_filling
from .meeting import combined
from .places import at_places
from .reductions import LEFT_OUT, divisor_of, leaves_out, left_out_by_order, warn_of_divisor
from .rules import TrackedCall, action, finish_as
from .states import (
    NO_RECORD,
    FilledBatch,
    FilledSum,
    OneRecord,
    PerRecord,
    RecordSum,
    State,
    YieldedBatch,
)
from .statistic import remembered
from .tensor import USUAL, Function, TrackedTensor, retrack, state_of, untracked
from .trees import mapped
from .usual_calls import CROSS_ENTROPY, ONE, follow_cross_entropy

_REDUCTION = {
    # place of the argument ``reduction``
    **dict.fromkeys("mse_loss l1_loss smooth_l1_loss soft_margin_loss kl_div".split(), 4),
    **dict.fromkeys("huber_loss".split(), 2),
    **dict.fromkeys("binary_cross_entropy binary_cross_entropy_with_logits".split(), 5),
    **dict.fromkeys("hinge_embedding_loss gaussian_nll_loss".split(), 5),
    **dict.fromkeys("margin_ranking_loss".split(), 6),
    **dict.fromkeys("poisson_nll_loss".split(), 7),
}
"""Losses that work entry by entry."""

_REDUCTION_OF_ROWS = {
    **dict.fromkeys("cross_entropy nll_loss cosine_embedding_loss".split(), 6),
    **dict.fromkeys("multi_margin_loss".split(), 7),
    **dict.fromkeys("multilabel_margin_loss".split(), 4),
    **dict.fromkeys("multilabel_soft_margin_loss".split(), 5),
    **dict.fromkeys("triplet_margin_loss".split(), 9),
    **dict.fromkeys("triplet_margin_with_distance_loss".split(), 99),
}
"""Losses of whole rows."""

_CLASSES = ("cross_entropy", "nll_loss")

_any_negative = direct.look("any_negative")


@action(*_REDUCTION, *_REDUCTION_OF_ROWS)
def loss(call: TrackedCall) -> Any:
    """Follow a loss function with ``reduction`` none, mean, sum or batchmean."""
    place = _REDUCTION.get(call.name) or _REDUCTION_OF_ROWS[call.name]
    reduction = call.argument(place, "reduction", default="mean")
    rows, entries = _by_entry(call) if call.name in _REDUCTION else _by_row(call)
    if call.kwargs.get("size_average") is not None or call.kwargs.get("reduce") is not None:
        rows = call.mixed("is called with size_average or reduce")
    if call.name in _CLASSES and isinstance(rows, (PerRecord, OneRecord)):
        if _has_read_targets(call, rows.batch):
            rows = call.mixed(_READ_TARGETS)
        elif reduction == "mean" and _divisor_depends_on_batch(call):
            if isinstance(rows, PerRecord) and left_out_by_order(rows):
                return finish_as(call, call.plain(), call.mixed(LEFT_OUT))
            result = _own_normalisation(call, rows, place)
            if isinstance(rows, PerRecord) and leaves_out(rows):
                at_places(call.batch)
                warn_of_divisor(result)
            return result
    kind = RecordSum if reduction == "none" else kind_of_sum(rows)
    result = _over_records(call, rows, place, reduction) if kind is FilledSum else call.plain()
    if reduction == "none" or not isinstance(rows, PerRecord):
        return finish_as(call, result, rows)
    if left_out_by_order(rows):
        return finish_as(call, result, call.mixed(LEFT_OUT))
    part = leaves_out(rows)
    if part:
        at_places(call.batch)
    if reduction == "sum":
        return retrack(result, kind(rows.batch, "sum"))
    if reduction == "batchmean" and rows.dim == 0:
        entries = 1
    elif reduction != "mean":
        return finish_as(call, result, call.mixed(f"has the reduction {reduction!r}"))
    factor, each = divisor_of(rows.ids, rows.batch)
    if part and factor != 1:
        warn_of_divisor(result)
    result = result if factor == 1 else result * factor
    return retrack(result, kind(rows.batch, "mean", False, frozenset({entries * each})))


def _over_records(call: TrackedCall, rows: Any, place: int, reduction: str) -> Any:
    """Return a loss to which only rows that are records add, of a batch that was filled up."""
    terms = call.func(*call.args[:place], **{**call.kwargs, "reduction": "none"})
    terms = without_filling(terms, rows)
    if reduction == "mean":
        return terms.mean()
    return terms.sum() / len(terms) if reduction == "batchmean" else terms.sum()


def usual_cross_entropy(
    func: Function, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Tensor | None:
    """Follow the mean over all records of the batch in their order, with every target counted.

    Each record has one row or as many as every other: its positions, which the loop has merged with
    the rows. This shortcut serves most loops. It returns None for all other calls.
    """
    if kwargs is None or len(args) != 2 or WRITTEN:
        return None
    x, target = args
    if type(x) is not TrackedTensor or type(target) is not TrackedTensor:
        return None
    state: Any = x._state
    if state is not target._state or type(state) is not PerRecord:
        return None
    batch, given = state.batch, kwargs.get
    if batch.in_pass != batch.size or type(batch) is FilledBatch:
        return None
    if state is not batch.each and (state is not batch.spread or batch.has_chosen_rows):
        return None
    each = len(state.ids) // batch.size
    if given("reduction") != "mean" or type(given("label_smoothing")) is not float:
        return None
    if not (given("weight") is given("size_average") is given("reduce") is None):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        dims, ignored = len(x.shape), kwargs["ignore_index"]
        if dims < 2 or _leaves_out_targets(target, ignored):
            return None
        smoothing = kwargs["label_smoothing"]
        if smoothing:
            if remembered(smoothing) is not None:
                return None
            if batch.boundary is not None:
                batch.boundary.constants.note_smoothing(batch, smoothing)
        loss: Any = CROSS_ENTROPY(x, target, None, _MEAN, ignored, smoothing)
        each *= max(math.prod(x.shape[2:]), 1)
        shares = ONE if each == 1 else frozenset((each,))
        retrack(loss, RecordSum(batch, "mean", False, shares))
        if not target.requires_grad:
            loss._made_of = x.grad_fn if state is batch.each else _behind(x.grad_fn)
        made: Tensor = loss
        return made


def _behind(node: Any) -> Any:
    """Return the node that one of torch's own takes its only operand from, else the node itself."""
    if node is None or isinstance(node, BackwardCFunction) or len(node.next_functions) != 1:
        return node
    return node.next_functions[0][0]


_MEAN = 1

_quick_cross_entropy = follow_cross_entropy(usual_cross_entropy)


def _any_cross_entropy(
    func: Function, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Tensor | None:
    """Let C++ follow the call, unless it smooths labels by a number, which has to be looked at."""
    smoothing = kwargs.get("label_smoothing") if kwargs else None
    if type(smoothing) is float and smoothing:
        return usual_cross_entropy(func, args, kwargs)
    followed: Tensor | None = _quick_cross_entropy(func, args, kwargs)
    return followed


def _look_at_smoothing() -> None:
    USUAL[F.cross_entropy] = _any_cross_entropy


USUAL[F.cross_entropy] = _quick_cross_entropy
WHEN_READ.append(_look_at_smoothing)


def _by_entry(call: TrackedCall) -> tuple[State, int]:
    """Return the rows that all operands share, and the number of entries of a row."""
    shape = np.broadcast_shapes(*(tuple(t.shape) for t in call.args[:2]))
    rows = combined(call, shape)
    if call.name == "gaussian_nll_loss" and call.argument(2, "var").dim() < len(shape):
        rows = rows if call.tracks_only(*call.args[:2]) else call.mixed("unsqueezes var")
    if not isinstance(rows, PerRecord):
        return rows, 1
    return rows, max(math.prod(shape) // max(len(rows.ids), 1), 1)


def _by_row(call: TrackedCall) -> tuple[State, int]:
    """Return the rows of a loss with the batch first, and the number of terms of a row."""
    x: Tensor = call.args[0]
    vectors = 3 if call.name.startswith("triplet") else 2 if "cosine" in call.name else 1
    operands = [call.argument(i, "input", "target", "positive", "negative") for i in (0, 1)]
    operands = list(call.args[:3]) if vectors > 1 else operands
    if not call.tracks_only(*operands):
        return call.mixed("takes its weights from samples"), 1
    if call.kwargs.get("distance_function") is not None:
        return call.mixed("has a distance that cannot be followed"), 1
    rows = [s for s in call.states if isinstance(s, PerRecord)]
    if any(s.dim for s in rows) or (rows and x.dim() < 2):
        return call.mixed("does not have the samples in its first dimension"), 1
    if vectors > 1 and any(t.dim() != x.dim() for t in operands[:vectors]):
        return call.mixed("broadcasts samples"), 1
    shape = x.shape
    terms = (*shape[:1], *shape[2:]) if len(shape) > 1 else (1,)
    state = combined(call, shape if rows else terms, from_right=False)
    if not isinstance(state, PerRecord):
        return state, 1
    if len(shape) < 3 or (call.name not in _CLASSES and vectors != 3):
        return state, 1
    return state, max(math.prod(terms) // max(len(state.ids), 1), 1)


def _divisor_depends_on_batch(call: TrackedCall) -> bool:
    target = call.argument(1, "target")
    if not target.is_floating_point() and call.argument(2, "weight") is not None:
        return True
    return _leaves_out_targets(target, call.argument(4, "ignore_index", default=-100))


_READ_TARGETS = (
    "takes targets made elsewhere after samples were read (tolist, numpy); engine.adopt(targets) "
    "vouches that row i is that of record i"
)


def _has_read_targets(call: TrackedCall, batch: YieldedBatch) -> bool:
    """Whether the classes may have come from the batch by way of Python or NumPy."""
    target = call.argument(1, "target")
    made = type(target) is not TrackedTensor and not target.is_floating_point()
    return made and batch.has_read_rows and target.numel() > 1


def _leaves_out_targets(target: Tensor, ignored: int) -> bool:
    if torch._C._are_functorch_transforms_active():
        return True  # whoever divides each record by its own number of targets needs not know
    if not (target.is_cpu or target.is_floating_point()):
        return True  # to know, the host would wait for the device
    if ignored < 0 and _any_negative is not None:
        found: bool | None = _any_negative(target)  # None unless it is a list of classes
        if found is not None:
            return found
    if target.is_floating_point():  # probabilities
        return False
    if ignored < 0:  # every other class is at least 0: one pass over the targets tells
        return bool(target.numel()) and target.min().item() < 0
    return bool((target == ignored).any())


def _own_normalisation(call: TrackedCall, rows: PerRecord | OneRecord, place: int) -> Tensor:
    """Return the mean in which each record's term is divided by its own number of targets."""
    ignored = call.argument(4, "ignore_index", default=-100)
    with torch._C.DisableTorchFunctionSubclass():
        terms = call.func(*call.args[:place], **{**call.kwargs, "reduction": "none"})
        valid = (untracked(call.argument(1, "target")) != ignored).to(terms.dtype)
        if isinstance(rows, OneRecord):
            return retrack(terms.sum() / valid.sum().clamp(min=1), rows)
        if terms.dim() > 1:
            terms, valid = terms.flatten(1).sum(1), valid.flatten(1).sum(1)
        records = max(len(rows.batch.all), 1)
        each = len(rows.ids) // records
        if np.array_equal(rows.ids, np.repeat(rows.batch.all, each)):
            # Each record has as many rows, so that no numbers have to go to a device.
            of_record = terms.reshape(records, -1), valid.reshape(records, -1)
            means = of_record[0].sum(1) / of_record[1].sum(1).clamp(min=1)
            kind = kind_of_sum(rows)
            if kind is FilledSum:
                means = without_filling(means, rows.batch.each)
            mean = means.sum() / max(rows.batch.in_pass, 1)
            return retrack(mean, kind(rows.batch, "mean"))
        numbers = np.where(rows.ids == NO_RECORD, records, rows.ids)
        ids = torch.from_numpy(numbers).to(terms.device)
        counts = valid.new_zeros(records + 1).index_add(0, ids, valid)
        result = (terms / counts.clamp(min=1)[ids]).sum() / max(rows.batch.in_pass, 1)
    return retrack(result, RecordSum(rows.batch, "mean"))


@action("ctc_loss")
def ctc_loss(call: TrackedCall) -> Any:
    """Follow log-probabilities with time first; a mean divides by each target's own length."""
    result = call.plain()
    x = call.args[0]
    state = state_of(x)
    reduction = call.argument(5, "reduction", default="mean")
    known = isinstance(state, PerRecord) and state.dim == 1 and x.dim() == 3
    for tensor, other in zip(call.tracked, call.states, strict=True):
        if tensor is not x and isinstance(state, PerRecord):
            known = known and isinstance(other, PerRecord) and other.dim == 0
            known = known and isinstance(other, PerRecord) and other.matches(state)
    if not known:
        return finish_as(call, result, call.mixed("expects time first and the samples second"))
    assert isinstance(state, PerRecord)
    if reduction == "none":
        return retrack(result, PerRecord(state.batch, state.ids, 0))
    if reduction == "sum":
        return retrack(result, RecordSum(state.batch, "sum"))
    factor, each = divisor_of(state.ids, state.batch)
    return retrack(result * factor, RecordSum(state.batch, "mean", False, frozenset({each})))


def _weighted(call: TrackedCall, weights: Tensor, first: State) -> State:
    """Return the state of a loss with these output gradients."""
    state = state_of(weights)
    if state is None:
        if isinstance(first, PerRecord) and weights.dim():
            at_places(call.batch)
        return first
    if isinstance(state, PerRecord) and isinstance(first, PerRecord) and state.matches(first):
        return first
    return call.mixed("weights samples by others")


def _multiplied(
    args: Sequence[Any], kwargs: Mapping[str, Any], losses: Sequence[Tensor], factor: int
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a backward pass, the gradients it starts with times ``factor``."""
    if not args:
        args, kwargs = (kwargs["tensors"],), {k: v for k, v in kwargs.items() if k != "tensors"}
    name = "gradient" if "gradient" in kwargs or isinstance(args[0], Tensor) else "grad_tensors"
    given = args[1] if len(args) > 1 else kwargs.get(name)
    starts = list(given) if isinstance(given, (tuple, list)) else [given] * len(losses)
    found = [
        torch.full_like(loss, factor) if start is None else start * factor
        for loss, start in zip(losses, starts, strict=True)
    ]
    value: Any = found[0] if name == "gradient" else found
    return (args[0], value, *args[2:]), {k: v for k, v in kwargs.items() if k != name}


@action("backward")
def backward(call: TrackedCall) -> Any:
    """Check that the loss is a sum over records, and run the backward pass."""
    roots = call.argument(0, "tensors", "self")
    roots = list(roots) if isinstance(roots, (tuple, list)) else [roots]
    states = [root._state for root in roots if type(root) is TrackedTensor]
    batches = [s.batch for s in states if s.batch is not None]
    boundary = batches[0].boundary if batches else None

    losses = [untracked(root) for root in roots]
    gradients = call.argument(1, "gradient", "grad_tensors")
    given = gradients if isinstance(gradients, (tuple, list)) else [gradients]
    for weights in given:
        if weights is not None and states:
            states[0] = _weighted(call, weights, states[0])

    def run(factor: int | None = None) -> Any:
        # Checkpointed segments run again in here, and must see private parameters as such.
        if len(call.args) == 1 and not call.kwargs and call.args[0] is roots[0] and factor is None:
            return call.func(losses[0])
        args, kwargs = mapped((call.args, call.kwargs), untracked)
        if factor is not None:
            args, kwargs = _multiplied(args, kwargs, losses, factor)
        return call.func(*args, **kwargs)

    if boundary is None:
        return run()
    return boundary.backward(losses, states, run)
