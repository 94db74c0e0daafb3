"""The public name of ``dpkern.nn.losses``: losses with one number for each sample."""

from .nn.losses import per_sample_cross_entropy, per_sample_mean

__all__ = ["per_sample_cross_entropy", "per_sample_mean"]
