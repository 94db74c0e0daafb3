"""Ghost ops: norms and weighted sums of per-sample gradients from a layer's input and output
gradient, without storing the per-sample gradients."""

from .affine import group_norm_backward, layer_norm_backward, rms_norm_backward
from .conv import conv_gradient, conv_norm, conv_sum
from .embedding import embedding_norm, embedding_sum, tied_cross
from .explicit import clip_factors, contract, explicit_norm
from .linear import linear_gradient, linear_norm, linear_sum

__all__ = [
    "clip_factors",
    "contract",
    "conv_gradient",
    "conv_norm",
    "conv_sum",
    "embedding_norm",
    "embedding_sum",
    "explicit_norm",
    "group_norm_backward",
    "layer_norm_backward",
    "linear_gradient",
    "linear_norm",
    "linear_sum",
    "rms_norm_backward",
    "tied_cross",
]
