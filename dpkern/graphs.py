"""The public names of recorded steps and updates: CUDA graphs of them."""

from .engine.step_graph import StepGraph
from .step.graphs import UpdateGraph

__all__ = ["StepGraph", "UpdateGraph"]
