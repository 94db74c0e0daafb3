"""Follow rows through reductions within each row; sums over rows become sums over records."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ...base.errors import LossWarning
from ..user_code import lines_up
from .filling import kind_of_sum, without_filling
from .meeting import REDUCED, combined, place_of
from .places import at_places
from .rules import TrackedCall, action, finish_as, rule
from .states import (
    NO_RECORD,
    FilledSum,
    Ids,
    OneRecord,
    PerRecord,
    RecordSum,
    State,
    YieldedBatch,
    misses,
)
from .tensor import state_of

_OTHERS = """
    amax amin argmax argmin all any prod var std var_mean std_mean median nanmedian nansum nanmean
    logsumexp special_logsumexp mode count_nonzero aminmax kthvalue norm quantile nanquantile
    linalg_vector_norm linalg_norm linalg_matrix_norm max min trace
""".split()


@rule(*_OTHERS)
def other(call: TrackedCall, out: Tensor) -> State | None:
    """Keep rows of reductions that are not linear, unless they reduce over the rows."""
    second = call.argument(1, "other")
    if call.name in ("max", "min") and isinstance(second, Tensor):
        return combined(call, out.shape)
    state: Any = state_of(call.args[0]) if call.args else call.states[0]
    if isinstance(state, OneRecord) and len(call.tracked) == 1:
        return state
    if isinstance(state, RecordSum) or state is None or len(call.tracked) > 1:
        return call.mixed("is not linear in a sum over samples")
    place = place_of(call, call.tracked[0], state.dim)
    if place is None or place == REDUCED:
        return call.mixed(f"takes the {call.name} over samples")
    return PerRecord(state.batch, state.ids, place)


@action("sum", "mean")
def linear(call: TrackedCall) -> Any:
    """Sum or average over rows, so that each record has its own term.

    A mean over rows divides by their number. Where that is not the number of records in the pass,
    because some were left out or because constants joined them, it is scaled to divide by it.
    """
    x, state = call.tracked[0], call.states[0]
    kind = kind_of_sum(state)
    if kind is FilledSum and isinstance(state, PerRecord):
        result = _over_records(call, x, state)
    else:
        result = call.plain()
    if isinstance(state, RecordSum) and call.name == "mean" and x.numel() != result.numel():
        # As many sums as there are classes in the batch, say: the number must stay the same.
        count = x.numel() // max(result.numel(), 1)
        shares = frozenset(share * count for share in state.shares or (1,))
        return finish_as(call, result, replace(state, shares=shares))
    if not isinstance(state, PerRecord):
        return finish_as(call, result, state)
    place = place_of(call, x, state.dim)
    if place is None:
        return finish_as(call, result, call.mixed("sums in a way that cannot be followed"))
    if place != REDUCED:
        return finish_as(call, result, PerRecord(state.batch, state.ids, place))
    if left_out_by_order(state):
        return finish_as(call, result, call.mixed(LEFT_OUT))
    part = leaves_out(state)
    if part:
        at_places(call.batch)
    if call.name == "sum":
        return finish_as(call, result, kind(state.batch, "sum"))
    rest = x.numel() // max(result.numel(), 1) // max(len(state.ids), 1)
    factor, each = divisor_of(state.ids, state.batch)
    if part and factor != 1:
        warn_of_divisor(result)
    result = result if factor == 1 else result * factor
    return finish_as(call, result, kind(state.batch, "mean", False, frozenset({each * rest})))


def _over_records(call: TrackedCall, x: Tensor, state: PerRecord) -> Any:
    """Return a sum or mean to which only rows that are records add, if it is one over rows."""
    if place_of(call, x, state.dim) != REDUCED:
        return call.plain()
    records = without_filling(x, state)
    args = [records if a is x else a for a in call.args]
    return call.func(*args, **{k: records if a is x else a for k, a in call.kwargs.items()})


LEFT_OUT = "leaves out some samples by their place in an order that depends on all"


def left_out_by_order(state: PerRecord) -> bool:
    """Whether records of the pass are missing after values have ordered rows: the hardest, say."""
    return state.batch.has_ordered_rows and misses(state)


def leaves_out(state: PerRecord) -> bool:
    """Whether records of the pass are missing, other than by a mask of their own values.

    Which record stands at a place depends on the others.
    """
    if state.ids is state.batch.all or state.batch.has_chosen_rows:
        return False
    return misses(state)


def warn_of_divisor(mean: Tensor) -> None:
    """Warn that a mean over samples at some places has another divisor than torch's."""
    if mean.requires_grad:
        warnings.warn(_DIVISOR, LossWarning, stacklevel=lines_up())


_DIVISOR = (
    "a mean over samples at some places of the batch, a slice say, is divided by the number of all "
    "samples that passed: how many stand there depends on others. Averages of such means train "
    "with less than torch's. Add sums and divide by the number that passed: "
    "cross_entropy(out[:n], y[:n], reduction='sum') / len(out)."
)


def divisor_of(ids: Ids, batch: YieldedBatch) -> tuple[float, int]:
    """Return the factor from a mean over rows to one over records, and the rows of each record.

    Where values have chosen rows, each record counts as one row: how many rows another record has
    must not scale its term.
    """
    records = max(batch.in_pass, 1)
    if ids is batch.all:
        return len(ids) / records if len(ids) else 1.0, 1
    counts = np.unique(ids[ids != NO_RECORD], return_counts=True)[1]
    equal = len(counts) > 0 and bool((counts == counts[0]).all()) and not batch.has_chosen_rows
    each = int(counts[0]) if equal else 1
    return (len(ids) / (records * each) if len(ids) else 1.0), each
