"""One rule per operation: how its per-sample gradient follows from inputs and output gradients."""

from . import (
    circulant,
    composite,
    conv,
    elementwise,
    embedding,
    expression,
    generic,
    linear,
    norm,
    other,
    spectral_conv,
    tapped,
)

__all__ = [
    "circulant",
    "composite",
    "conv",
    "elementwise",
    "embedding",
    "expression",
    "generic",
    "linear",
    "norm",
    "other",
    "spectral_conv",
    "tapped",
]
