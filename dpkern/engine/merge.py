"""Several records of one parameter as one, so that cross terms are exact."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .records import Circulant, Explicit, Linear, Record, operands, wide
from .tables import Embedding, Tied


def merge(records: Sequence[Record]) -> Record:
    """One record for all uses of a parameter."""
    if len(records) == 1:
        return records[0]
    kinds = {type(record) for record in records}
    same_shape = len({record.shape for record in records}) == 1
    if kinds == {Linear} and same_shape:
        return _merged_linear([r for r in records if isinstance(r, Linear)])
    if kinds == {Circulant} and same_shape:
        return _merged_circulant([r for r in records if isinstance(r, Circulant)])
    tables = [record for record in records if isinstance(record, Embedding)]
    if same_shape and len({table.padding_idx for table in tables}) == 1:
        table = _merged_embedding(tables)
        if kinds == {Embedding}:
            return table
        if kinds == {Linear, Embedding}:
            return Tied(table, _merged_linear([r for r in records if isinstance(r, Linear)]))
    total = records[0].per_sample().clone()
    for record in records[1:]:
        total += record.per_sample().reshape(total.shape)
    return Explicit(total)


def _merged_linear(records: Sequence[Linear]) -> Linear:
    if len(records) == 1:
        return records[0]
    # Where they differ, torch.cat takes both to the wider dtype.
    inputs, gradients = zip(*(operands(r.a, r.g) for r in records), strict=True)
    return Linear(torch.cat(inputs, dim=1), torch.cat(gradients, dim=1))


def _merged_embedding(records: Sequence[Embedding]) -> Embedding:
    if len(records) == 1:
        return records[0]
    return Embedding(
        torch.cat([r.ids for r in records], dim=1),
        torch.cat([wide(r.g) for r in records], dim=1),
        records[0].rows,
        records[0].padding_idx,
    )


def _merged_circulant(records: Sequence[Circulant]) -> Circulant:
    inputs, gradients = zip(*(operands(r.x, r.g) for r in records), strict=True)
    return Circulant(torch.cat(inputs, dim=1), torch.cat(gradients, dim=1))
