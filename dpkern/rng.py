"""Keys and streams of random words: the public name of ``dpkern.base.rng``."""

from .base.rng import KEY_BYTES, ROUNDS, Key, Purpose, Stream

__all__ = ["KEY_BYTES", "ROUNDS", "Key", "Purpose", "Stream"]
