"""Closed forms of embedding tables; facts of the ids are read from them or given as ``found``.

Bringing equal ids together is a matter of addresses and free; a test for the padding is a CMP.
"""

from __future__ import annotations

from typing import Any

import torch

from ...base.counts import Counts, Itemised
from ...ops._values import IdStatistics
from ...ops._values import count_used_samples as used_by
from ._form import Form
from ._layers import WIDE, dots, itemised, widened


def tests_of(ids: int, padding_idx: int | None) -> Counts:
    """Return the tests for the padding."""
    return Counts(CMP=0 if padding_idx is None else ids)


def embedding_norm(
    ids: torch.Tensor,
    g: torch.Tensor,
    *,
    padding_idx: int | None = None,
    found: IdStatistics | None = None,
    **_: Any,
) -> Itemised:
    """Count ``ghost.embedding_norm``.

    A row whose id stands alone is squared; rows of one id are summed first, with a rounding bound.
    """
    found = IdStatistics.of(ids, padding_idx) if found is None else found
    batch, columns = len(ids), g.shape[2]
    alone = found.rows - found.repeated
    together = found.shared * (Counts(ADD=columns + 1, SQRT=1) + dots(columns))
    totals = found.repeated * (dots(columns) + Counts(SQRT=1, MUL=3, ADD=1))
    return itemised(
        [(ids.numel(), ids.dtype), (found.kept * columns, g.dtype)],
        [(batch, WIDE)],
        tests=tests_of(ids.numel(), padding_idx),
        widened=widened(g.dtype, found.kept * columns),
        single_rows=alone * (dots(columns) + Counts(MUL=1)),
        rows_of_one_id=together + totals,
        total=Counts(ADD=found.rows, MUL=batch),
    )


def embedding_sum(
    ids: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    padding_idx: int | None = None,
    used: int | None = None,
    found: IdStatistics | None = None,
    **_: Any,
) -> Itemised:
    """Count ``ghost.embedding_sum``; ``used`` counts nonzero factors, ``found`` has their ids."""
    batch, columns = len(ids), g.shape[2]
    if found is None:
        found = IdStatistics.of(ids if ids.is_meta else ids[factors != 0], padding_idx)
    used = used_by(factors) if used is None else used
    read, table = used * ids.shape[1], min(found.table, len(out)) * columns
    return itemised(
        [(read, ids.dtype), (batch + found.kept * columns + table, g.dtype)],
        [(table, g.dtype)],
        walked=("sums",),
        tests=Counts(CMP=batch) + tests_of(read, padding_idx),
        sums=dots(found.kept * columns),
    )


def tied_cross(
    ids: torch.Tensor,
    e: torch.Tensor,
    a: torch.Tensor,
    g: torch.Tensor,
    *,
    padding_idx: int | None = None,
    found: IdStatistics | None = None,
    **_: Any,
) -> Itemised:
    """Count ``ghost.tied_cross``."""
    found = IdStatistics.of(ids, padding_idx) if found is None else found
    batch, rows, columns = a.shape
    lines, pairs = found.kept + batch * rows, found.kept * rows
    return itemised(
        [
            (ids.numel(), ids.dtype),
            (found.kept * columns + a.numel() + found.rows * rows, e.dtype),
        ],
        [(batch, WIDE)],
        walked=("inner_products", "norms") if padding_idx is None else (),
        tests=tests_of(ids.numel(), padding_idx),
        widened=widened(e.dtype, lines * columns + pairs),
        inner_products=dots(pairs * columns) + dots(pairs),
        norms=dots(lines * columns) + Counts(SQRT=lines),
        rounding_bound=pairs * Counts(AND=1, MUL=2, ADD=1) + batch * Counts(MUL=1, ADD=1),
    )


FORMS: dict[str, Form] = {
    "ghost.embedding_norm": embedding_norm,
    "ghost.embedding_sum": embedding_sum,
    "ghost.tied_cross": tied_cross,
}
