"""Norms, gradients and sums of linear layers with torch: einsum, Gram, products of batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...ops.ghost._operands import rounded_operands
from ._formulation import Arguments, Formulation

Call = Callable[[], Any]
TERMS = 16
"""Outer products of one expression."""


def flat_squares(grads: torch.Tensor) -> Any:
    return torch.linalg.vector_norm(grads.flatten(1), dim=1).square()


# linear layers


def _gram(args: Arguments) -> Call:
    a, g = args["a"], args["g"]
    return lambda: (torch.bmm(a, a.mT) * torch.bmm(g, g.mT)).sum((1, 2))


def _rank_one(args: Arguments) -> Call:
    a, g = args["a"].flatten(1), args["g"].flatten(1)
    return lambda: a.square().sum(1) * g.square().sum(1)


def _rank_one_norms(args: Arguments) -> Call:
    a, g = args["a"].flatten(1), args["g"].flatten(1)
    norm = torch.linalg.vector_norm
    return lambda: (norm(a, dim=1) * norm(g, dim=1)).square_()


def _gram_in_buffers(args: Arguments) -> Call:
    a, g = args["a"], args["g"]
    batch, positions = a.shape[:2]
    first, second = (a.new_empty(batch, positions, positions) for _ in range(2))

    def call() -> Any:
        torch.bmm(a, a.mT, out=first)
        torch.bmm(g, g.mT, out=second)
        return torch.linalg.vecdot(first.flatten(1), second.flatten(1))

    return call


def _direct_in_buffer(args: Arguments) -> Call:
    a, g = args["a"], args["g"]
    made = a.new_empty(len(a), g.shape[2], a.shape[2])
    return lambda: flat_squares(torch.bmm(g.mT, a, out=made))


def _direct(args: Arguments) -> Call:
    a, g = args["a"], args["g"]
    return lambda: flat_squares(torch.bmm(g.mT, a))


def _gradients(args: Arguments) -> Call:
    a, g = args["a"], args["g"]

    def call() -> Any:
        grads = torch.bmm(g.mT, a)
        return grads, flat_squares(grads)

    return call


def _gradients_in_buffer(args: Arguments) -> Call:
    a, g = args["a"], args["g"]
    made = a.new_empty(len(a), g.shape[2], a.shape[2])

    def call() -> Any:
        torch.bmm(g.mT, a, out=made)
        return made, flat_squares(made)

    return call


def _gradients_by_sample(args: Arguments) -> Call:
    """Return each gradient's square while it is in the cache."""
    a, g = args["a"], args["g"]
    made, squares = a.new_empty(len(a), g.shape[2], a.shape[2]), a.new_empty(len(a))
    parts = list(zip(a, g.mT, made, made.flatten(1), squares, strict=True))

    def call() -> Any:
        for one, other, grad, row, square in parts:
            torch.mm(other, one, out=grad)
            torch.dot(row, row, out=square)
        return made, squares

    return call


def _gradients_by_einsum(args: Arguments) -> Call:
    a, g = args["a"], args["g"]

    def call() -> Any:
        grads = torch.einsum("bti,bto->boi", a, g)
        return grads, torch.einsum("boi,boi->b", grads, grads)

    return call


def _norms_by_gradients(args: Arguments) -> Call:
    pairs = list(zip(args["a"], args["g"], strict=True))

    def call() -> torch.Tensor:
        each = [torch.bmm(g.mT, a).double().square().sum((1, 2)) for a, g in pairs]
        return torch.stack(each).sum(0)

    return call


def _norms_by_grams(args: Arguments) -> Call:
    pairs = list(zip(args["a"], args["g"], strict=True))

    def call() -> torch.Tensor:
        each = [(a @ a.mT * (g @ g.mT)).double().sum((1, 2)) for a, g in pairs]
        return torch.stack(each).sum(0)

    return call


def _rounded(args: Arguments) -> Call:
    a, g = args["a"], args["g"]

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        grads = torch.bmm(g.mT, a)
        return grads, grads.double().square().sum((1, 2))

    return call


def _rounded_sum(args: Arguments) -> Call:
    factors, pairs = args["factors"], zip(args["grads"], args["outs"], strict=True)
    parts = [(part.flatten(1).to(out.dtype).t(), out.view(-1)) for part, out in pairs]

    def call() -> None:
        for rows, out in parts:
            out.addmv_(rows, factors)

    return call


def _rounded_sum_by_einsum(args: Arguments) -> Call:
    factors, pairs = args["factors"], list(zip(args["grads"], args["outs"], strict=True))

    def call() -> None:
        for part, out in pairs:
            out.add_(torch.einsum("b,b...->...", factors, part.to(out.dtype)))

    return call


def _weighted(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"], args["out"]
    rows = a.flatten(0, 1)
    return lambda: out.addmm_((g * factors[:, None, None]).flatten(0, 1).t(), rows)


def _weighted_inputs(args: Arguments) -> Call:
    a, factors, out = args["a"], args["factors"][:, None, None], args["out"]
    rows, scaled = args["g"].flatten(0, 1).t(), torch.empty_like(a)
    return lambda: out.addmm_(rows, torch.mul(a, factors, out=scaled).flatten(0, 1))


def _weighted_by_einsum(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"], args["out"]
    return lambda: out.add_(torch.einsum("bto,bti,b->oi", g, a, factors))


def _whole(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"], args["out"]

    def call() -> None:
        grads = torch.bmm(g.mT * factors[:, None, None], a)
        out.add_(grads.to(torch.int32).sum(0, dtype=torch.int32))

    return call


def _whole_by_sample(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"], args["out"]

    def call() -> None:
        for one, other, factor in zip(a, g, factors, strict=True):
            out.add_(torch.mm((other * factor).t(), one).to(torch.int32))

    return call


def _whole_in_buffers(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"][:, None, None], args["out"]
    scaled, made = torch.empty_like(g), a.new_empty(len(a), *out.shape)
    whole = torch.empty_like(made, dtype=torch.int32)

    def call() -> None:
        torch.bmm(torch.mul(g, factors, out=scaled).mT, a, out=made)
        out.add_(whole.copy_(made).sum(0, dtype=torch.int32))

    return call


def _norms_of_rounded(args: Arguments) -> Call:
    a, g = args["a"], args["g"]

    def call() -> torch.Tensor:
        alpha, gamma, units = rounded_operands(a, g)
        return torch.bmm(gamma.mT, alpha).flatten(1).square().sum(1) * units.square()

    return call


def _gram_of_rounded(args: Arguments) -> Call:
    a, g = args["a"], args["g"]

    def call() -> torch.Tensor:
        alpha, gamma, units = rounded_operands(a, g)
        products = torch.bmm(alpha, alpha.mT) * torch.bmm(gamma, gamma.mT)
        return products.sum((1, 2)) * units.square()

    return call


def _whole_by_sample_in_buffers(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"][:, None, None], args["out"]
    scaled, made, whole = torch.empty_like(g), a.new_empty(out.shape), torch.empty_like(out)
    parts = list(zip(a, scaled.mT, strict=True))

    def call() -> None:
        torch.mul(g, factors, out=scaled)
        for one, other in parts:
            out.add_(whole.copy_(torch.mm(other, one, out=made)))

    return call


def _whole_by_output(args: Arguments) -> Call:
    """Return the sum of one position output by output: products of all samples in the cache."""
    a, g, out = args["a"].flatten(1), args["g"].flatten(1), args["out"]
    factors, made = args["factors"], torch.empty_like(a)
    whole = torch.empty_like(a, dtype=torch.int32)

    def call() -> None:
        scaled = (g * factors[:, None]).t().contiguous()
        for row, total in zip(scaled[:, :, None], out, strict=True):
            whole.copy_(torch.mul(row, a, out=made))
            total.add_(whole.sum(0, dtype=torch.int32))

    return call


def _add_terms(rows: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
    total = out
    for row, column in zip(rows, columns, strict=True):
        total = total + (column[:, None] * row).to(torch.int32)
    out.copy_(total)


def _whole_by_terms(add: Callable[..., None], args: Arguments) -> Call:
    """Return the sum of one position, some samples after the others, one term after the other.

    Compiled, the terms of a block are one expression: their sum stays in registers.
    """
    a, g, out = args["a"].flatten(1), args["g"].flatten(1), args["out"]
    factors = args["factors"][:, None]

    def call() -> None:
        scaled = g * factors
        for rows, columns in zip(a.split(TERMS), scaled.split(TERMS), strict=True):
            add(rows, columns, out)

    return call


def _whole_by_compiled_terms(args: Arguments) -> Call:
    return _whole_by_terms(torch.compile(_add_terms, dynamic=False), args)


def _has_one_position(args: Arguments) -> bool:
    return bool(args["a"].shape[1] == 1)


FORMULATIONS = {
    "ghost.linear_norm": (
        Formulation("Gram", _gram, lambda args: args["a"].shape[1] > 1),
        Formulation("Gram, buffers", _gram_in_buffers, lambda args: args["a"].shape[1] > 1),
        Formulation("rank one", _rank_one, _has_one_position),
        Formulation("rank one, norms", _rank_one_norms, _has_one_position),
        Formulation("bmm, buffer", _direct_in_buffer),
        Formulation("bmm", _direct),
    ),
    "ghost.linear_norms": (
        Formulation("bmm", _norms_by_gradients),
        Formulation("Gram", _norms_by_grams),
    ),
    "ghost.linear_gradient": (
        Formulation("bmm", _gradients),
        Formulation("bmm, buffer", _gradients_in_buffer),
        Formulation("mm, sample by sample", _gradients_by_sample),
        Formulation("einsum", _gradients_by_einsum),
    ),
    "ghost.rounded_gradient": (
        Formulation("bmm", _rounded),
        Formulation("bmm, buffer", _gradients_in_buffer),
    ),
    "ghost.rounded_sum": (
        Formulation("addmv", _rounded_sum),
        Formulation("einsum", _rounded_sum_by_einsum),
    ),
    "ghost.linear_sum": (
        Formulation("addmm", _weighted),
        Formulation("addmm of weighted inputs", _weighted_inputs),
        Formulation("einsum", _weighted_by_einsum),
    ),
    "ghost.linear_integer_norm": (
        Formulation("bmm of rounded operands", _norms_of_rounded),
        Formulation("Gram of rounded operands", _gram_of_rounded),
    ),
    "ghost.linear_integer_sum": (
        Formulation("bmm, int32", _whole, compiles=True),
        Formulation("loop of samples", _whole_by_sample),
        Formulation("bmm, int32, buffers", _whole_in_buffers),
        Formulation("loop of samples, buffers", _whole_by_sample_in_buffers),
        Formulation("loop of outputs", _whole_by_output, _has_one_position),
        Formulation(
            "terms in blocks",
            partial(_whole_by_terms, _add_terms),
            _has_one_position,
            compiles=True,
            in_parts=_whole_by_compiled_terms,
        ),
    ),
}
