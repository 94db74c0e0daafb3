"""What scripts import of Opacus' ways to per-sample gradients, of which there is one here."""

from . import functorch

__all__ = ["functorch"]
