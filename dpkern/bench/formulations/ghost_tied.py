"""Sums of whole numbers of tables, and of weights that embed and project, with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._formulation import Arguments, Formulation
from .ghost_rows import Repeats

Call = Callable[[], Any]


def _without_padding(args: Arguments) -> bool:
    return args["padding_idx"] is None


def _whole_by_pairs(args: Arguments) -> Call:
    """Return the sum by rows of pairs of sample and id, which are added up before they are cut."""
    ids, g, factors, out = args["ids"], args["g"], args["factors"], args["out"]
    size = len(out)
    samples = torch.arange(len(ids))[:, None]

    def call() -> None:
        found, places = (samples * size + ids).unique(return_inverse=True)
        sums = g.new_zeros(len(found), g.shape[2])
        sums.index_add_(0, places.flatten(), g.flatten(0, 1))
        terms = sums.mul_(factors[found // size][:, None]).to(torch.int32)
        out.index_add_(0, found % size, terms)

    return call


def _whole_by_sample(args: Arguments) -> Call:
    ids, g, factors, out = args["ids"], args["g"], args["factors"], args["out"]

    def call() -> None:
        for one, grads, factor in zip(ids, g, factors, strict=True):
            rows, places = one.unique(return_inverse=True)
            sums = grads.new_zeros(len(rows), grads.shape[1]).index_add_(0, places, grads)
            out.index_add_(0, rows, (sums * factor).to(torch.int32))

    return call


def _whole_by_repeats(args: Arguments) -> Call:
    """Return the sum of rows, those of repeated ids added up before they are cut."""
    g, factors, out, ids = args["g"], args["factors"][:, None, None], args["out"], args["ids"]
    repeats, scaled = Repeats(ids), torch.empty_like(g)
    rows, whole, flat = scaled.flatten(0, 1), torch.empty_like(g, dtype=torch.int32), ids.flatten()

    def call() -> None:
        torch.mul(g, factors, out=scaled)
        again, last = repeats.find()
        if len(again):
            rows.index_add_(0, last, rows[again])
            rows[again] = 0
        out.index_add_(0, flat, whole.copy_(scaled).flatten(0, 1))

    return call


def _tied(args: Arguments) -> Call:
    ids, e, a, g, factors, out = (args[n] for n in ("ids", "e", "a", "g", "factors", "out"))
    rows = (torch.arange(len(ids))[:, None] * len(out) + ids).flatten()
    grads = torch.empty(len(ids), *out.shape)
    whole = torch.empty(grads.shape, dtype=torch.int32)

    def call() -> None:
        torch.bmm(g.mT, a, out=grads)
        grads.flatten(0, 1).index_add_(0, rows, e.flatten(0, 1))
        whole.copy_(grads.mul_(factors[:, None, None]))
        out.add_(whole.sum(0, dtype=torch.int32))

    return call


def _tied_by_sample(args: Arguments) -> Call:
    ids, e, a, g, factors, out = (args[n] for n in ("ids", "e", "a", "g", "factors", "out"))
    grad, whole = torch.empty(out.shape), torch.empty_like(out)

    def call() -> None:
        for b, factor in enumerate(factors):
            torch.mm(g[b].t(), a[b], out=grad)
            grad.index_add_(0, ids[b], e[b])
            out.add_(whole.copy_(grad.mul_(factor)))

    return call


def _cross(args: Arguments) -> Call:
    ids, e, a, g = (args[n] for n in ("ids", "e", "a", "g"))
    index = ids[:, None, :].expand(-1, a.shape[1], -1)
    return lambda: (g.gather(2, index) * torch.bmm(a, e.mT)).sum((1, 2))


def _cross_of_sums(args: Arguments) -> Call:
    """Return the products with the rows of the projection's gradient that the embedding reads."""
    ids, e, a, g = (args[n] for n in ("ids", "e", "a", "g"))
    index = ids[:, None, :].expand(-1, a.shape[1], -1)
    return lambda: torch.linalg.vecdot(torch.bmm(g.gather(2, index).mT, a).flatten(1), e.flatten(1))


FORMULATIONS = {
    "ghost.embedding_integer_sum": (
        Formulation("repeats apart", _whole_by_repeats, _without_padding),
        Formulation("unique pairs", _whole_by_pairs, _without_padding),
        Formulation("loop of samples", _whole_by_sample, _without_padding),
    ),
    "ghost.tied_cross": (
        Formulation("gather, bmm", _cross, _without_padding),
        Formulation("rows that are read", _cross_of_sums, _without_padding),
    ),
    "ghost.tied_integer_sum": (
        Formulation("bmm, index_add", _tied, _without_padding),
        Formulation("loop of samples", _tied_by_sample, _without_padding),
    ),
}
