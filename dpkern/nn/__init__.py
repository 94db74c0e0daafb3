"""Layers of the frequency domain: block-circulant linear layers, convolutions by FFT."""

from . import functional
from .circulant import BlockCirculantLinear
from .spectral_conv import SpectralConv2d

__all__ = ["BlockCirculantLinear", "SpectralConv2d", "functional"]
