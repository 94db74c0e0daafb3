"""Choose the number of rows that recorded passes of Poisson batches have.

Draws vary, recorded passes do not: rows that are no records fill a draw up, and a larger draw takes
several passes. With R rows a step costs R E[ceil(B / R)], where B has the mean b and, of records
that are drawn one by one, at most the variance b. One pass for most draws is taken to be cheaper
than several small ones. Nothing but public numbers is read.
"""

from __future__ import annotations

import math

from .padded_rows import MULTIPLE

_FAR = 6
"""Standard deviations beyond which draws are not counted."""


def usual_rows(expected: float, most: int | None, records: int) -> int:
    """Return the number of rows that makes steps cheapest, a multiple of 16.

    Args:
        expected: expected number of records of a draw.
        most: maximum number of records of a physical batch; None for whole draws.
        records: number of records that are drawn from.
    """
    spread = max(math.sqrt(expected), 1.0)
    largest = min(expected + _FAR * spread, records, math.inf if most is None else most)

    def cost(rows: int) -> float:
        passes = range(math.ceil((expected + _FAR * spread) / rows))
        return rows * sum(
            math.erfc((k * rows - expected) / (spread * math.sqrt(2))) / 2 for k in passes
        )

    fewest = math.ceil(min(expected, largest) / MULTIPLE)
    sizes = range(max(fewest, 1), max(math.ceil(largest / MULTIPLE), 1) + 1)
    return min((MULTIPLE * k for k in sizes), key=cost)


__all__ = ["usual_rows"]
