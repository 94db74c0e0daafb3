"""Spectral ops: bands of frequencies, the coordinates that a released crop is made of, and the
published per-sample pipelines in full."""

from . import literal
from ._band import Band
from ._basis import Pencil, pencil, smoothing, whitening

__all__ = ["Band", "Pencil", "literal", "pencil", "smoothing", "whitening"]
