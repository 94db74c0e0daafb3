"""dpkern: certified differentially private training steps in compiled kernels."""

from __future__ import annotations

__version__ = "0.1.0"

from . import accounting, errors, mechanisms, ops, rng
from ._dispatch import use
from .errors import (
    BackendError,
    DPKernError,
    InvalidInput,
    MissingDependency,
    PrivacyError,
    UnsupportedModule,
)
from .step import DPStep

__all__ = [
    "BackendError",
    "DPKernError",
    "DPStep",
    "InvalidInput",
    "MissingDependency",
    "PrivacyError",
    "UnsupportedModule",
    "__version__",
    "accounting",
    "errors",
    "mechanisms",
    "ops",
    "rng",
    "use",
]
