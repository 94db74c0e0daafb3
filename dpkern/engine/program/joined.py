"""Join the gradients of a parameter that several uses of a step share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..merge import merge
from ..per_sample_gradients import PerSampleGradients
from .site import NotReplayed, Part

if TYPE_CHECKING:
    from .run import ReplayRun


@dataclass(eq=False)
class JoinedPart(Part):
    """Shares of one parameter, whose gradients are added before any norm is taken.

    Attributes:
        shares: the parts of each use.
    """

    shares: Sequence[Part] = field(default_factory=tuple)

    @classmethod
    def of(cls, shares: Sequence[Part]) -> JoinedPart:
        """Return the parameter's part of a step in which it has these shares.

        Raises:
            NotReplayed: uses whose gradients are added in no fixed way.
        """
        slot, sites = shares[0].slot, [share.site for share in shares]
        ways = {site.joined_as for site in sites}
        paddings = {site.padding_idx for site in sites if site.facts.operation == "embedding"}
        biases = [share is share.site.bias_part for share in shares]
        operands = ways == {"operands"} and len(paddings) <= 1 and not any(biases)
        explicit = "" not in ways and (all(biases) or (ways == {"rows"} and not any(biases)))
        if not (operands or explicit):
            raise NotReplayed(f"{slot.name} is used more than once, in ways that are not joined")
        for share in shares:
            share.joined = True
        return cls(slot, sites[0], explicit=explicit, normed=not explicit, shares=shares)

    def gradients(self, run: ReplayRun) -> PerSampleGradients:
        """Return the gradients over all uses, which are added in the order of their arrival."""
        mine = {share.site.index: share for share in self.shares}
        arrived = [mine[index] for index in run.order if index in mine]
        return merge([share.site.gradients(share, run.held[share.site.index]) for share in arrived])


def parts_of(shares: Sequence[Part]) -> list[Part]:
    """Return one part for each parameter, by its index.

    Raises:
        NotReplayed: a parameter that is used in ways that no program joins.
    """
    by_slot: dict[int, list[Part]] = {}
    for share in shares:
        by_slot.setdefault(share.slot.index, []).append(share)
    return [
        own[0] if len(own) == 1 else JoinedPart.of(own)
        for own in (by_slot[index] for index in sorted(by_slot))
    ]


__all__ = ["JoinedPart", "parts_of"]
