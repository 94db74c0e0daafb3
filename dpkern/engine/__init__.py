"""Train PyTorch models privately: draw batches, capture gradients, take private steps."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loader import BatchMemoryManager, PrivateLoader
    from .privacy_engine import PrivacyEngine

__all__ = ["BatchMemoryManager", "PrivacyEngine", "PrivateLoader"]

_HOMES = {
    "BatchMemoryManager": ".loader",
    "PrivacyEngine": ".privacy_engine",
    "PrivateLoader": ".loader",
}


def __getattr__(name: str) -> Any:
    # Imported on use: the samplers alone need no engine.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
