"""Per-sample gradients of embedding tables, also of those that serve as a linear layer too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import clip, ghost
from .per_sample_gradients import LinearGradients, PerSampleGradients, rows_l1, to_sum_dtype


@dataclass
class EmbeddingGradients(PerSampleGradients):
    """Gradients of an embedding table: ``grad_b[v] = sum over t with ids[b, t] = v of g[b, t]``.

    ``ids [B, T]`` are the looked-up rows, ``g [B, T, d]`` the output gradient; row ``padding_idx``
    has the gradient zero.
    """

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

    def squared_norms(self) -> Tensor:
        return ghost.embedding_norm(self.ids, to_sum_dtype(self.g), padding_idx=self.padding_idx)

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        ghost.embedding_sum(
            self.ids, to_sum_dtype(self.g), factors, out, padding_idx=self.padding_idx
        )

    def per_sample(self) -> Tensor:
        g = self._used
        grads = g.new_zeros((self.batch, *self.shape))
        index = self.ids[:, :, None].expand(-1, -1, g.shape[2])
        return grads.scatter_add_(1, index, g)

    def part(self, samples: slice) -> EmbeddingGradients:
        return EmbeddingGradients(self.ids[samples], self.g[samples], self.rows, self.padding_idx)

    @property
    def dtype(self) -> torch.dtype:
        return clip.sum_dtype(self.g.dtype)

    def rounding_terms(self) -> tuple[int, Tensor]:
        return int(self.ids.shape[1]), rows_l1(self._used.flatten(1))

    @property
    def _used(self) -> Tensor:
        """The output gradient, with zeros at the padding."""
        g = to_sum_dtype(self.g)
        if self.padding_idx is None:
            return g
        return g.masked_fill((self.ids == self.padding_idx)[:, :, None], 0)


@dataclass
class TiedGradients(PerSampleGradients):
    """Gradients of one weight that is both an embedding table and a linear layer."""

    table: EmbeddingGradients
    head: LinearGradients

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.table.shape

    @property
    def batch(self) -> int:
        return self.table.batch

    @property
    def device(self) -> torch.device:
        return self.table.device

    def squared_norms(self) -> Tensor:
        """Return ``||E + L||^2 = ||E||^2 + ||L||^2 + 2 <E, L>``; no term is underestimated."""
        ids, table, head = self.table.ids, self.table, self.head
        cross = ghost.tied_cross(
            ids,
            to_sum_dtype(table.g),
            to_sum_dtype(head.a),
            to_sum_dtype(head.g),
            padding_idx=table.padding_idx,
        )
        return (table.squared_norms() + head.squared_norms() + 2 * cross).clamp(min=0)

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        self.table.add_sum(factors, out)
        self.head.add_sum(factors, out)

    def per_sample(self) -> Tensor:
        return self.table.per_sample() + self.head.per_sample()

    def part(self, samples: slice) -> TiedGradients:
        return TiedGradients(self.table.part(samples), self.head.part(samples))

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.table.dtype, self.head.dtype)

    def rounding_terms(self) -> tuple[int, Tensor]:
        (one, tables), (other, heads) = self.table.rounding_terms(), self.head.rounding_terms()
        return one + other, tables + heads
