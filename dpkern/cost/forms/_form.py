"""What a closed form is."""

from __future__ import annotations

from collections.abc import Callable

from ..primitives import Itemised

Form = Callable[..., Itemised]
"""An op's arguments, and by keyword what its data decides, to what it takes."""

__all__ = ["Form"]
