"""The ops: contract, reference and cost; backends register their kernels for them."""

from . import clip, ghost, noise, product, spectral, symbols, update

__all__ = ["clip", "ghost", "noise", "product", "spectral", "symbols", "update"]
