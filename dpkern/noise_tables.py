"""Noise made ahead or read from tables: the public name of ``dpkern.step.noise_tables``."""

from .step.noise_tables import *  # noqa: F403
from .step.noise_tables import __all__ as __all__
