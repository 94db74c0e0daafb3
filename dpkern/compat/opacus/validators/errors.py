"""The error of a module that cannot be trained privately, by Opacus' name."""

from ....base.errors import UnsupportedModule

UnsupportedModuleError = UnsupportedModule

__all__ = ["UnsupportedModuleError"]
