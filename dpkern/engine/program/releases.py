"""Release maps of the parameters of a program, which convolutions clip by norms of their own."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

from ...privacy.mechanisms import Plan
from ...privacy.mechanisms.plan import Block
from ...privacy.mechanisms.release import Taps
from ..uses import ParameterSource

_RELEASE = attrgetter("release")


def is_replayed(block: Block) -> bool:
    """Whether a program can clip and sum what this block releases: itself, or kernels' taps."""
    release = block.release
    return release is None or (isinstance(release, Taps) and release.site.kind == "conv")


class Releases:
    """The release maps of a step's parameters, to compare with later ones.

    Args:
        slots: all parameters, in their frozen order.
    """

    def __init__(self, slots: Sequence[ParameterSource]) -> None:
        self._slots = list(slots)
        self.seen = tuple(map(_RELEASE, slots))
        """The map of each, which its norms are taken for."""

    def stay(self) -> bool:
        """Whether every parameter has the map that it had."""
        now = tuple(map(_RELEASE, self._slots))
        if all(map(is_, now, self.seen)):
            return True
        if now != self.seen:
            return False
        self.seen = now  # of a plan that was made anew, with the same maps
        return True

    def are_of(self, plan: Plan) -> bool:
        """Whether a plan releases the parameters by the maps that their norms were taken for."""
        return self.stay() and all(map(is_, map(_RELEASE, plan.blocks), self.seen))


__all__ = ["Releases", "is_replayed"]
