"""Reductions: within each row they keep it, over the rows they end in a sum over records or mix."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from .rowwise import dims_of
from .rules import Call, action, combined, rule
from .states import NO_RECORD, Ids, OneRecord, PerRecord, RecordSum, State, YieldedBatch
from .tensor import retrack

_OTHERS = {
    # name: place of the dimension
    **dict.fromkeys(
        (
            "amax",
            "amin",
            "argmax",
            "argmin",
            "all",
            "any",
            "prod",
            "var",
            "std",
            "var_mean",
            "std_mean",
            "median",
        ),
        1,
    ),
    **dict.fromkeys(
        ("nanmedian", "nansum", "nanmean", "logsumexp", "mode", "count_nonzero", "aminmax"), 1
    ),
    **dict.fromkeys(
        ("norm", "quantile", "nanquantile", "vector_norm", "linalg_vector_norm", "linalg_norm"), 2
    ),
    **dict.fromkeys(("max", "min"), 1),
}


@rule(*_OTHERS)
def other(call: Call, out: Tensor) -> State | None:
    """Extremes, norms and spreads; ``max`` and ``min`` of two tensors are elementwise."""
    if call.name in ("max", "min") and isinstance(call.argument(1, "other"), Tensor):
        return combined(call, out, from_right=True)
    state: Any = call.tracked[0]._state  # type: ignore[attr-defined]
    if isinstance(state, OneRecord):
        return state
    if isinstance(state, RecordSum) or len(call.tracked) > 1:
        return call.mixed("is not linear in a sum over samples")
    return _within(call, state, _OTHERS[call.name]) or call.mixed(
        f"takes the {call.name} over samples"
    )


def _within(call: Call, state: PerRecord, place: int) -> PerRecord | None:
    """The state if the rows are not reduced over."""
    x = call.tracked[0]
    given = call.argument(place, "dim", "axis")
    if isinstance(given, bool) or (call.name == "norm" and given is None):
        given = call.kwargs.get("dim")
    if (
        len(call.args) > place + 1
        and isinstance(call.args[place + 1], int)
        and not isinstance(call.args[place + 1], bool)
    ):
        given = tuple(a for a in call.args[place:] if not isinstance(a, bool))
    dims = dims_of(given, x.dim())
    if dims is None or state.dim in dims:
        return None
    keep = call.kwargs.get("keepdim", False) or any(a is True for a in call.args[place + 1 :])
    lower = 0 if keep else sum(1 for d in dims if d < state.dim)
    return PerRecord(state.batch, state.ids, state.dim - lower)


@action("sum", "mean")
def linear(call: Call) -> Any:
    """``sum`` and ``mean``: linear, so over the rows they are a sum of each record's own term.

    A mean over rows divides by their number. Where that is not the number of records in the pass, because
    some were left out or because constants joined them, the result is scaled to divide by it.
    """
    result = call.plain()
    x = call.tracked[0]
    state: Any = x._state  # type: ignore[attr-defined]
    if not isinstance(state, PerRecord):
        return retrack(result, state)
    kept = _within(call, state, 1)
    if kept is not None:
        return retrack(result, kept)
    if call.name == "sum":
        return retrack(result, RecordSum(state.batch, "sum"))
    rest = x.numel() // max(result.numel(), 1) // max(len(state.ids), 1)
    factor, each = divisor_of(state.ids, state.batch)
    result = result if factor == 1 else result * factor
    return retrack(result, RecordSum(state.batch, "mean", False, frozenset({each * rest})))


def divisor_of(ids: Ids, batch: YieldedBatch) -> tuple[float, int]:
    """What turns a mean over rows into one over the records of the pass, and rows per record."""
    present = ids[ids != NO_RECORD]
    counts = np.unique(present, return_counts=True)[1]
    each = int(counts[0]) if len(counts) and bool((counts == counts[0]).all()) else 1
    records = max(batch.in_pass, 1)
    return (len(ids) / (records * each) if len(ids) else 1.0), each
