"""Registration of one backend's kernel for an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .schema import BoundCall


@dataclass(frozen=True)
class Kernel:
    """A backend's implementation of an op.

    Attributes:
        run: takes the checked call.
        refuse: why it cannot run a checked call, or None; None instead of it: it refuses none.
        direct: takes the op's own arguments, checks and runs them; it answers ``NotImplemented``
            where the call needs a closer look, and has then done nothing.
    """

    run: Callable[[BoundCall], Any]
    refuse: Callable[[BoundCall], str | None] | None = None
    direct: Callable[..., Any] | None = None
