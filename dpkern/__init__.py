"""dpkern: certified differentially private training steps in compiled kernels."""

from __future__ import annotations

__version__ = "0.1.0"

from typing import TYPE_CHECKING, Any

from . import accounting, errors, interop, mechanisms, nn, ops, rng
from .base.dispatch import use
from .errors import (
    BackendError,
    DPKernError,
    InvalidInput,
    MissingDependency,
    PrivacyError,
    PrivacyWarning,
    UnsupportedModule,
)
from .step import DPStep

if TYPE_CHECKING:
    from .engine import PrivacyEngine
    from .engine.fix import fix
    from .engine.survey import survey

__all__ = [
    "BackendError",
    "DPKernError",
    "DPStep",
    "InvalidInput",
    "MissingDependency",
    "PrivacyEngine",
    "PrivacyError",
    "PrivacyWarning",
    "UnsupportedModule",
    "__version__",
    "accounting",
    "errors",
    "fix",
    "interop",
    "mechanisms",
    "nn",
    "ops",
    "rng",
    "survey",
    "use",
]


def __getattr__(name: str) -> Any:
    # Imported on use: many need only the step or the accounting.
    if name == "PrivacyEngine":
        from .engine import PrivacyEngine

        return PrivacyEngine
    if name == "fix":
        from .engine.fix import fix

        return fix
    if name == "survey":
        from .engine.survey import survey

        return survey
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
