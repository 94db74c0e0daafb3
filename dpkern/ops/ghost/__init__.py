"""Ghost ops: norms and weighted sums of per-sample gradients from a layer's input and output
gradient, without storing the per-sample gradients."""

from .conv import conv_gradient, conv_norm, conv_sum

__all__ = ["conv_gradient", "conv_norm", "conv_sum"]
