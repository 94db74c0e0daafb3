"""The public name of ``dpkern.base.interop``: arrays of other libraries in calls of ops."""

from .base.interop import call, has_arrays

__all__ = ["call", "has_arrays"]
