"""Layers of the frequency domain, bounded normalisations, the polynomial loss, and relevance.

``batch_first`` runs layers of models that have time first with the batch first.
"""

from . import functional, normalise, polynomial, relevance
from .circulant import BlockCirculantLinear
from .normalise import BatchMinMax, BoundedResponseNorm
from .sequence import batch_first
from .spectral_conv import SpectralConv2d

__all__ = [
    "BatchMinMax",
    "BlockCirculantLinear",
    "BoundedResponseNorm",
    "SpectralConv2d",
    "batch_first",
    "functional",
    "normalise",
    "polynomial",
    "relevance",
]
