"""Mechanisms, their plans and their releases: the public name of ``dpkern.privacy.mechanisms``."""

from .privacy.mechanisms import *  # noqa: F403
from .privacy.mechanisms import __all__ as __all__
