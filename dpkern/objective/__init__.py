"""Trainers that perturb a loss: many runs at once, without engine or command line."""

from .methods import Method, NonPrivate, VisitSchedule
from .records import Records, generated, load
from .spof import SpofOutcome, SpofTraining, pooled

__all__ = [
    "Method",
    "NonPrivate",
    "Records",
    "SpofOutcome",
    "SpofTraining",
    "VisitSchedule",
    "generated",
    "load",
    "pooled",
]
