"""The ops: contract, reference and cost; backends register their kernels for them."""

from importlib import import_module

from ..base.namespace import open_namespace
from ..base.text import flat
from . import clip, coef, ghost, noise, product, recurrent, spectral, symbols, update

open_namespace(lambda: import_module("._library", __package__))

__all__ = [
    "clip",
    "coef",
    "flat",
    "ghost",
    "noise",
    "product",
    "recurrent",
    "spectral",
    "symbols",
    "update",
]
