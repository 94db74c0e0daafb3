"""Private training of the demonstration models on digits or on the user's own data."""

from ..engine.demo.models import MODELS, build, evaluate
from .data import Dataset, load
from .gradient_report import Epoch
from .loop import Training
from .options import ModelOptions, Options, PrivacyOptions, RunOptions
from .session import Session

__all__ = [
    "MODELS",
    "Dataset",
    "Epoch",
    "ModelOptions",
    "Options",
    "PrivacyOptions",
    "RunOptions",
    "Session",
    "Training",
    "build",
    "evaluate",
    "load",
]
