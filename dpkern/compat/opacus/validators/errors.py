"""Errors of modules that cannot be trained privately, by Opacus' names.

dpkern raises one class for all of them, so that an ``except`` clause of any name catches it.
"""

from ....base.errors import UnsupportedModule

UnsupportedModuleError = UnsupportedModule
ShouldReplaceModuleError = UnsupportedModule
IllegalModuleConfigurationError = UnsupportedModule

__all__ = [
    "IllegalModuleConfigurationError",
    "ShouldReplaceModuleError",
    "UnsupportedModuleError",
]
