"""Say how Gram matrices over positions are shared out to programs of a device, by sizes alone.

From 129 to 200 positions of 16-bit operands, a program owns a sample of one layer. Its positions
fall into ranges of 128, 64 and 8, and its matrix into the tiles of their products. A batch may
have fewer samples than a device has multiprocessors: layers then share a launch.
"""

from __future__ import annotations

import torch

FIRST, SECOND, THIRD = 128, 64, 8
"""Positions in the ranges."""
ENTRIES = FIRST * (FIRST + SECOND + THIRD) + SECOND * (SECOND + THIRD) + THIRD**2
"""Numbers of a matrix's tiles."""
PROCESSORS = 132
"""Programs that run at a time on an H200, one on a multiprocessor; bits must not depend on what
there is."""
PROGRAMS, LAYERS = 4 * PROCESSORS, 4
"""Programs of a launch, each of which has a matrix in memory, and its layers, at most."""


def fits(positions: int, dtype: torch.dtype) -> bool:
    """Whether a program owns a sample of so many positions."""
    return dtype.itemsize == 2 and FIRST < positions <= FIRST + SECOND + THIRD


def filled(programs: int) -> float:
    """Return the share of the multiprocessors that so many programs occupy, as long as they run."""
    return programs / (-(-programs // PROCESSORS) * PROCESSORS)


def together(batch: int) -> int:
    """Return how many layers share a launch: the fewest that fill the multiprocessors best."""
    most = max(1, min(LAYERS, PROGRAMS // max(1, batch)))
    return max(range(1, most + 1), key=lambda layers: (filled(layers * batch), -layers))
