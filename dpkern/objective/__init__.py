"""Trainers that perturb a loss: many runs at once, without engine, files or command line."""

from .methods import Method, NonPrivate, Schedule
from .spof import Outcome, Training, pooled

__all__ = ["Method", "NonPrivate", "Outcome", "Schedule", "Training", "pooled"]
