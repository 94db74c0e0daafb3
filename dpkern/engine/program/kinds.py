"""Register all kinds of uses that a program can replay, by importing their modules."""

from . import attention, circulant, linear, norm, recorded, recurrent, stack, tapped

__all__ = ["attention", "circulant", "linear", "norm", "recorded", "recurrent", "stack", "tapped"]
