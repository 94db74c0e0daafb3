"""Utilities that Opacus' scripts import."""

from . import batch_memory_manager

__all__ = ["batch_memory_manager"]
