"""Register all kinds of uses that a program can replay, by importing their modules."""

from . import attention, linear, norm, recorded

__all__ = ["attention", "linear", "norm", "recorded"]
