"""The errors that dpkern raises: the public name of ``dpkern.base.errors``."""

from .base.errors import (
    BackendError,
    DPKernError,
    InvalidInput,
    MissingDependency,
    PrivacyError,
    PrivacyWarning,
    UnsupportedModule,
)

__all__ = [
    "BackendError",
    "DPKernError",
    "InvalidInput",
    "MissingDependency",
    "PrivacyError",
    "PrivacyWarning",
    "UnsupportedModule",
]
