"""Trainers that perturb a loss: many runs at once, without engine or command line."""

from .methods import Method, NonPrivate, Schedule
from .records import Records, generated, load
from .spof import Outcome, Training, pooled

__all__ = [
    "Method",
    "NonPrivate",
    "Outcome",
    "Records",
    "Schedule",
    "Training",
    "generated",
    "load",
    "pooled",
]
