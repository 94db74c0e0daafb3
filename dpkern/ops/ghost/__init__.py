"""Ghost ops: norms and weighted sums of per-sample gradients that are never stored.

They take a layer's input and output gradient.
"""

from .affine import group_norm_backward, layer_norm_backward, rms_norm_backward
from .conv import conv_gradient, conv_integer_sum, conv_norm, conv_sum, conv_sum_error
from .embedding import (
    embedding_integer_sum,
    embedding_norm,
    embedding_sum,
    tied_cross,
    tied_integer_sum,
    tied_sum_error,
)
from .explicit import clip_factors, contract, explicit_integer_sum, explicit_norm
from .linear import (
    linear_gradient,
    linear_integer_norm,
    linear_integer_sum,
    linear_norm,
    linear_norms,
    linear_sum,
    linear_sum_error,
)
from .rounded import rounded_gradient, rounded_sum

__all__ = [
    "clip_factors",
    "contract",
    "conv_gradient",
    "conv_integer_sum",
    "conv_norm",
    "conv_sum",
    "conv_sum_error",
    "embedding_integer_sum",
    "embedding_norm",
    "embedding_sum",
    "explicit_integer_sum",
    "explicit_norm",
    "group_norm_backward",
    "layer_norm_backward",
    "linear_gradient",
    "linear_integer_norm",
    "linear_integer_sum",
    "linear_norm",
    "linear_norms",
    "linear_sum",
    "linear_sum_error",
    "rms_norm_backward",
    "rounded_gradient",
    "rounded_sum",
    "tied_cross",
    "tied_integer_sum",
    "tied_sum_error",
]
