"""Noisy coefficients of polynomial losses with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ._draws import CHUNK, LAPLACE, Fill, chunks, laplace_by_inverse, laplace_by_xorshift
from ._formulation import Arguments, Formulation

MakeFill = Callable[[torch.Tensor], Fill]


def _coefficients(
    make: MakeFill, args: Arguments, size: int | None = None
) -> Callable[[], tuple[Any, Any]]:
    """Return both coefficients, part by part of ``size`` numbers; None takes all at once."""
    x, noise = args["targets"], args["noise"]
    ahead, scale = noise.draws is not None, noise.scale
    a1, a2 = torch.empty_like(x), torch.empty_like(x)
    count = x.numel() if size is None else min(size, x.numel())
    drawn = torch.empty(count, dtype=x.dtype)
    fill, quarter = make(drawn), torch.tensor(-0.25, dtype=x.dtype)
    u, w = (make(x)(torch.empty_like(x)) for _ in range(2)) if ahead else (x, x)
    parts = list(chunks(x, a1, a2, u, w, size=max(1, count)))

    def call() -> tuple[Any, Any]:
        for part, one, two, first, second in parts:
            torch.sub(0.5, part, out=one)
            one.add_(first if ahead else fill(drawn)[: len(part)], alpha=scale)
            torch.add(quarter, part, alpha=0.5, out=two)
            two.add_(second if ahead else fill(drawn)[: len(part)], alpha=scale)
        return a1, a2

    return call


def _coefficients_in_chunks(make: MakeFill, args: Arguments) -> Callable[[], tuple[Any, Any]]:
    return _coefficients(make, args, CHUNK)


def _evaluated(make: MakeFill, args: Arguments) -> Callable[[], Any]:
    coefficients, z = _coefficients(make, args), args["z"]
    product, slope = torch.empty_like(z), torch.empty_like(z)

    def call() -> Any:
        a1, a2 = coefficients()
        torch.addcmul(a1, a2, z, out=product).mul_(z)
        return product.sum(1), torch.addcmul(a1, a2, z, value=2, out=slope)

    return call


def _evaluated_in_chunks(make: MakeFill, args: Arguments) -> Callable[[], Any]:
    """Return value and slope of some records after the others, with coefficients in the cache."""
    x, z, noise = args["targets"], args["z"], args["noise"]
    each = max(1, CHUNK // max(1, x.shape[1]))
    ahead = noise.draws is not None
    value, slope = z.new_empty(len(z)), torch.empty_like(z)
    first, second, product = (torch.empty_like(x[:each]) for _ in range(3))
    fill, quarter = make(first), torch.tensor(-0.25, dtype=x.dtype)
    u, w = (make(x)(torch.empty_like(x)) for _ in range(2)) if ahead else (x, x)
    parts = list(zip(*(t.split(each) for t in (x, z, u, w, value, slope)), strict=True))

    def call() -> Any:
        for part, at, one, two, values, slopes in parts:
            rows = len(part)
            if ahead:
                a1 = torch.mul(one, noise.scale, out=first[:rows])
                a2 = torch.mul(two, noise.scale, out=second[:rows])
            else:
                a1 = fill(first).mul_(noise.scale)[:rows]
                a2 = fill(second).mul_(noise.scale)[:rows]
            a1.sub_(part).add_(0.5)
            a2.add_(part, alpha=0.5).add_(quarter)
            torch.addcmul(a1, a2, at, out=product[:rows])
            torch.linalg.vecdot(product[:rows], at, out=values)
            torch.addcmul(a1, a2, at, value=2, out=slopes)
        return value, slope

    return call


def _expanded(make: MakeFill, args: Arguments) -> Callable[[], Any]:
    hidden, targets, weights = args["hidden"], args["targets"], args["weights"]
    scale = args["noise"].scale
    (records, width), classes = hidden.shape, len(weights)
    linear = torch.empty(records, classes, width)
    square = torch.empty(records, classes, width, width)
    fills = make(linear), make(square)

    def call() -> Any:
        factor = 0.5 - targets
        a1 = fills[0](linear).mul_(scale).add_(factor[:, :, None] * hidden[:, None, :])
        a2 = fills[1](square).mul_(scale)
        a2.add_((hidden[:, :, None] * hidden[:, None, :])[:, None], alpha=0.125)
        inner = a1 + torch.einsum("bleg,lg->ble", a2, weights)
        slope = (inner + torch.einsum("bleg,le->blg", a2, weights)).sum(0)
        back = (factor + 0.25 * hidden @ weights.t()) @ weights
        return (inner * weights).sum((1, 2)), slope, back

    return call


def _draws_now(args: Arguments) -> bool:
    return args["noise"] is not None and args["noise"].draws is None


def _drew_before(args: Arguments) -> bool:
    return args["noise"] is not None and args["noise"].draws is not None


def _ways(
    prepare: Callable[[MakeFill, Arguments], Callable[[], Any]],
    in_chunks: Callable[[MakeFill, Arguments], Callable[[], Any]] | None = None,
) -> tuple[Formulation, ...]:
    """Return a formulation for each way to draw, and for floats that were drawn before."""
    if in_chunks is None:
        return _draws(prepare)
    return (
        *_draws(prepare),
        *_draws(in_chunks, ", in chunks"),
        Formulation("add", partial(prepare, laplace_by_inverse), _drew_before, draws=True),
        Formulation(
            "add, in chunks", partial(in_chunks, laplace_by_inverse), _drew_before, draws=True
        ),
    )


def _draws(
    prepare: Callable[[MakeFill, Arguments], Callable[[], Any]], how: str = ""
) -> tuple[Formulation, ...]:
    return tuple(
        Formulation(f"{name}{how}", partial(prepare, make), _draws_now, draws=True)
        for name, make in LAPLACE.items()
    )


def _in_one_expression(args: Arguments) -> Callable[[], Any]:
    """Return the coefficients with noise that was drawn before, a new tensor at each step."""
    x, scale = args["targets"], args["noise"].scale
    u, w = (laplace_by_inverse(x)(torch.empty_like(x)) for _ in range(2))
    return lambda: ((0.5 - x).add_(u, alpha=scale), (x * 0.5 - 0.25).add_(w, alpha=scale))


def _shifted(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise that was drawn, scaled and shifted by both constants before."""
    x, scale = args["targets"], args["noise"].scale
    u, w = (laplace_by_inverse(x)(torch.empty_like(x)) for _ in range(2))
    return u.mul_(scale).add_(0.5), w.mul_(scale).sub_(0.25)


def _scaled_before(args: Arguments) -> Callable[[], tuple[Any, Any]]:
    x, (u, w) = args["targets"], _shifted(args)
    a1, a2 = torch.empty_like(x), torch.empty_like(x)
    return lambda: (torch.sub(u, x, out=a1), torch.add(w, x, alpha=0.5, out=a2))


def _evaluated_scaled_before(args: Arguments) -> Callable[[], Any]:
    x, z, (u, w) = args["targets"], args["z"], _shifted(args)
    each = max(1, CHUNK // max(1, x.shape[1]))
    value, slope = z.new_empty(len(z)), torch.empty_like(z)
    first, second, product = (torch.empty_like(x[:each]) for _ in range(3))
    parts = list(zip(*(t.split(each) for t in (x, z, u, w, value, slope)), strict=True))

    def call() -> Any:
        for part, at, one, two, values, slopes in parts:
            rows = len(part)
            a1 = torch.sub(one, part, out=first[:rows])
            a2 = torch.add(two, part, alpha=0.5, out=second[:rows])
            torch.addcmul(a1, a2, at, out=product[:rows])
            torch.linalg.vecdot(product[:rows], at, out=values)
            torch.addcmul(a1, a2, at, value=2, out=slopes)
        return value, slope

    return call


def _batched(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    return torch.bmm(rows[:, None], matrices)[:, 0]


def _summed(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    return (rows[:, :, None] * matrices).sum(1)


def _descent(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], args: Arguments
) -> Callable[[], Any]:
    """Return steps of all runs at once, with products of rows and matrices; noise was drawn."""
    encoder, decoder = (args[name].flatten(0, 1) for name in ("encoder", "decoder"))
    x, order, lr, c = (
        args["inputs"][0],
        args["order"].transpose(0, 1).flatten(1),
        args["lr"],
        args["constant"],
    )
    targets = args["targets"][0]
    like = torch.empty((*order.shape, x.shape[1]), dtype=x.dtype)
    u, w = (laplace_by_inverse(like)(torch.empty_like(like)) for _ in range(2))
    scale, growth = args["scale"], args["growth"]

    def call() -> Any:
        for rows, one, two in zip(order, u, w, strict=True):
            seen, target = x[rows], targets[rows]
            h = product(seen, encoder).sigmoid_()
            shift = h.sum(1, keepdim=True).mul_(c)
            z = product(h, decoder).add_(shift)
            each = shift.mul(0.5).add_(2).mul_(shift).mul_(growth).add_(scale)
            a1 = torch.addcmul(0.5 - target, one, each)
            a2 = torch.addcmul(target.mul(0.5).sub_(0.25), two, each)
            g = torch.addcmul(a1, a2, z, value=2)
            back = product(g, decoder.mT).add_(g.sum(1, keepdim=True), alpha=c).mul_(h - h * h)
            encoder.baddbmm_(seen[:, :, None], back[:, None], alpha=-lr)
            decoder.baddbmm_(h[:, :, None], g[:, None], alpha=-lr)

    return call


FORMULATIONS = {
    "coef.descend": (
        Formulation("batched products", partial(_descent, _batched), draws=True),
        Formulation("sums of products", partial(_descent, _summed), draws=True),
    ),
    "coef.expanded": (
        *_ways(_expanded),
        Formulation(
            "xorshift",
            partial(_expanded, laplace_by_xorshift),
            _draws_now,
            draws=True,
            compiles=True,
        ),
    ),
    "coef.perturb": (
        *_ways(_coefficients, _coefficients_in_chunks),
        Formulation("add, new tensors", _in_one_expression, _drew_before, draws=True),
        Formulation("add, scaled before", _scaled_before, _drew_before, draws=True),
    ),
    "coef.quadratic": (
        *_ways(_evaluated, _evaluated_in_chunks),
        Formulation("add, scaled before", _evaluated_scaled_before, _drew_before, draws=True),
    ),
}
