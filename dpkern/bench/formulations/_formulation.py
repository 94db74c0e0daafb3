"""A formulation of an op's work in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

Arguments = dict[str, Any]
Prepare = Callable[[Arguments], Callable[[], Any]]


@dataclass(frozen=True)
class Formulation:
    """A way to do an op's work with torch alone.

    Attributes:
        name: the idea, in two words.
        prepare: allocates buffers for an op's arguments and returns the call. It writes what the
            op writes and returns what the op returns, as far as it makes it.
        fits: whether it does the work of these arguments.
        draws: it draws noise of its own, so that its values are not the op's.
        tolerance: of its difference to the reference, beyond the usual one.
        compiles: ``torch.compile`` makes it faster than what is written by hand, so that all but
            quick runs time that too.
        in_parts: prepares it with parts that are compiled, where the compiler makes less of the
            whole call, such as a loop over time.
    """

    name: str
    prepare: Prepare
    fits: Callable[[Arguments], bool] = lambda _: True
    draws: bool = False
    tolerance: float = 0.0
    compiles: bool = False
    in_parts: Prepare | None = None


def with_compiled(found: list[Formulation], *, every: bool) -> list[Formulation]:
    """Return the formulations that fit a case, and compiled those that gain by it, or all."""

    def compiled(one: Formulation) -> Formulation:
        def prepare(args: Arguments) -> Callable[[], Any]:
            made: Callable[[], Any] = torch.compile(one.prepare(args), dynamic=False)
            return made

        return replace(one, name=f"{one.name}, compiled", prepare=one.in_parts or prepare)

    return [*found, *(compiled(one) for one in found if every or one.compiles)]
