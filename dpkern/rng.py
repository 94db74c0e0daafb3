"""The public name of ``dpkern.base.rng``: keys and streams of random words."""

from .base.rng import KEY_BYTES, ROUNDS, Key, Purpose, Stream

__all__ = ["KEY_BYTES", "ROUNDS", "Key", "Purpose", "Stream"]
