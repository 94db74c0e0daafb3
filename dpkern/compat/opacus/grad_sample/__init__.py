"""Refusals for Opacus' other ways to per-sample gradients: there is one way here."""

from . import functorch

__all__ = ["functorch"]
