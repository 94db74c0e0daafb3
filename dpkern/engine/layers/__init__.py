"""Define rules that derive per-sample gradients from an operation's inputs and output gradients."""

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
