"""The phases of a private step, under which costs are booked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..base.counts import Item, Itemised, weakest
from ..base.phase import BACK, CLIP, IMPORTANCE, LEARN, MAP, NOISE, PROJECT, UPDATE

ELSEWHERE = "elsewhere"
PHASES = (CLIP, MAP, IMPORTANCE, NOISE, BACK, UPDATE, LEARN, PROJECT, ELSEWHERE)
"""The phases in their order."""


def phase_of(name: str) -> str:
    """Return the phase of a line ``phase: line``."""
    return name.split(":")[0]


def by_line(items: Itemised) -> Itemised:
    """Sum the lines of the same name and kind, phase by phase."""
    return _merged(items, lambda name: name)


def by_phase(items: Itemised) -> Itemised:
    """Sum the lines of the same phase and kind."""
    return _merged(items, phase_of)


def _merged(items: Itemised, name_of: Callable[[str], str]) -> Itemised:
    found: dict[tuple[str, str], Item] = {}
    for item in items.items:
        name = name_of(item.name)
        before = found.get((name, item.kind))
        if before is None:
            note = item.note if name == item.name else ""
            found[name, item.kind] = replace(item, name=name, note=note)
        else:
            found[name, item.kind] = replace(
                before,
                counts=before.counts + item.counts,
                evidence=weakest((before.evidence, item.evidence)),
            )
    lines = [item for item in found.values() if item.counts]
    return Itemised(tuple(sorted(lines, key=lambda item: PHASES.index(phase_of(item.name)))))


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
    "by_line",
    "by_phase",
    "phase_of",
]
