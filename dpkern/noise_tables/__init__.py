"""Noise that is not drawn where it is added: made ahead, or read from tables."""

from .ring import RingPrefetch
from .source import Layout, NoiseSource

__all__ = ["Layout", "NoiseSource", "RingPrefetch"]
