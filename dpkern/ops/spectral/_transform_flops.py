"""Count the operations of a Fourier transform by textbook forms, because a library makes it.

The split radix (Duhamel, Hollmann 1984) transforms n complex values, n a power of two, and n real
ones (Sorensen, Jones, Heideman, Burrus 1987) by

    complex   n lg n - 3 n + 4           products   3 n lg n - 3 n + 4         additions
    real      (n lg n - 3 n + 4) / 2     products   (3 n lg n - 5 n + 8) / 2   additions

Other n take ``2 n lg n`` products and ``3 n lg n`` additions, the radix 2's 5 n lg n of Cooley and
Tukey 1965, by which transforms of all sizes are compared; real values half of it; both rounded up.
A plane is transformed by rows, then by the columns of the half that is stored, a volume by its
third axis as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Flops:
    """Counts of products and additions. They add, and multiply by n."""

    products: int = 0
    additions: int = 0

    @property
    def total(self) -> int:
        """Products and additions together."""
        return self.products + self.additions

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.products + other.products, self.additions + other.additions)

    def __mul__(self, times: int) -> Flops:
        return Flops(self.products * times, self.additions * times)


def of_line(n: int, *, real: bool) -> Flops:
    """Count one transform of ``n`` values, forward or back."""
    if n == 1:
        return Flops()
    if n & (n - 1):
        half = 2 if real else 1
        work = n * math.log2(n) / half
        return Flops(math.ceil(2 * work), math.ceil(3 * work))
    work = n * (n.bit_length() - 1)
    if real:
        return Flops((work - 3 * n + 4) // 2, (3 * work - 5 * n + 8) // 2)
    return Flops(work - 3 * n + 4, 3 * work - 3 * n + 4)


def of_map(size: tuple[int, ...]) -> Flops:
    """Count one transform of a real volume, plane ``(P, Q)`` or line ``(d,)``, forward or back."""
    *others, width = size
    total = of_line(width, real=True) * math.prod(others)
    for n in others:
        total += of_line(n, real=False) * (math.prod(others) // n * (width // 2 + 1))
    return total


__all__ = ["Flops", "of_line", "of_map"]
