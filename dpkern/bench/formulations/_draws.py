"""Noise by torch's generators, which protect nothing: they are no secrets, and floats leak."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

CHUNK = 1 << 15
"""Numbers of a part whose buffers stay in a core's cache."""
Fill = Callable[[torch.Tensor], torch.Tensor]
"""Writes noise of scale 1 into a tensor and returns it."""


def laplace_by_inverse(like: torch.Tensor) -> Fill:
    """Return Laplace noise by the inverse of its distribution function, one logarithm each.

    ``-sgn(u) log(1 - |u|)`` for u uniform in (-1, 1).
    """
    kept = torch.empty_like(like)

    def fill(out: torch.Tensor) -> torch.Tensor:
        out.uniform_(-1, 1)
        torch.abs(out, out=kept).neg_().log1p_()
        return out.sign_().mul_(kept).neg_()

    return fill


def words(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 words to draw, and the first ``count`` integers that they hold.

    A draw of 64 bits takes as long as one of fewer.
    """
    each = 8 // dtype.itemsize
    drawn = torch.empty(-(-count // each), dtype=torch.int64)
    return drawn, drawn.view(dtype)[:count]


def fill_words(drawn: torch.Tensor) -> torch.Tensor:
    """Draw all bits of every word."""
    return drawn.random_(-(2**63), None)


def laplace_by_words(like: torch.Tensor) -> Fill:
    """Return Laplace noise by the inverse of its distribution function, of halves of words.

    The logarithm of a half's magnitude is exponential, and its sign is a coin: 1 - |u| has the
    distribution of |u|.
    """
    kept = torch.empty_like(like)
    drawn, halves = words(like.numel(), torch.int32)
    halves = halves.view(like.shape)

    def fill(out: torch.Tensor) -> torch.Tensor:
        fill_words(drawn)
        torch.add(halves, 0.5, out=out)
        torch.abs(out, out=kept).mul_(2.0**-31).log_()
        return torch.copysign(kept, out, out=out)

    return fill


def laplace_by_copysign(like: torch.Tensor) -> Fill:
    """Return Laplace noise as an exponential variable with a random sign."""
    kept = torch.empty_like(like)

    def fill(out: torch.Tensor) -> torch.Tensor:
        return torch.copysign(out.exponential_(), kept.uniform_(-1, 1), out=out)

    return fill


def laplace_by_exponentials(like: torch.Tensor) -> Fill:
    """Return Laplace noise as the difference of two exponential variables."""
    kept = torch.empty_like(like)
    return lambda out: out.exponential_().sub_(kept.exponential_())


def gaussian(like: torch.Tensor) -> Fill:
    """Return Gaussian noise by ``normal_``."""
    del like
    return lambda out: out.normal_()


def gaussian_of_generator(like: torch.Tensor) -> Fill:
    """Return Gaussian noise by ``torch.randn`` into a tensor that is there."""
    return lambda out: torch.randn(like.shape, out=out)


def gaussian_by_words(like: torch.Tensor) -> Fill:
    """Return Gaussian noise by the inverse of its distribution function, of halves of words."""
    drawn, halves = words(like.numel(), torch.int32)
    halves = halves.view(like.shape)
    below_one = (1 - 2.0**-24) * 2.0**-31

    def fill(out: torch.Tensor) -> torch.Tensor:
        fill_words(drawn)
        return torch.mul(halves, below_one, out=out).erfinv_().mul_(math.sqrt(2))

    return fill


class XorShift:
    """Marsaglia's xorshift64*, one stream for each word of a vector: few instructions each.

    Compiled, it fills registers where torch's generator draws word by word. It protects nothing
    either.
    """

    def __init__(self, count: int) -> None:
        self.state = torch.randint(1, 2**63 - 1, (count,))

    def draw(self) -> torch.Tensor:
        """Return int64 words; their upper halves are the better ones."""
        x = self.state
        x = x ^ ((x >> 12) & (2**52 - 1))
        x = x ^ (x << 25)
        x = x ^ ((x >> 27) & (2**37 - 1))
        self.state.copy_(x)
        return x * 2685821657736338717


def laplace_by_xorshift(like: torch.Tensor) -> Fill:
    """Return Laplace noise by the inverse of its distribution function, to be compiled."""
    count = like.numel()
    draws = XorShift(-(-count // 2))

    def fill(out: torch.Tensor) -> torch.Tensor:
        halves = draws.draw().view(torch.int32)[:count].view(like.shape) + 0.5
        return out.copy_(torch.copysign(torch.log(halves.abs() * 2.0**-31), halves))

    return fill


def chunks(*tensors: torch.Tensor, size: int = CHUNK) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return views of parts of tensors with as many numbers, in their order."""
    return zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)


LAPLACE = {
    "inverse distribution": laplace_by_inverse,
    "inverse distribution of words": laplace_by_words,
    "exponential with a sign": laplace_by_copysign,
    "two exponentials": laplace_by_exponentials,
}
GAUSSIAN = {
    "normal_": gaussian,
    "randn": gaussian_of_generator,
    "inverse distribution of words": gaussian_by_words,
}
