"""The public name of ``dpkern.step.noise_tables``: noise that is prefetched or read from tables."""

from .step.noise_tables import *  # noqa: F403
from .step.noise_tables import __all__ as __all__
