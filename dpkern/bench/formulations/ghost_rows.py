"""Norms, factors and sums of tables and of gradients that are there, with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._formulation import Arguments, Formulation

Call = Callable[[], Any]

# tables


def _table_gram(args: Arguments) -> Call:
    ids, g = args["ids"], args["g"]
    return lambda: (torch.bmm(g, g.mT) * (ids[:, :, None] == ids[:, None, :])).sum((1, 2))


def _table_by_sample(args: Arguments) -> Call:
    ids, g = args["ids"], args["g"]

    def call() -> Any:
        found = []
        for one, grads in zip(ids, g, strict=True):
            rows, places = one.unique(return_inverse=True)
            sums = grads.new_zeros(len(rows), grads.shape[1]).index_add_(0, places, grads)
            found.append(sums.square().sum())
        return torch.stack(found)

    return call


def _table_by_pairs(args: Arguments) -> Call:
    """Return the norms by rows of pairs of sample and id, which are summed at once."""
    ids, g = args["ids"], args["g"]
    batch = len(ids)

    def call() -> Any:
        samples = torch.arange(batch)[:, None]
        pairs = ids * batch + samples
        found, places = pairs.unique(return_inverse=True)
        sums = g.new_zeros(len(found), g.shape[2])
        sums.index_add_(0, places.flatten(), g.flatten(0, 1))
        squares = g.new_zeros(batch)
        return squares.index_add_(0, found % batch, sums.square().sum(1))

    return call


class Repeats:
    """Tokens whose id stands in their sample again, and the token of that id that counts."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids, size = ids, int(ids.max()) + 1
        self.first = torch.arange(len(ids))[:, None] * size
        self.token = torch.arange(ids.numel())
        self.place = torch.empty(len(ids) * size, dtype=torch.int64)

    def find(self) -> tuple[Any, Any]:
        """Return tokens, and the last one of the same sample and id for each."""
        keys = (self.ids + self.first).flatten()
        self.place[keys] = self.token
        last = self.place[keys]
        again = (last != self.token).nonzero()[:, 0]
        return again, last[again]


def _table_by_repeats(args: Arguments) -> Call:
    """Return the norms of all rows, corrected where ids repeat: in large tables few do."""
    rows, repeats = args["g"].flatten(0, 1), Repeats(args["ids"])
    flat, positions = args["g"].flatten(1), args["ids"].shape[1]

    def call() -> Any:
        squares = torch.linalg.vector_norm(flat, dim=1).square_()
        again, last = repeats.find()
        if len(again):
            heads, places = last.unique(return_inverse=True)
            head, more = rows[heads], rows[again]
            total = head.index_add(0, places, more)
            more_squares = torch.linalg.vector_norm(more, dim=1).square_()
            joined = (total + head).mul_(total - head).sum(1)
            squares.index_add_(0, heads // positions, joined)
            squares.index_add_(0, again // positions, more_squares, alpha=-1)
        return squares

    return call


def _table_index_add(args: Arguments) -> Call:
    ids, g, out = args["ids"].flatten(), args["g"], args["out"]
    factors, scaled = args["factors"][:, None, None], torch.empty_like(args["g"])
    rows = scaled.flatten(0, 1)

    def call() -> None:
        torch.mul(g, factors, out=scaled)
        out.index_add_(0, ids, rows)

    return call


def _table_backward(args: Arguments) -> Call:
    ids, g, out = args["ids"], args["g"], args["out"]
    factors = args["factors"][:, None, None]

    def call() -> None:
        made = torch.ops.aten.embedding_dense_backward(g * factors, ids, len(out), -1, False)
        out.add_(made)

    return call


def _without_padding(args: Arguments) -> bool:
    return args["padding_idx"] is None


# gradients that are there


def _explicit_norms(args: Arguments) -> Call:
    rows = [g.flatten(1) for g in args["grads"]]
    norm = torch.linalg.vector_norm
    return lambda: norm(torch.stack([norm(part, dim=1) for part in rows]), dim=0).square()


def _explicit_norms_apart(args: Arguments) -> Call:
    rows = [g.flatten(1) for g in args["grads"]]

    def call() -> Any:
        total = torch.linalg.vector_norm(rows[0], dim=1).square_()
        for part in rows[1:]:
            total.add_(torch.linalg.vector_norm(part, dim=1).square_())
        return total

    return call


def _explicit_squares(args: Arguments) -> Call:
    rows = [g.flatten(1) for g in args["grads"]]
    return lambda: torch.stack([torch.einsum("bi,bi->b", p, p) for p in rows]).sum(0)


def _contracted(args: Arguments) -> Call:
    parts = [(g.flatten(1).t(), o.view(-1)) for g, o in _pairs(args)]
    factors = args["factors"]

    def call() -> None:
        for rows, out in parts:
            out.addmv_(rows, factors)

    return call


def _contracted_by_einsum(args: Arguments) -> Call:
    factors = args["factors"]

    def call() -> None:
        for grads, out in _pairs(args):
            out.add_(torch.einsum("b...,b->...", grads, factors))

    return call


def _contracted_whole(args: Arguments) -> Call:
    factors = args["factors"]

    def call() -> None:
        for grads, out in _pairs(args):
            scaled = grads * factors.view(-1, *(1,) * (grads.dim() - 1))
            out.add_(scaled.to(torch.int32).sum(0, dtype=torch.int32))

    return call


def _contracted_whole_by_rows(args: Arguments) -> Call:
    """Return the sum row by row, in buffers that stay in a core's cache."""
    parts = [
        (grads.flatten(1), out.view(-1), scaled, torch.empty_like(scaled, dtype=torch.int32))
        for grads, out in _pairs(args)
        for scaled in [torch.empty(out.numel(), dtype=grads.dtype)]
    ]
    factors = args["factors"]

    def call() -> None:
        for rows, out, scaled, whole in parts:
            for row, factor in zip(rows, factors, strict=True):
                out.add_(whole.copy_(torch.mul(row, factor, out=scaled)))

    return call


def _contracted_whole_in_buffers(args: Arguments) -> Call:
    parts = [
        (rows, out.view(-1), torch.empty_like(rows), torch.empty_like(rows, dtype=torch.int32))
        for grads, out in _pairs(args)
        for rows in [grads.flatten(1)]
    ]
    factors = args["factors"][:, None]

    def call() -> None:
        for rows, out, scaled, whole in parts:
            whole.copy_(torch.mul(rows, factors, out=scaled))
            out.add_(whole.sum(0, dtype=torch.int32))

    return call


def _pairs(args: Arguments) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(args["grads"], args["outs"], strict=True))


def _factors(args: Arguments) -> Call:
    squares, bound = args["squares"], args["max_grad_norm"]

    def call() -> Any:
        norms = torch.stack(squares).sum(0).sqrt_()
        return (bound / norms).clamp_(max=1.0).to(args["dtype"]), norms

    return call


def _factors_of_sum(args: Arguments) -> Call:
    squares, bound = args["squares"], args["max_grad_norm"]

    def call() -> Any:
        norms = torch.sqrt(sum(squares[1:], squares[0]))
        return torch.clamp(bound / norms, max=1.0).to(args["dtype"]), norms

    return call


def _factors_in_their_dtype(args: Arguments) -> Call:
    squares, bound, dtype = args["squares"], args["max_grad_norm"], args["dtype"]

    def call() -> Any:
        norms = torch.sqrt(sum(squares[1:], squares[0]))
        return norms.to(dtype).reciprocal_().mul_(bound).clamp_(max=1.0), norms

    return call


FORMULATIONS = {
    "ghost.embedding_norm": (
        Formulation("repeats apart", _table_by_repeats, _without_padding),
        Formulation("masked Gram", _table_gram, _without_padding),
        Formulation("loop of samples", _table_by_sample, _without_padding),
        Formulation("unique pairs", _table_by_pairs, _without_padding),
    ),
    "ghost.embedding_sum": (
        Formulation("index_add", _table_index_add, _without_padding),
        Formulation("dense backward", _table_backward, _without_padding),
    ),
    "ghost.explicit_norm": (
        Formulation("vector_norm", _explicit_norms),
        Formulation("vector_norm, squares", _explicit_norms_apart),
        Formulation("einsum", _explicit_squares),
    ),
    "ghost.contract": (
        Formulation("addmv", _contracted),
        Formulation("einsum", _contracted_by_einsum),
    ),
    "ghost.explicit_integer_sum": (
        Formulation("mul, int32", _contracted_whole, compiles=True),
        Formulation("mul, int32, buffers", _contracted_whole_in_buffers),
        Formulation("mul, int32, row by row", _contracted_whole_by_rows),
    ),
    "ghost.clip_factors": (
        Formulation("stack, sum", _factors),
        Formulation("sum", _factors_of_sum),
        Formulation("sum, reciprocal", _factors_in_their_dtype),
    ),
}
