"""Utilities that Opacus' scripts import."""

from . import batch_memory_manager, module_utils

__all__ = ["batch_memory_manager", "module_utils"]
