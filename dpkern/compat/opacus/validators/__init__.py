"""Check a module before training, and replace what can be replaced."""

from .errors import UnsupportedModuleError
from .module_validator import ModuleValidator

__all__ = ["ModuleValidator", "UnsupportedModuleError"]
