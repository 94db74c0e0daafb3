"""Write strict JSON, which any parser reads: infinities and NaN are words in quotes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Return the value as JSON knows it.

    Tuples become lists, and non-finite numbers the strings inf, -inf, nan.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Return strict JSON.

    An infinity that ``plain`` missed is an error, not a word no parser knows.
    """
    return json.dumps(plain(value), indent=indent, allow_nan=False)
