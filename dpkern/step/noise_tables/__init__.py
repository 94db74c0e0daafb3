"""Noise that is not drawn where it is added: prefetched, or looked up in tables.

``RingPrefetch`` and ``CdtTable`` are private, ``SampleTable`` is not (``docs/noise_tables.md``).
"""

from ._table import TableShape
from .cdt import CdtTable
from .ring import RingPrefetch
from .sample import SampleTable
from .source import Layout, NoiseSource

__all__ = ["CdtTable", "Layout", "NoiseSource", "RingPrefetch", "SampleTable", "TableShape"]
