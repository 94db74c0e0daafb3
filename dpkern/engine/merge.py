"""Merge the gradients of several uses of a parameter, so that cross terms are exact."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .per_sample_gradients import (
    CirculantGradients,
    ExplicitGradients,
    LinearGradients,
    PerSampleGradients,
    operands,
    to_sum_dtype,
)
from .tables import EmbeddingGradients, TiedGradients


def merge(records: Sequence[PerSampleGradients]) -> PerSampleGradients:
    """Return one object for the gradients of all uses of a parameter."""
    if len(records) == 1:
        return records[0]
    kinds = {type(record) for record in records}
    same_shape = len({record.shape for record in records}) == 1
    if kinds == {LinearGradients} and same_shape:
        return _merged_linear([r for r in records if isinstance(r, LinearGradients)])
    if kinds == {CirculantGradients} and same_shape:
        return _merged_circulant([r for r in records if isinstance(r, CirculantGradients)])
    tables = [record for record in records if isinstance(record, EmbeddingGradients)]
    if same_shape and len({table.padding_idx for table in tables}) == 1:
        table = _merged_embedding(tables)
        if kinds == {EmbeddingGradients}:
            return table
        if kinds == {LinearGradients, EmbeddingGradients}:
            return TiedGradients(
                table, _merged_linear([r for r in records if isinstance(r, LinearGradients)])
            )
    total = records[0].per_sample().clone()
    for record in records[1:]:
        total += record.per_sample().reshape(total.shape)
    return ExplicitGradients(total)


def _merged_linear(records: Sequence[LinearGradients]) -> LinearGradients:
    if len(records) == 1:
        return records[0]
    # Where dtypes differ, torch.cat takes both to the wider one.
    inputs, gradients = zip(*(operands(r.a, r.g) for r in records), strict=True)
    return LinearGradients(torch.cat(inputs, dim=1), torch.cat(gradients, dim=1))


def _merged_embedding(records: Sequence[EmbeddingGradients]) -> EmbeddingGradients:
    if len(records) == 1:
        return records[0]
    return EmbeddingGradients(
        torch.cat([r.ids for r in records], dim=1),
        torch.cat([to_sum_dtype(r.g) for r in records], dim=1),
        records[0].rows,
        records[0].padding_idx,
    )


def _merged_circulant(records: Sequence[CirculantGradients]) -> CirculantGradients:
    inputs, gradients = zip(*(operands(r.x, r.g) for r in records), strict=True)
    return CirculantGradients(torch.cat(inputs, dim=1), torch.cat(gradients, dim=1))
