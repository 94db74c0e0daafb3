"""The ops: contract, reference and cost; backends register their kernels for them."""

from . import clip, coef, ghost, noise, product, spectral, symbols, update

__all__ = ["clip", "coef", "ghost", "noise", "product", "spectral", "symbols", "update"]
