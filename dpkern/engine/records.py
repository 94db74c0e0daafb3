"""What one use of a parameter leaves behind: enough for its per-sample gradient's norm and sum.

A record belongs to B samples and one gradient shape. ``square()`` gives upper bounds of the squared
norms, float64 ``[B]``; ``add_sum(factors, out)`` adds ``sum_b factors_b grad_b``; ``per_sample()``
writes the gradients ``[B, *shape]`` out. Several records of one parameter are merged before any
norm is taken, so that cross terms are exact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops import clip, ghost

_WIDE = (torch.float32, torch.float64)


def wide(tensor: Tensor) -> Tensor:
    """Contiguous, in the dtype of norms and sums: float64 stays, everything else is float32."""
    if tensor.dtype in _WIDE and tensor.is_contiguous():
        return tensor
    return tensor.detach().to(clip.sum_dtype(tensor.dtype)).contiguous()


SIXTEEN_BITS = {torch.bfloat16, torch.float16}
KEPT_IN_16_BITS = {"cuda"}
"""Types of devices whose products take operands of 16 bits as they are; elsewhere they are widened
for as long as an op runs."""


def operands(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's input and output gradient, contiguous and in the dtype in which products read."""
    kept = x.device.type in KEPT_IN_16_BITS and x.dtype is g.dtype and x.dtype in SIXTEEN_BITS
    return (x.detach().contiguous(), g.detach().contiguous()) if kept else (wide(x), wide(g))


class Record(ABC):
    """One use, or several merged ones, of a parameter of this shape."""

    shape: tuple[int, ...]

    @abstractmethod
    def square(self) -> Tensor:
        """Upper bounds of the squared norms, float64 ``[B]``."""

    @abstractmethod
    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        """``out += sum_b factors_b grad_b``; a factor of zero drops the sample altogether."""

    @abstractmethod
    def per_sample(self) -> Tensor:
        """The gradients, ``[B, *shape]``."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """B."""


@dataclass
class Explicit(Record):
    """Per-sample gradients that exist anyway, ``[B, *shape]``."""

    grads: Tensor
    squares: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.grads.shape[1:])

    @property
    def batch(self) -> int:
        return int(self.grads.shape[0])

    def square(self) -> Tensor:
        if self.squares is not None:
            return self.squares
        return ghost.explicit_norm([wide_dense(self.grads)])

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        ghost.contract([wide_dense(self.grads)], factors, [out])

    def per_sample(self) -> Tensor:
        return self.grads


@dataclass
class Linear(Record):
    """``grad_b = sum_t g[b, t] (x) a[b, t]``: ``a [B, T, d]``, ``g [B, T, p]``."""

    a: Tensor
    g: Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return int(self.g.shape[2]), int(self.a.shape[2])

    @property
    def batch(self) -> int:
        return int(self.a.shape[0])

    @property
    def held_bytes(self) -> int:
        """Memory of the operands, which keeping the gradients would free."""
        return self.a.nbytes + self.g.nbytes

    @property
    def gradient_bytes(self) -> int:
        """Memory that the kept gradients would take."""
        return self.batch * math.prod(self.shape) * clip.sum_dtype(self.g.dtype).itemsize

    def square(self) -> Tensor:
        return ghost.linear_norm(*operands(self.a, self.g))

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        ghost.linear_sum(*operands(self.a, self.g), factors, out)

    def per_sample(self) -> Tensor:
        return self.kept().grads

    def kept(self) -> Explicit:
        """The gradients written out, with their squared norms."""
        return Explicit(*ghost.linear_gradient(*operands(self.a, self.g)))


@dataclass
class Convolution(Record):
    """A convolution with input ``x [B, ci, *S]`` and output gradient ``g [B, co, *O]``."""

    x: Tensor
    g: Tensor
    kernel_size: tuple[int, ...]
    geometry: dict[str, Any] = field(default_factory=dict)
    """``stride``, ``padding``, ``dilation`` (tuples) and ``groups``."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        groups = int(self.geometry["groups"])
        return int(self.g.shape[1]), int(self.x.shape[1]) // groups, *self.kernel_size

    @property
    def batch(self) -> int:
        return int(self.x.shape[0])

    @property
    def held_bytes(self) -> int:
        """Memory of the operands, which keeping the gradients would free."""
        return self.x.nbytes + self.g.nbytes

    @property
    def gradient_bytes(self) -> int:
        """Memory that the kept gradients would take."""
        return self.batch * math.prod(self.shape) * clip.sum_dtype(self.g.dtype).itemsize

    @property
    def _options(self) -> dict[str, Any]:
        return {"kernel_size": self.kernel_size, **self.geometry}

    def square(self) -> Tensor:
        return ghost.conv_norm(*operands(self.x, self.g), **self._options)

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        ghost.conv_sum(*operands(self.x, self.g), factors, out, **self._options)

    def per_sample(self) -> Tensor:
        return self.kept().grads

    def kept(self) -> Explicit:
        """The gradients written out, with their squared norms."""
        return Explicit(*ghost.conv_gradient(*operands(self.x, self.g), **self._options))


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

    def square(self) -> Tensor:
        return ghost.embedding_norm(self.ids, wide(self.g), padding_idx=self.padding_idx)

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        ghost.embedding_sum(self.ids, wide(self.g), factors, out, padding_idx=self.padding_idx)

    def per_sample(self) -> Tensor:
        g = wide(self.g)
        if self.padding_idx is not None:
            g = g.masked_fill((self.ids == self.padding_idx)[:, :, None], 0)
        grads = g.new_zeros((self.batch, *self.shape))
        index = self.ids[:, :, None].expand(-1, -1, g.shape[2])
        return grads.scatter_add_(1, index, g)


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


def merge(records: Sequence[Record]) -> Record:
    """One record for all uses of a parameter."""
    if len(records) == 1:
        return records[0]
    kinds = {type(record) for record in records}
    same_shape = len({record.shape for record in records}) == 1
    if kinds == {Linear} and same_shape:
        return _merged_linear([r for r in records if isinstance(r, Linear)])
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


def wide_dense(grads: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As ``wide``, but any dense order behind the batch dimension may stay."""
    grads = grads.detach().to(dtype or clip.sum_dtype(grads.dtype))
    return grads if grads.is_contiguous() or _is_dense(grads) else grads.contiguous()


def _is_dense(grads: Tensor) -> bool:
    """Whether samples follow each other without gaps, each in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(
        (s, n) for s, n in zip(grads.stride()[1:], grads.shape[1:], strict=True) if n != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return len(grads) > 0 and grads.stride(0) == expected
