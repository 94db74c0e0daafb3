"""Compare the ops with this machine's measured limits: a roofline.

    attainable FLOP/s = min(peak, intensity * bandwidth),    intensity = FLOPs / bytes

(Williams, Waterman and Patterson, "Roofline", Communications of the ACM 52(4), 2009). The bandwidth
is that of a copy far larger than the caches, the peak that of a square matrix product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..base.report import Figure, Series
from .trace import TracedCall

_COPIED_BYTES = 64 << 20
_SIDE = 1024
_TRIES = 4
MOST_POINTS = 10
"""Maximum of points in the figure; the others take less time."""


@dataclass(frozen=True)
class Limits:
    """Limits measured on this machine, with the threads in use.

    Attributes:
        bandwidth: bytes read and written per second by a copy.
        peak: float32 FLOP/s of a matrix product.
    """

    bandwidth: float
    peak: float

    def roof(self, intensity: float) -> float:
        """Return the attainable FLOP/s at so many FLOPs per byte."""
        return min(self.peak, intensity * self.bandwidth)


@dataclass(frozen=True)
class Point:
    """Work that was done in some seconds.

    Attributes:
        name: name of an op, or of a phase of torch.
        calls: number of calls that it sums up.
        bytes, flops, words, launches: declared, or counted of torch.
        seconds: measured.
        backend: name of the backend that ran it.
    """

    name: str
    calls: int
    bytes: int
    flops: int
    words: int
    launches: int
    seconds: float
    backend: str = "torch"

    @property
    def intensity(self) -> float:
        """The FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def share(self, limits: Limits) -> float | None:
        """Return the least time by the machine's limits over the time; caches can exceed 1."""
        if self.seconds <= 0:
            return None
        return max(self.bytes / limits.bandwidth, self.flops / limits.peak) / self.seconds


def measure_limits() -> Limits:
    """Measure copy bandwidth and matrix peak of this machine: the best of a few tries."""
    source = torch.ones(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    square = torch.ones(_SIDE, _SIDE)
    product = torch.empty_like(square)
    return Limits(
        bandwidth=2 * _COPIED_BYTES / _best(lambda: target.copy_(source)),
        peak=2 * _SIDE**3 / _best(lambda: torch.mm(square, square, out=product)),
    )


def _best(work: Callable[[], object]) -> float:
    """Return the least seconds of a few runs after a first one."""
    taken = []
    for _ in range(_TRIES + 1):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def points_of(calls: Sequence[TracedCall]) -> list[Point]:
    """Return one point per op and backend, in the order of their first calls."""
    grouped: dict[tuple[str, str], list[TracedCall]] = {}
    for call in calls:
        grouped.setdefault((call.op, call.backend), []).append(call)
    return [
        Point(
            name=name,
            calls=len(mine),
            bytes=sum(call.cost.bytes for call in mine),
            flops=sum(call.cost.flops for call in mine),
            words=sum(call.cost.random_words for call in mine),
            launches=sum(call.cost.launches for call in mine),
            seconds=sum(call.seconds for call in mine),
            backend=backend,
        )
        for (name, backend), mine in grouped.items()
    ]


def figure(points: Sequence[Point], limits: Limits) -> Figure:
    """Draw the roofline with the points that take most time.

    Points that compute no FLOPs have no place there.

    Args:
        points: ops, and phases of torch.
        limits: limits of the machine.
    """
    slowest = sorted(points, key=lambda p: -p.seconds)
    drawn = [p for p in slowest if p.flops and p.bytes and p.seconds > 0][:MOST_POINTS]
    ridge = limits.peak / limits.bandwidth
    places = [ridge, *(p.intensity for p in drawn)]
    ends = (min(places) / 2, ridge, 2 * max(places))
    roof = Series(label="limits of this machine", x=ends, y=[limits.roof(x) / 1e9 for x in ends])
    return Figure(
        name="roofline",
        title="Ops against the machine's limits",
        caption="The sloping limit is the measured bandwidth of a copy, the level one the measured "
        "peak of a matrix product. Points above the slope find their bytes in a cache. `torch` is "
        "the step without privacy.",
        kind="roofline",
        x_label="FLOPs per byte",
        y_label="GFLOP/s",
        series=[
            roof,
            *(
                Series(label=p.name, x=[p.intensity], y=[p.flops / p.seconds / 1e9], points=True)
                for p in drawn
            ),
        ],
        log_x=True,
        log_y=True,
    )
