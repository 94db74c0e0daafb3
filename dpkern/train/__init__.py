"""Train the demonstration models privately, on digits or on the user's own data."""

from ..engine.demo.models import MODELS, build, evaluate
from .data import Dataset, load
from .gradient_report import Epoch
from .loop import TrainingSteps
from .options import ModelOptions, PrivacyOptions, RunOptions, TrainOptions
from .session import Session

__all__ = [
    "MODELS",
    "Dataset",
    "Epoch",
    "ModelOptions",
    "PrivacyOptions",
    "RunOptions",
    "Session",
    "TrainOptions",
    "TrainingSteps",
    "build",
    "evaluate",
    "load",
]
