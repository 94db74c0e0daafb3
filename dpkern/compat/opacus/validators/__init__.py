"""Check a module before training, and replace what can be replaced."""

from .errors import (
    IllegalModuleConfigurationError,
    ShouldReplaceModuleError,
    UnsupportedModuleError,
)
from .module_validator import ModuleValidator

__all__ = [
    "IllegalModuleConfigurationError",
    "ModuleValidator",
    "ShouldReplaceModuleError",
    "UnsupportedModuleError",
]
