"""Certified differentially private training steps in compiled kernels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors, interop, ops, rng
from .base import dispatch
from .base.dispatch import use
from .base.version import __version__
from .errors import (
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

dispatch.look_in(backends=f"{__name__}.ops.backends", costs=f"{__name__}.cost.forms")

if TYPE_CHECKING:
    from . import accounting, mechanisms, nn
    from .engine import PrivacyEngine
    from .engine.explain import explain
    from .engine.fix import fix
    from .engine.survey import survey
    from .step import DPStep

__all__ = [
    "BackendError",
    "CompileWarning",
    "DPKernError",
    "DPStep",
    "HookWarning",
    "InvalidInput",
    "LossWarning",
    "MissingDependency",
    "PrivacyEngine",
    "PrivacyError",
    "PrivacyWarning",
    "UnsupportedModule",
    "__version__",
    "accounting",
    "errors",
    "explain",
    "fix",
    "interop",
    "mechanisms",
    "nn",
    "ops",
    "rng",
    "survey",
    "use",
]


_MODULES = (
    "accounting",
    "audit",
    "engine",
    "graphs",
    "losses",
    "mechanisms",
    "nn",
    "noise_tables",
    "subjects",
)
_HOMES = {
    "DPStep": ".step",
    "PrivacyEngine": ".engine.privacy_engine",
    "explain": ".engine.explain",
    "fix": ".engine.fix",
    "survey": ".engine.survey",
}
"""Imported on use: many need the ops alone, or the accounting."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_HOMES})
