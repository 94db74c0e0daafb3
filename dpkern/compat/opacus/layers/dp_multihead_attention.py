"""Attention by the module path that Opacus' scripts import."""

from . import DPMultiheadAttention

__all__ = ["DPMultiheadAttention"]
