"""Place labels: beside the ends of lines, and next to marks where they cover least."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Box = tuple[float, float, float, float]
"""Left, bottom, right, top in pixels."""

# Directions in which a label may stand from its place, best first.
_AROUND = (
    *((1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1), (0, -1)),
    *((0.5, 1), (-0.5, 1), (0.5, -1), (-0.5, -1), (1, 0.5), (-1, 0.5), (1, -0.5), (-1, -0.5)),
)


def overlap(one: Box, other: Box) -> float:
    """Return the area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places at least ``gap`` apart, each near the one wanted, within low..high if they fit.

    Neighbours that touch are merged into a block that stands around the mean of what its members
    want (the pool-adjacent-violators solution of the least-squares problem).
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, int]] = []  # mean of (wanted - rank in block * gap), members
    for i in order:
        mean, members = wanted[i], 1
        while blocks and blocks[-1][0] + blocks[-1][1] * gap > mean:
            earlier, size = blocks.pop()
            mean = (earlier * size + (mean - size * gap) * members) / (size + members)
            members += size
        blocks.append((mean, members))
    placed = [start + k * gap for start, members in blocks for k in range(members)]
    for k in range(len(placed) - 1, -1, -1):  # down from the upper edge, up from the lower one
        placed[k] = min(placed[k], high - (len(placed) - 1 - k) * gap)
    for k, place in enumerate(placed):
        placed[k] = max(place, low + k * gap)
    result = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        result[i] = placed[rank]
    return result


def samples(axes: Any, x: Sequence[float], y: Sequence[float]) -> NDArray[np.float64]:
    """Return a polyline in pixels, a point every few pixels: boxes check whether they cover it."""
    corners = np.asarray(axes.transData.transform(np.column_stack([x, y])), dtype=np.float64)
    corners = corners[np.isfinite(corners).all(axis=1)]
    if len(corners) < 2:
        return corners
    steps = [
        np.linspace(a, b, int(np.hypot(*(b - a)) // 3) + 2)
        for a, b in pairwise(corners)
        if np.hypot(*(b - a)) < 1e5
    ]
    return np.concatenate(steps) if steps else corners


class Placer:
    """A placer of labels around points of an axes, away from lines, edges and earlier labels."""

    def __init__(self, axes: Any, obstacles: Sequence[NDArray[np.float64]]) -> None:
        self._axes = axes
        box = axes.get_window_extent()
        self._inside: Box = (box.x0, box.y0, box.x1, box.y1)
        points = [o for o in obstacles if len(o)]
        self._points = np.concatenate(points) if points else np.empty((0, 2))
        self._taken: list[Box] = []

    def taken(self, box: Box) -> None:
        """Keep labels off this box."""
        self._taken.append(box)

    def place(self, x: float, y: float, size: tuple[float, float]) -> tuple[float, float]:
        """Return the lower left corner, in pixels, of a label of this size for the point (x, y)."""
        px, py = self._axes.transData.transform((x, y))
        width, height = size
        best, best_cost = (px, py), float("inf")
        for distance in (7.0, 14.0, 26.0, 44.0):
            for rank, (dx, dy) in enumerate(_AROUND):
                left = px + dx * distance - (1 - dx) / 2 * width
                bottom = py + dy * distance - (1 - dy) / 2 * height
                cost = self._cost((left, bottom, left + width, bottom + height))
                cost += 0.8 * distance + 0.3 * rank
                if cost < best_cost:
                    best, best_cost = (left, bottom), cost
        self.taken((best[0], best[1], best[0] + width, best[1] + height))
        return best

    def _cost(self, box: Box) -> float:
        left, bottom, right, top = box
        x, y = self._points[:, 0], self._points[:, 1]
        covered = int(((x > left - 2) & (x < right + 2) & (y > bottom) & (y < top)).sum())
        outside = (right - left) * (top - bottom) - overlap(box, self._inside)
        return 6.0 * covered + outside + sum(overlap(box, other) for other in self._taken)
