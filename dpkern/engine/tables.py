"""What a use of an embedding table leaves behind, also of one that is a linear layer as well."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import clip, ghost
from .records import Linear, Record, rows_l1, wide


@dataclass
class Embedding(Record):
    """``grad_b[v] = sum over t with ids[b, t] = v of g[b, t]``; ``padding_idx`` gets nothing."""

    ids: Tensor
    g: Tensor
    rows: int
    padding_idx: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.rows, int(self.g.shape[2])

    @property
    def batch(self) -> int:
        return int(self.ids.shape[0])

    @property
    def device(self) -> torch.device:
        return self.g.device

    def square(self) -> Tensor:
        return ghost.embedding_norm(self.ids, wide(self.g), padding_idx=self.padding_idx)

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        ghost.embedding_sum(self.ids, wide(self.g), factors, out, padding_idx=self.padding_idx)

    def per_sample(self) -> Tensor:
        g = self._used
        grads = g.new_zeros((self.batch, *self.shape))
        index = self.ids[:, :, None].expand(-1, -1, g.shape[2])
        return grads.scatter_add_(1, index, g)

    def part(self, samples: slice) -> Embedding:
        return Embedding(self.ids[samples], self.g[samples], self.rows, self.padding_idx)

    @property
    def dtype(self) -> torch.dtype:
        return clip.sum_dtype(self.g.dtype)

    def products(self) -> tuple[int, Tensor]:
        return int(self.ids.shape[1]), rows_l1(self._used.flatten(1))

    @property
    def _used(self) -> Tensor:
        """``g`` without what goes to the padding."""
        g = wide(self.g)
        if self.padding_idx is None:
            return g
        return g.masked_fill((self.ids == self.padding_idx)[:, :, None], 0)


@dataclass
class Tied(Record):
    """One weight that is both an embedding table and a linear layer, as in language models."""

    table: Embedding
    head: Linear

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.table.shape

    @property
    def batch(self) -> int:
        return self.table.batch

    @property
    def device(self) -> torch.device:
        return self.table.device

    def square(self) -> Tensor:
        """``||E + L||^2 = ||E||^2 + ||L||^2 + 2 <E, L>``; no part is ever under-reported."""
        ids, table, head = self.table.ids, self.table, self.head
        cross = ghost.tied_cross(
            ids, wide(table.g), wide(head.a), wide(head.g), padding_idx=table.padding_idx
        )
        return (table.square() + head.square() + 2 * cross).clamp(min=0)

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        self.table.add_sum(factors, out)
        self.head.add_sum(factors, out)

    def per_sample(self) -> Tensor:
        return self.table.per_sample() + self.head.per_sample()

    def part(self, samples: slice) -> Tied:
        return Tied(self.table.part(samples), self.head.part(samples))

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.table.dtype, self.head.dtype)

    def products(self) -> tuple[int, Tensor]:
        (one, tables), (other, heads) = self.table.products(), self.head.products()
        return one + other, tables + heads
