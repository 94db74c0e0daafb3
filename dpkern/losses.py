"""Losses with one number for each sample: the public name of ``dpkern.nn.losses``."""

from .nn.losses import per_sample_cross_entropy, per_sample_mean

__all__ = ["per_sample_cross_entropy", "per_sample_mean"]
