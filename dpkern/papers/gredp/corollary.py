"""Corollary 2, as printed: noise and total cost from a Renyi budget per batch.

Source: GReDP, corollary 2 and its appendix.
"""

from __future__ import annotations

import math

from ...base.validate import choice, integer, positive
from ...privacy.theory.rdp import convert

PLACEMENTS = ("text", "appendix")

PRINTED_CONSTANT = 1.24
"""Corollary 2 prints 1.24 where the theorem it cites has 1.25."""


def corollary2_sigma(rdp: float, order: float, delta: float, *, placement: str = "text") -> float:
    """GReDP's corollary 2: the multiplier whose training it calls ``(alpha, rdp)``-RDP per batch.

    With ``e = rdp + log(1 / delta) / (alpha - 1)``: ``text`` prints ``sqrt(2 log(1.24 / delta) /
    e)``, ``appendix`` ``sqrt(2 log(1.24 / delta)) / e``. It reads proposition 1 backwards, from DP
    to RDP, which no theorem allows.

    Raises:
        InvalidInput: a number out of its range.
    """
    choice(PLACEMENTS, placement=placement)
    epsilon = convert(positive(rdp=rdp), order, delta)
    root = 2 * math.log(PRINTED_CONSTANT / delta)
    return math.sqrt(root / epsilon) if placement == "text" else math.sqrt(root) / epsilon


def corollary2_epsilon(
    rdp: float, order: float, delta: float, *, epochs: int, dataset_size: int, batch_size: int
) -> float:
    """Corollary 2's total: ``(epochs N / B) rdp + log(1 / delta) / (alpha - 1)``, unamplified.

    Raises:
        InvalidInput: a number out of its range.
    """
    integer(1, epochs=epochs)
    integer(1, dataset_size=dataset_size)
    batches = epochs * dataset_size / integer(1, batch_size=batch_size)
    return convert(batches * positive(rdp=rdp), order, delta)
