"""Noise, random words and randomized response with torch's generators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...ops._draws import CdtDraws
from ._draws import GAUSSIAN, LAPLACE, Fill, fill_words, words
from ._formulation import Arguments, Formulation

LATTICE = 2.0**20


def _added(make: Callable[[torch.Tensor], Fill], args: Arguments) -> Callable[[], Any]:
    x, scale = args["x"], args["scale"]
    drawn = torch.empty(x.shape, dtype=x.dtype if x.is_floating_point() else torch.float32)
    fill = make(drawn)
    if x.is_floating_point():
        return lambda: x.add_(fill(drawn), alpha=1.0 if scale is None else float(scale))
    return lambda: x.add_(fill(drawn).mul_(LATTICE).to(x.dtype))


def _lattice(make: Callable[[torch.Tensor], Fill], args: Arguments) -> Callable[[], Any]:
    drawn = torch.empty(args["count"])
    fill = make(drawn)
    return lambda: fill(drawn).mul_(LATTICE).to(torch.int32)


def _words(dtype: torch.dtype, args: Arguments) -> Callable[[], Any]:
    made = torch.empty(args.get("count") or 16 * args["blocks"], dtype=dtype)
    return made.random_


def _halves(dtype: torch.dtype, args: Arguments) -> Callable[[], Any]:
    drawn, made = words(args.get("count") or 16 * args["blocks"], dtype)

    def call() -> Any:
        fill_words(drawn)
        return made

    return call


def _bytes(dtype: torch.dtype, args: Arguments) -> Callable[[], Any]:
    count = args.get("count") or 16 * args["blocks"]
    info = torch.iinfo(dtype)
    return lambda: torch.randint(info.min, info.max + 1, (count,), dtype=dtype)


def _is_law(law: str) -> Callable[[Arguments], bool]:
    return lambda args: bool(args.get("distribution", law) == law)


def _draws_of(law: str) -> Callable[[Arguments], bool]:
    return lambda args: isinstance(args["draws"], CdtDraws) is (law == "laplace")


def _coins(args: Arguments) -> Callable[[], Any]:
    x, categories = args["symbols"], args["categories"]
    u, lie, out = torch.empty(x.shape), torch.empty_like(x), torch.empty_like(x)
    truth = args["keep"] / 2**64

    def call() -> Any:
        lie.random_(1, categories) if categories > 2 else lie.fill_(1)
        return torch.where(u.uniform_() < truth, x, (x + lie) % categories, out=out)

    return call


def _bernoulli(args: Arguments) -> Callable[[], Any]:
    x, categories = args["symbols"], args["categories"]
    lies = torch.empty(x.shape, dtype=torch.bool)
    wrong = 1 - args["keep"] / 2**64

    def call() -> Any:
        moved = lies.bernoulli_(wrong).to(x.dtype)
        if categories > 2:
            moved *= torch.randint(1, categories, x.shape, dtype=x.dtype)
        return (x + moved) % categories

    return call


def _flipped(args: Arguments) -> Callable[[], Any]:
    x, lies = args["symbols"], torch.empty_like(args["symbols"])
    wrong = 1 - args["keep"] / 2**64
    return lambda: lies.bernoulli_(wrong).bitwise_xor_(x)


def _both(
    prepare: Callable[..., Callable[[], Any]], which: Callable[[str], Callable[[Arguments], bool]]
) -> tuple[Formulation, ...]:
    laws = {"gaussian": GAUSSIAN, "laplace": LAPLACE}
    return tuple(
        Formulation(name, partial(prepare, make), which(law), True)
        for law, ways in laws.items()
        for name, make in ways.items()
    )


def _random(dtype: torch.dtype) -> tuple[Formulation, ...]:
    return (
        Formulation("random_", partial(_words, dtype), draws=True),
        Formulation("random_ of int64", partial(_halves, dtype), draws=True),
        Formulation("randint", partial(_bytes, dtype), draws=True),
    )


FORMULATIONS = {
    "noise.add_noise": _both(_added, _is_law),
    "noise.keystream": _random(torch.int32),
    "noise.lattice_draws": _both(_lattice, _is_law),
    "noise.rounding_bits": _random(torch.int16),
    "noise.source_draws": _both(_lattice, _draws_of),
    "symbols.randomize": (
        Formulation("uniform, where", _coins, draws=True),
        Formulation("bernoulli_", _bernoulli, draws=True),
        Formulation("bernoulli_, xor", _flipped, lambda args: args["categories"] == 2, draws=True),
    ),
}
