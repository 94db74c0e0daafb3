"""All kinds of uses that a program can hold: importing this enters them."""

from . import linear, norm, recorded

__all__ = ["linear", "norm", "recorded"]
