"""All kinds of uses that a program can hold: importing this enters them."""

from . import attention, linear, norm, recorded

__all__ = ["attention", "linear", "norm", "recorded"]
