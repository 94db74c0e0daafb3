"""Updates recorded in CUDA graphs: the public name of ``dpkern.step.graphs``."""

from .step.graphs import UpdateGraph

__all__ = ["UpdateGraph"]
