"""Spectral ops: bands of frequencies, norms and sums of correlation maps without any per-sample
spectrum, the coordinates that a released crop is made of, and the published per-sample pipelines
in full."""

from . import literal
from ._band import Band
from ._basis import Pencil, pencil, smoothing, whitening
from .bins import bins_sum, conv_bins
from .circulant import circulant_gradient, circulant_norm, circulant_sum
from .conv_norm import conv_norm
from .conv_sum import conv_sum, sum_route
from .filter import filtered
from .whiten import conv_release, whitened_conv_norm, whitened_norm

__all__ = [
    "Band",
    "Pencil",
    "bins_sum",
    "circulant_gradient",
    "circulant_norm",
    "circulant_sum",
    "conv_bins",
    "conv_norm",
    "conv_release",
    "conv_sum",
    "filtered",
    "literal",
    "pencil",
    "smoothing",
    "sum_route",
    "whitened_conv_norm",
    "whitened_norm",
    "whitening",
]
