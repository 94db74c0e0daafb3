"""Compare the states that provenance gives with what replacing a record really changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpkern.engine.provenance import YieldedBatch, track, untracked
from dpkern.engine.provenance.aliases import is_stale
from dpkern.engine.provenance.states import Mixed, OneRecord, PerRecord, RecordSum
from dpkern.engine.provenance.tensor import state_of

STALE = Mixed("a write", "", "through another view")

Operation = Callable[..., Any]


def fresh_rows(
    tensor: Tensor, dim: int, record: int, seed: int, ids: Sequence[int] | None = None
) -> Tensor:
    """Return a copy in which the rows of one record are other values of the same kind."""
    random = torch.Generator().manual_seed(seed)
    other = tensor.clone()
    rows = other.movedim(dim, 0)
    places = [i for i, r in enumerate(ids or range(len(rows))) if r == record]
    for place in places:
        if tensor.is_floating_point():
            noise = torch.randn(rows[place].shape, generator=random, dtype=torch.float64)
            rows[place] = (100 * noise).to(tensor.dtype)
        elif tensor.dtype is torch.bool:
            rows[place] = ~rows[place]
        else:
            rows[place] = (rows[place] + 1) % 3
    return other


def run_tracked(
    operation: Operation, tensors: Sequence[Tensor], dims: Sequence[int | None], records: int
) -> list[tuple[Tensor, Any]]:
    """Run an operation on tracked copies; return its results with their states."""
    batch = YieldedBatch(records)
    given = [
        t.clone() if d is None else track(t.clone(), PerRecord(batch, batch.all, d))
        for t, d in zip(tensors, dims, strict=True)
    ]
    torch.manual_seed(7)
    result = operation(*given)
    results = result if isinstance(result, (tuple, list)) else [result]
    return [
        (untracked(r).detach(), STALE if is_stale([r]) else state_of(r))
        for r in results
        if isinstance(r, Tensor)
    ]


def check_states(
    operation: Operation, tensors: Sequence[Tensor], dims: Sequence[int | None], records: int
) -> str:
    """Assert that no state claims more than replacing records shows; return the first state."""
    before = run_tracked(operation, tensors, dims, records)
    changed = {}
    for record in range(min(records, 2)):
        other = [
            t if d is None else fresh_rows(t, d, record, 11 * i + record)
            for i, (t, d) in enumerate(zip(tensors, dims, strict=True))
        ]
        changed[record] = other
        after = run_tracked(operation, other, dims, records)
        if len(before) == len(after):
            for (old, state), (new, new_state) in zip(before, after, strict=True):
                _compare(old, state, new, new_state, record)
        else:
            assert all(isinstance(s, Mixed | OneRecord) for _, s in before)
    for index, (_, state) in enumerate(before):
        if isinstance(state, RecordSum) and records > 1:
            _check_additive(operation, tensors, dims, records, changed, index)
    return type(before[0][1]).__name__ if before else "nothing"


def _compare(old: Tensor, state: Any, new: Tensor, new_state: Any, record: int) -> None:
    if isinstance(state, Mixed | RecordSum) or isinstance(new_state, Mixed | RecordSum):
        return
    if isinstance(state, PerRecord):
        assert old.dim() > state.dim, "rows in a dimension that the result lacks"
        assert old.shape[state.dim] == len(state.ids), "not one record for each row"
        assert isinstance(new_state, PerRecord)
        one, two = old.movedim(state.dim, 0), new.movedim(new_state.dim, 0)
        one, two = one[state.ids != record], two[new_state.ids != record]
    elif isinstance(state, OneRecord):
        if state.record == record:
            return
        one, two = old, new
    else:
        one, two = old, new
    assert one.shape == two.shape, f"record {record} changes the shape of other records' rows"
    assert torch.equal(one.nan_to_num(7.5), two.nan_to_num(7.5)), (
        f"record {record} changes rows of others ({state})"
    )


def _check_additive(
    operation: Operation, tensors: Any, dims: Any, records: int, changed: Any, index: int
) -> None:
    """What one record changes must not depend on another one."""

    def value(given: Any) -> Tensor:
        return run_tracked(operation, given, dims, records)[index][0].double()

    both = [
        t if d is None else fresh_rows(changed[0][i], d, 1, 11 * i + 1)
        for i, (t, d) in enumerate(zip(tensors, dims, strict=True))
    ]
    here = value(changed[0]) - value(copy.copy(tensors))
    there = value(both) - value(changed[1])
    if not (here.isfinite().all() and there.isfinite().all()):
        return  # a mean over no rows
    scale = float(value(both).abs().max()) + float(here.abs().max()) + 1
    assert torch.allclose(here, there, rtol=1e-5, atol=1e-6 * scale), "not a sum over records"
