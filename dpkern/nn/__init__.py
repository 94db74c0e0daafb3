"""Layers of the frequency domain, bounded normalisations, the polynomial loss, and relevance."""

from . import functional, normalise, polynomial, relevance
from .circulant import BlockCirculantLinear
from .normalise import BatchMinMax, BoundedResponseNorm
from .spectral_conv import SpectralConv2d

__all__ = [
    "BatchMinMax",
    "BlockCirculantLinear",
    "BoundedResponseNorm",
    "SpectralConv2d",
    "functional",
    "normalise",
    "polynomial",
    "relevance",
]
