"""The compiled CPU kernels of the ghost ops for convolutions."""

from __future__ import annotations

from typing import Any

KERNELS: tuple[tuple[str, Any, Any], ...] = ()
"""``(op, run, refuse)``."""
