"""The public name of ``dpkern.base.errors``: the errors that dpkern raises."""

from .base.errors import (
    BackendError,
    CompileWarning,
    DPKernError,
    HookWarning,
    InvalidInput,
    LossWarning,
    MissingDependency,
    PrivacyError,
    PrivacyWarning,
    UnsupportedModule,
)

__all__ = [
    "BackendError",
    "CompileWarning",
    "DPKernError",
    "HookWarning",
    "InvalidInput",
    "LossWarning",
    "MissingDependency",
    "PrivacyError",
    "PrivacyWarning",
    "UnsupportedModule",
]
