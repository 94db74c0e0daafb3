"""Spectral ops: bands of frequencies, and norms and sums of correlation maps.

No per-sample spectrum is stored, except by the published pipelines, which are here in full. A
released crop has coordinates of its own.
"""

from . import literal
from ._band import Band
from ._basis import WhitenedBasis, pencil, smoothing, whitening
from .bins import bins_sum, conv_bins
from .circulant import circulant_gradient, circulant_norm, circulant_product, circulant_sum
from .conv_norm import conv_norm
from .conv_sum import conv_sum, sum_route
from .filter import filtered
from .whiten import conv_release, whitened_norm
from .whitened_bins import norm_by_bins, whitened_bins

__all__ = [
    "Band",
    "WhitenedBasis",
    "bins_sum",
    "circulant_gradient",
    "circulant_norm",
    "circulant_product",
    "circulant_sum",
    "conv_bins",
    "conv_norm",
    "conv_release",
    "conv_sum",
    "filtered",
    "literal",
    "norm_by_bins",
    "pencil",
    "smoothing",
    "sum_route",
    "whitened_bins",
    "whitened_norm",
    "whitening",
]
