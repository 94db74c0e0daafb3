"""Bound the error of AdLM's polynomial loss: lemma 7 as printed, and bounds that hold.

    f(z) = log(1 + e^z) = log 2 + z/2 + z^2/8 + r(z),   one class' loss: y f(-s) + (1 - y) f(s)

r is even, so a class' error is r(s) whatever the label is. Lemma 7 prints
``(e^2 + 2e - 1) / (e (1 + e)^2)`` per class. Its third derivative has 2 where ``1 - e^z`` belongs,
its remainder lacks 1/6 and the cube of z, it takes places of extrema for their values, and assumes
``|s| <= 1`` for a product of H terms.

Source: AdLM, (23)-(25), lemma 7 and its appendix.
"""

from __future__ import annotations

import math

from ...base.validate import integer, positive

LEMMA_7 = (math.e**2 + 2 * math.e - 1) / (math.e * (1 + math.e) ** 2)
"""The printed bound, 0.314662 per class, for |s| <= 1."""

LAGRANGE = (math.e**2 - math.e) / (6 * (1 + math.e) ** 3)
"""The third derivative's largest magnitude on |s| <= 1, over 6: 0.015143."""


def published_bound(classes: int) -> float:
    """Return lemma 7's bound ``M (e^2 + 2e - 1) / (e (1 + e)^2)``."""
    return integer(1, classes=classes) * LEMMA_7


def printed_third_derivative(z: float) -> float:
    """Return ``2 e^z / (1 + e^z)^3``, printed for the third derivative of ``f(-z)``."""
    return 2 * math.exp(z) / (1 + math.exp(z)) ** 3


def third_derivative(z: float) -> float:
    """Return ``e^z (1 - e^z) / (1 + e^z)^3``, the third derivative of ``f(z)``.

    It is also that of ``f(-z)``, as the two differ by z.
    """
    return math.exp(z) * (1 - math.exp(z)) / (1 + math.exp(z)) ** 3


def remainder(s: float) -> float:
    """Return ``r(s)``: at most 0, falls with |s|, and is -0.004886 at 1."""
    size = abs(s)
    return size + math.log1p(math.exp(-size)) - (math.log(2) + size / 2 + size * size / 8)


def corrected_bound(bound: float = 1.0) -> float:
    """Return ``min(B^4 / 192, B^3 / (36 sqrt 3))`` per class for ``|s| <= B``.

    The first from the fourth derivative, at most 1/8; the second from the third, at most
    ``1 / (6 sqrt 3)``.

    Raises:
        InvalidInput: a bound that is not positive.
    """
    size = positive(bound=bound)
    return min(size**4 / 192, size**3 / (36 * math.sqrt(3)))
