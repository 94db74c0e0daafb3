"""Noise for a target, by Opacus' name."""

from .utils import get_noise_multiplier

__all__ = ["get_noise_multiplier"]
