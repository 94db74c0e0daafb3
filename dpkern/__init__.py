"""dpkern: certified differentially private training steps in compiled kernels."""

from __future__ import annotations

__version__ = "0.1.0"

from . import errors, ops, rng
from ._dispatch import use
from .errors import (
    BackendError,
    DPKernError,
    InvalidInput,
    MissingDependency,
    PrivacyError,
    UnsupportedModule,
)

__all__ = [
    "BackendError",
    "DPKernError",
    "InvalidInput",
    "MissingDependency",
    "PrivacyError",
    "UnsupportedModule",
    "__version__",
    "errors",
    "ops",
    "rng",
    "use",
]
