"""One rule per operation: how its per-sample gradient follows from inputs and output gradients."""

from . import composite, conv, elementwise, embedding, expression, generic, linear, norm

__all__ = [
    "composite",
    "conv",
    "elementwise",
    "embedding",
    "expression",
    "generic",
    "linear",
    "norm",
]
