"""The public name of ``dpkern.step.graphs``: updates recorded in CUDA graphs."""

from .step.graphs import UpdateGraph

__all__ = ["UpdateGraph"]
