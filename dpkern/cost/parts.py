"""Split a step's lines into what grows with samples and what each step pays once.

Norms and clipped sums are paid for each sample. Maps, noise, the update and what a mechanism learns
are paid for each parameter and step, whatever the batch. Noise is apart from the update even where
one kernel does both.
"""

from __future__ import annotations

from ..base.counts import Counts, Itemised
from .phases import CLIP, NOISE, UPDATE, phase_of

SAMPLES, MAPS = "norms and sums", "maps and learning"
PARTS = (SAMPLES, MAPS, NOISE, UPDATE)
"""The parts; the first one is paid for each sample, the others for each step."""

NOISE_LINES = (
    *("noise words", "draws", "rounding words", "rounding bits", "release"),
    *("table reads", "index words", "table draws", "made ahead", "step counter"),
)
"""Lines of the fused update that make noise or release it on the lattice."""


def part_of(name: str) -> str:
    """Return the part that a line ``phase: line`` belongs to."""
    phase = phase_of(name)
    if phase == CLIP:
        return SAMPLES
    if phase == NOISE or (phase == UPDATE and name.split(": ", 1)[-1] in NOISE_LINES):
        return NOISE
    return UPDATE if phase == UPDATE else MAPS


def by_part(items: Itemised) -> dict[str, Counts]:
    """Return the counts of each part; they add up to those of the step."""
    found = dict.fromkeys(PARTS, Counts())
    for item in items.items:
        found[part_of(item.name)] += item.counts
    return found


__all__ = ["MAPS", "NOISE_LINES", "PARTS", "SAMPLES", "by_part", "part_of"]
