"""Count what an op's cost depends on besides shapes: samples that are used, ids that occur.

A cost reads these values, which waits for a device; of a meta tensor, which has none, it supposes
that every sample is used and every id is another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def count_used_samples(factors: torch.Tensor) -> int:
    """Return how many samples a weighted sum reads: those whose factor is not 0."""
    return factors.numel() if factors.is_meta else int(torch.count_nonzero(factors))


@dataclass(frozen=True)
class IdStatistics:
    """Statistics of the ids ``[B, T]`` of a batch, without those that are ignored.

    Attributes:
        kept: positions.
        rows: different ids within their samples, summed over samples.
        shared: positions whose id another one of the sample has too.
        repeated: ids that occur several times in their sample, summed over samples.
        table: different ids in the whole batch.
    """

    kept: int
    rows: int
    shared: int
    repeated: int
    table: int

    @staticmethod
    def of(ids: torch.Tensor, padding_idx: int | None) -> IdStatistics:
        """Return the statistics of these ids."""
        if ids.is_meta:
            return IdStatistics(ids.numel(), ids.numel(), 0, 0, ids.numel())
        kept = torch.ones_like(ids, dtype=torch.bool) if padding_idx is None else ids != padding_idx
        sample = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)[kept]
        pairs = torch.stack((sample, ids[kept]))
        _, times = torch.unique(pairs, dim=1, return_counts=True)
        several = times[times > 1]
        return IdStatistics(
            kept=int(kept.sum()),
            rows=len(times),
            shared=int(several.sum()),
            repeated=len(several),
            table=len(torch.unique(ids[kept])),
        )


__all__ = ["IdStatistics", "count_used_samples"]
