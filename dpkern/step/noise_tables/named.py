"""Noise sources by name, as commands and reports know them."""

from __future__ import annotations

from .cdt import CdtTable
from .ring import RingPrefetch
from .sample import SampleTable
from .source import NoiseSource

INLINE = "inline"
"""The name of noise that is drawn where it is added, as it is unless a source is named."""
_MADE: dict[str, type[NoiseSource]] = {
    source.name: source for source in (RingPrefetch, CdtTable, SampleTable)
}
SOURCES = (INLINE, *_MADE)
"""The names.

``ring`` has the bits of ``inline``; ``cdt`` is near its law, which certificates pay for; ``table``
protects nothing, and reports say so.
"""


def source_of(name: str | None) -> NoiseSource | None:
    """Make a source of this name; None means that kernels draw their own noise."""
    return None if name is None or name == INLINE else _MADE[name]()


__all__ = ["INLINE", "SOURCES", "source_of"]
