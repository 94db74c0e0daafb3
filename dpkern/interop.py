"""Arrays of other libraries in calls of ops: the public name of ``dpkern.base.interop``."""

from .base.interop import call, has_arrays

__all__ = ["call", "has_arrays"]
