"""The phases of a private step, under which costs are booked."""

from __future__ import annotations

from .primitives import Counts, Item, Itemised

CLIP, MAP, NOISE, BACK = "clip and sum", "map", "noise", "map back"
UPDATE, LEARN, IMPORTANCE, PROJECT = "update", "learning", "importance", "projection"
ELSEWHERE = "elsewhere"
PHASES = (CLIP, MAP, IMPORTANCE, NOISE, BACK, UPDATE, LEARN, PROJECT, ELSEWHERE)
"""In their order."""


def by_phase(items: Itemised) -> Itemised:
    """The sums of lines ``phase: line`` of the same phase and kind, in the order of ``PHASES``."""
    sums: dict[tuple[str, str], Counts] = {}
    for item in items.items:
        key = item.name.split(":")[0], item.kind
        sums[key] = sums.get(key, Counts()) + item.counts
    order = sorted(sums, key=lambda key: (PHASES.index(key[0]), key[1]))
    return Itemised(tuple(Item(name=p, kind=k, counts=sums[p, k]) for p, k in order if sums[p, k]))


__all__ = [
    "BACK",
    "CLIP",
    "ELSEWHERE",
    "IMPORTANCE",
    "LEARN",
    "MAP",
    "NOISE",
    "PHASES",
    "PROJECT",
    "UPDATE",
    "by_phase",
]
