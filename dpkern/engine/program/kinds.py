"""Register all kinds of uses that a program can replay, by importing their modules."""

from . import linear, norm, recorded

__all__ = ["linear", "norm", "recorded"]
