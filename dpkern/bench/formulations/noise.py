"""Noise, random words and randomized response with torch's generators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ...ops._draws import CdtDraws
from ._draws import CHUNK, GAUSSIAN, LAPLACE, Fill, XorShift, chunks, fill_words, words
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


def _added_in_chunks(make: Callable[[torch.Tensor], Fill], args: Arguments) -> Callable[[], Any]:
    """Return the sum part by part, so that noise stays in a core's cache until it is added."""
    x, scale = args["x"], 1.0 if args["scale"] is None else float(args["scale"])
    is_float = x.is_floating_point()
    drawn = torch.empty(min(CHUNK, x.numel()), dtype=x.dtype if is_float else torch.float32)
    fill, parts = make(drawn), [part for (part,) in chunks(x)]

    def call() -> Any:
        for part in parts:
            noise = fill(drawn)[: len(part)]
            if is_float:
                part.add_(noise, alpha=scale)
            else:
                part.add_(noise.mul_(LATTICE).to(part.dtype))
        return x

    return call


def _lattice_in_chunks(make: Callable[[torch.Tensor], Fill], args: Arguments) -> Callable[[], Any]:
    drawn = torch.empty(min(CHUNK, args["count"]))
    fill = make(drawn)

    def call() -> Any:
        made = torch.empty(args["count"], dtype=torch.int32)
        for (part,) in chunks(made):
            part.copy_(fill(drawn)[: len(part)].mul_(LATTICE))
        return made

    return call


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


def _is_binary(args: Arguments) -> bool:
    return bool(args["categories"] == 2)


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


def _threshold(probability: float) -> int:
    """Return the int32 that a random one lies below with this probability."""
    return round(probability * 2**32) - 2**31


def _flipped_by_words(args: Arguments) -> Callable[[], Any]:
    """Return flipped bits where halves of words lie below a threshold, part by part."""
    x, out = args["symbols"], torch.empty_like(args["symbols"])
    drawn, halves = words(min(CHUNK, x.numel()), torch.int32)
    lies = torch.empty(len(halves), dtype=torch.bool)
    least = _threshold(1 - args["keep"] / 2**64)
    parts = list(chunks(x, out))

    def call() -> Any:
        for part, made in parts:
            fill_words(drawn)
            torch.bitwise_xor(part, torch.lt(halves, least, out=lies)[: len(part)], out=made)
        return out

    return call


def _is_of_bytes(args: Arguments) -> bool:
    return _is_binary(args) and args["keep"] % 2**56 == 0


def _flipped_by_bytes(args: Arguments) -> Callable[[], Any]:
    """Return the same by bytes of words, where 256 of them have the probability."""
    x, out = args["symbols"], torch.empty_like(args["symbols"])
    drawn, each = words(min(CHUNK, x.numel()), torch.int8)
    lies = torch.empty(len(each), dtype=torch.bool)
    least = 128 - (args["keep"] >> 56)
    parts = list(chunks(x, out))

    def call() -> Any:
        for part, made in parts:
            fill_words(drawn)
            torch.bitwise_xor(part, torch.lt(each, least, out=lies)[: len(part)], out=made)
        return out

    return call


def _moved_by_words(args: Arguments) -> Callable[[], Any]:
    """Return other symbols by one uniform number each: it says whether it lies, and by how much.

    Symbols are added and taken around as floats, which no integer division follows.
    """
    x, categories = args["symbols"], args["categories"]
    out, size = torch.empty_like(x), min(CHUNK, x.numel())
    drawn, halves = words(size, torch.int32)
    u, around = torch.empty(size), torch.empty(size)
    spread = (categories - 1) / (1 - args["keep"] / 2**64)
    parts = list(chunks(x, out))

    def call() -> Any:
        for part, made in parts:
            fill_words(drawn)
            torch.mul(halves, spread * 2.0**-32, out=u).add_(spread / 2 + 1)  # from 1 on
            F.threshold(u.neg_(), -float(categories), 0.0, inplace=True).neg_().floor_()
            moved, turns = u[: len(part)].add_(part), around[: len(part)]
            made.copy_(moved.sub_(torch.ge(moved, categories, out=turns), alpha=categories))
        return out

    return call


def _xorshift(args: Arguments) -> Callable[[], Any]:
    count = args.get("count") or 16 * args["blocks"]
    draws = XorShift(-(-count // 2))
    return lambda: draws.draw().view(torch.int32)[:count]


def _both(
    prepare: Callable[..., Callable[[], Any]],
    which: Callable[[str], Callable[[Arguments], bool]],
    how: str = "",
) -> tuple[Formulation, ...]:
    laws = {"gaussian": GAUSSIAN, "laplace": LAPLACE}
    return tuple(
        Formulation(f"{name}{how}", partial(prepare, make), which(law), True)
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
    "noise.add_noise": (*_both(_added, _is_law), *_both(_added_in_chunks, _is_law, ", in chunks")),
    "noise.keystream": (
        *_random(torch.int32),
        Formulation("xorshift", _xorshift, draws=True, compiles=True),
    ),
    "noise.lattice_draws": (
        *_both(_lattice, _is_law),
        *_both(_lattice_in_chunks, _is_law, ", in chunks"),
    ),
    "noise.rounding_bits": _random(torch.int16),
    "noise.source_draws": (
        *_both(_lattice, _draws_of),
        *_both(_lattice_in_chunks, _draws_of, ", in chunks"),
    ),
    "symbols.randomize": (
        Formulation("uniform, where", _coins, draws=True),
        Formulation("bernoulli_", _bernoulli, draws=True),
        Formulation("bernoulli_, xor", _flipped, _is_binary, draws=True),
        Formulation("words, xor", _flipped_by_words, _is_binary, draws=True),
        Formulation("bytes, xor", _flipped_by_bytes, _is_of_bytes, draws=True),
        Formulation("words, in floats", _moved_by_words, draws=True),
    ),
}
