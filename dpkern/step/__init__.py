"""A private step: the two calls that spend privacy, ``add`` and ``finish``."""

from .step import DPStep

__all__ = ["DPStep"]
