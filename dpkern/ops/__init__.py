"""The ops: contract, reference and cost; backends register their kernels for them."""

from . import clip, noise, update

__all__ = ["clip", "noise", "update"]
