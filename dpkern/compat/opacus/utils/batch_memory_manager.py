"""The context that cuts logical batches into physical ones."""

from ....engine.loader import BatchMemoryManager

__all__ = ["BatchMemoryManager"]
